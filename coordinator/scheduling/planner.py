"""The planner: converts running jobs to the plans of their steps. Pure: no clock, no I/O.

Steps alternate between one chunk of one job and one token of every sequence that is ready.
"""

from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import NamedTuple

from coordinator.kv_cache.block_placer import BlockPlacer
from coordinator.kv_cache.segments import SegmentStore
from coordinator.kv_cache.token_paths import TokenPath
from coordinator.recovery.fault_score import SuspectedJobs
from coordinator.recovery.recovery import RecoveryManager
from coordinator.scheduling.fair_queue import FairOrder
from coordinator.scheduling.jobs import Job
from coordinator.scheduling.row_selection import RowSelector
from coordinator.scheduling.sequences import SequenceJob
from coordinator.scheduling.speculation import Drafter
from coordinator.scheduling.throughput import Speeds
from longleaf.config import EngineConfig
from longleaf.rank_protocol.step import Decode, Row, StepPlan, Work

LEAST_SHARE = 0.25
"""Minimum time of a chunk as a part of a decode step's time. It applies even when nothing is left of the latency
target, so that prefill progresses."""
MAX_UNDER_WAY = 2
"""Maximum number of plans that the ranks hold: the one that they execute, and the next one."""


class JobFailed(Exception):
    """A job cannot be planned; its cause is unexpected."""

    def __init__(self, job: Job, others: Sequence[SequenceJob] = ()) -> None:
        """`others` had rows in the same plan, which is discarded."""
        super().__init__(f"job {job.id}")
        self.job = job
        self.others = others


class Budget:
    """Chunk sizes from measured speeds. Chunks and decode steps alternate, so the time per token is that of one of
    each.

    All chunks but the last of a prompt are whole blocks, so that the number of blocks does not depend on the chunk
    sizes. Where `chunk_size` allows, a chunk has a block for each rank: shorter chunks would take as long.
    """

    def __init__(self, config: EngineConfig, num_ranks: int, speeds: Speeds) -> None:
        block = config.block_size
        self._block = block
        self._largest = max(block, config.chunk_size // block * block)
        self.change_ranks(num_ranks)
        self._target = config.target_itl_ms / 1000
        self._speeds = speeds

    def change_ranks(self, num_ranks: int) -> None:
        self._smallest = min(self._largest, self._block * num_ranks)

    def chunk_size(self, job: Job, *, is_alone: bool) -> int:
        """Maximum number of tokens in the next chunk of `job`. `is_alone` is true when no sequence decodes."""
        return self._size(job.seconds_per_token or self._speeds.prefill_token.value, is_alone=is_alone)

    def recompute_size(self, *, is_alone: bool) -> int:
        """Maximum number of tokens that are recomputed in a step."""
        return self._size(self._speeds.prefill_token.value, is_alone=is_alone)

    def probe_size(self, *, is_alone: bool) -> int:
        """Maximum number of probe tokens in a step. A probe token takes longer than a token of a chunk, because it is
        scored or its attention is attributed."""
        return self._size(self._speeds.probe_token.value, is_alone=is_alone)

    def _size(self, per_token: float | None, *, is_alone: bool) -> int:
        if is_alone:
            return self._largest
        if per_token is None:
            return self._smallest
        step = self._speeds.decode_step.value or 0.0
        seconds = max(self._target - step, LEAST_SHARE * step)
        if per_token * self._largest <= seconds:
            return self._largest
        return max(self._smallest, int(seconds / per_token) // self._smallest * self._smallest)


class InflightPlan(NamedTuple):
    """A plan under way and its jobs, each with its number of begins. Results for a job that has ended or restarted
    since are ignored."""

    plan: StepPlan
    jobs: tuple[tuple[Job, int], ...]
    is_apart: bool
    """Nothing else may be under way."""


class Planner:
    """Makes plans, and keeps those under way in order. Two can be under way, so that the next one is queued when the
    ranks finish the first."""

    def __init__(
        self,
        config: EngineConfig,
        placer: BlockPlacer,
        segments: SegmentStore,
        speeds: Speeds,
        recovery: RecoveryManager,
        drafter: Drafter,
        epoch: int,
    ) -> None:
        self._placer = placer
        self._drafter = drafter
        self._segments = segments
        self._recovery = recovery
        self._epoch = epoch
        self._budget = Budget(config, len(placer.pools), speeds)
        self._portions = RowSelector()
        self._suspects = SuspectedJobs()
        self._flights: deque[InflightPlan] = deque()
        self._forgotten: list[int] = []
        self._was_prefill = False
        """Whether the last plan was not a decode step. The turn is kept while a job waits to run separately."""
        self._was_recovery = False
        self.turns = FairOrder()
        """Turns of the jobs that may have the next chunk."""
        self.step = 0
        """Number of the last plan."""

    @property
    def is_full(self) -> bool:
        """No more plans may be under way."""
        return len(self._flights) >= MAX_UNDER_WAY or any(flight.is_apart for flight in self._flights)

    @property
    def under_way(self) -> set[int]:
        """Ids of the jobs in plans under way."""
        return {job.id for flight in self._flights for job, _ in flight.jobs}

    def forget(self, sequence: int) -> None:
        """Adds a stopped sequence to the release messages of the next plan."""
        self._forgotten.append(sequence)

    def plan(self, running: Collection[Job], paths: Callable[[], Iterable[TokenPath]]) -> StepPlan | None:
        """The next step, or None when nothing is ready. `paths` returns the paths of jobs that wait for lost keys, the
        most urgent first. Raises JobFailed and RecoveryFailed."""
        prefilling = self._prefilling(running)
        decoding = [job for job in running if isinstance(job, SequenceJob) and job.has_rows]
        if not self._recovery.is_over:
            return self._plan_amid_recovery(prefilling, decoding, paths())
        if not prefilling and not decoding:
            return None
        if prefilling and not (self._was_prefill and decoding):
            return self._plan_chunk(prefilling, is_alone=not decoding)
        return self._plan_rows(decoding)

    def _prefilling(self, running: Collection[Job]) -> list[Job]:
        """Jobs that may have the next chunk; none while a chunk is under way. A chunk is long, so that little time is
        lost by sending the next one only after it. A new or cancelled job then waits for one chunk, not two."""
        if any(not isinstance(flight.plan.work, Decode) for flight in self._flights):
            return []
        return [job for job in running if job.prefill.has_chunks and job.tail.is_ready]

    def _plan_amid_recovery(
        self, prefilling: list[Job], decoding: Sequence[SequenceJob], paths: Iterable[TokenPath]
    ) -> StepPlan | None:
        """Recovery plans alternate with chunks, and both with decode steps. Ranks that lack windows do nothing else
        before they receive them."""
        recovery, is_long_under_way = self._recovery, any(not isinstance(f.plan.work, Decode) for f in self._flights)
        is_alone, is_apart = not decoding, recovery.is_suspected
        if is_apart and self._flights:
            return None
        if not is_long_under_way and (recovery.needs_windows or is_alone or not self._was_prefill):
            is_turn = recovery.needs_windows or not prefilling or not self._was_recovery
            work = recovery.plan(paths, self._budget.recompute_size(is_alone=is_alone)) if is_turn else None
            self._was_recovery = work is not None
            if work is not None:
                return self._plan(work, [], is_apart=is_apart)
            if prefilling:
                return self._plan_chunk(prefilling, is_alone=is_alone)
        if is_alone or recovery.needs_windows:
            return None
        return self._plan_rows(decoding)

    def _plan_chunk(self, jobs: list[Job], *, is_alone: bool) -> StepPlan | None:
        job = self.turns.order(jobs, lambda job: job.last_turn)[0]
        is_apart = self._suspects.runs_alone(job)
        if is_apart and self._flights:
            return None
        size = self._budget.chunk_size(job, is_alone=is_alone)
        try:
            work = job.next_chunk(self._placer, size, self.step + 1)
        except Exception as error:
            raise JobFailed(job) from error
        self.turns.record_turn(job.request.scheduling.account, len(work.token_ids))
        return self._plan(work, [job], is_apart=is_apart)

    def _plan_rows(self, jobs: Sequence[SequenceJob]) -> StepPlan | None:
        is_apart = False
        if self._suspects:
            jobs = self._suspects.schedulable(jobs)
            is_apart = self._suspects.runs_alone(jobs[0])
        under_way = [flight.plan for flight in self._flights if isinstance(flight.plan.work, Decode)]
        if (is_apart and self._flights) or any(plan.num_drafts for plan in under_way):
            return None
        may_draft = self._placer.num_draft_states != 0
        if under_way and may_draft and self._drafter.needs_previous_result(jobs):
            return None
        is_alone = all(job.prompt.is_probe for job in jobs)
        jobs = self._portions.next(jobs, self._budget.probe_size(is_alone=is_alone))
        rows = list[Row]()
        for job in jobs:
            try:
                rows.append(job.next_row(self._placer))
            except Exception as error:
                raise JobFailed(job, jobs[: len(rows)]) from error
        work = Decode(tuple(rows) if under_way else self._drafter.draft(jobs, rows, self._placer))
        return self._plan(work, jobs, is_apart=is_apart)

    def _plan(self, work: Work, jobs: Sequence[Job], *, is_apart: bool) -> StepPlan:
        self.step += 1
        self._was_prefill = not isinstance(work, Decode)
        forgotten, self._forgotten = tuple(self._forgotten), []
        released, cuts = self._segments.pop_forgotten(), self._segments.pop_cuts()
        plan = StepPlan(self._epoch, self.step, work, released, cuts, forgotten)
        self._flights.append(InflightPlan(plan, tuple((job, job.num_begins) for job in jobs), is_apart))
        return plan

    def complete(self, plan: StepPlan) -> list[Job]:
        """Removes the first plan under way, which must be `plan`. Returns its jobs that have not ended or restarted
        since."""
        first, jobs, _ = self._flights.popleft()
        assert first is plan, "plans are committed in order"
        landed = [job for job, num_begins in jobs if job.is_running and job.num_begins == num_begins]
        if self._suspects:
            self._suspects.clear(landed, plan.work)
        return landed

    # --- end of an epoch ---

    def roll_back(
        self, steps: Collection[int], suspicion: int, jobs: Container[Job]
    ) -> tuple[list[Work], list[tuple[Job, Work]]]:
        """Discards the plans under way. Returns the work of those among `steps`, and the jobs among `jobs` that have
        reached the DROP_SCORE, each with that work."""
        ended = [flight for flight in self._flights if flight.plan.step in steps]
        self._flights.clear()
        self._suspects.retain_only(jobs)
        guilty = list[tuple[Job, Work]]()
        for flight in ended:
            work = flight.plan.work
            landed = [job for job, num_begins in flight.jobs if job.is_running and job.num_begins == num_begins]
            found = self._suspects.add_suspicion(landed, work, suspicion, is_certain=len(steps) == 1)
            guilty += [(job, work) for job in found]
        return [flight.plan.work for flight in ended], guilty

    def change_ranks(self, epoch: int) -> None:
        """Continues with the ranks of another epoch, which know no sequences."""
        assert not self._flights
        self._epoch = epoch
        self._forgotten.clear()
        self._budget.change_ranks(len(self._placer.pools))
