"""What the next step does. Pure: no clock, no I/O; the engine owns both.

A job is admitted to a queue, begins when its blocks can be reserved (strictly first come, first served), and then can
never run out of room. Steps alternate between one chunk of one job and one token of every sequence that is ready.
"""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as TokenIds
from typing import NamedTuple

import msgspec

from coordinator.blocks import Placer
from coordinator.contexts import Contexts, Segment, Segments
from coordinator.events import Ended, EndReason, Event, Progress, Prompt, Started, Tokens
from coordinator.jobs import Ingest, Job, Sequence
from coordinator.limits import Limits
from longleaf.config import EngineConfig
from longleaf.errors import AlreadyExists, InvalidArgument, LongleafError, ResourceExhausted
from longleaf.step import Decode, Prefill, StepPlan, StepResult

RETRY_SECONDS = 2.0
MAX_UNDER_WAY = 2
"""Plans that the ranks may hold: the one they execute, and the one after it."""


class Acknowledged(msgspec.Struct, frozen=True):
    """The document of an ingest is part of its context."""

    context: str


Outcome = tuple[int, Event | Acknowledged | LongleafError]
"""Job id, and what its stream gets. An error, Ended and Acknowledged are the last one of a job."""


class Flight(NamedTuple):
    """A plan under way, and the jobs it works for, each with the number of times that it has begun: what the plan
    yields for a job that has ended since, or begun anew, is dropped."""

    plan: StepPlan
    jobs: tuple[tuple[Job, int], ...]


class Scheduler:
    """Jobs, their segments and their blocks. Plans are committed in the order in which they were scheduled; two may be
    under way, so that the ranks find the next one when they have finished the first.

    Blocks that are freed while plans under way still write to them may be given out again at once: the plan that uses
    them anew is scheduled later, and ranks execute plans in order.
    """

    def __init__(self, config: EngineConfig, placer: Placer, max_positions: int, epoch: int) -> None:
        self._config = config
        self._placer = placer
        self._limits = Limits(config, placer, max_positions)
        self._epoch = epoch
        self.segments = Segments(placer)
        self.contexts = Contexts(self.segments)
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        self._forgotten: list[int] = []
        self._outcomes: list[Outcome] = []
        self._flights: deque[Flight] = deque()
        self._step = 0
        self._was_prefill = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    # --- admit ---

    def admit(self, job_id: int, prompt: Prompt) -> None:
        """Queues a generation. Raises InvalidArgument, NotFound or ResourceExhausted, and then keeps nothing."""
        prompt.sampling.check()
        path = self.contexts.get(prompt.context).path if prompt.context is not None else ()
        if not prompt.token_ids:
            raise InvalidArgument("input", "has no tokens")
        job = Sequence(job_id, path, prompt, self._limits.num_prefill(prompt))
        self._limits.check(job, "input", 1)
        job.num_blocks = self._limits.check(job, "sampling.max_token_count", prompt.sampling.max_tokens)
        self._enqueue(job)

    def admit_ingest(self, job_id: int, context: str, token_ids: TokenIds[int], *, append: bool) -> None:
        """Queues a document. Raises AlreadyExists, NotFound, InvalidArgument or ResourceExhausted."""
        is_busy = any(job.context == context for job in self._jobs() if isinstance(job, Ingest))
        if not append and (is_busy or context in self.contexts):
            raise AlreadyExists(f"contexts/{context}")
        path = self.contexts.get(context).path if append else ()
        if not token_ids:
            raise InvalidArgument("text", "has no tokens")
        if is_busy:
            raise ResourceExhausted(f"contexts/{context}", "another document is being appended", RETRY_SECONDS)
        job = Ingest(job_id, path, token_ids, context)
        job.num_blocks = self._limits.check(job, "text", 0)
        self._enqueue(job)

    def _enqueue(self, job: Job) -> None:
        if self.num_waiting >= self._config.max_waiting:
            raise ResourceExhausted("queue", f"{self.num_waiting} requests wait already", RETRY_SECONDS)
        if self._pinned_blocks() + job.num_blocks > self._placer.num_blocks:
            raise self._no_room(job)
        self.segments.retain(job.path)
        self._waiting.append(job)

    def _pinned_blocks(self) -> int:
        """Blocks that waiting does not free: contexts, and documents that will become part of them."""
        kept: dict[int, Segment] = {s.id: s for context in self.contexts.list() for s in context.path}
        coming = sum(job.num_blocks for job in self._jobs() if isinstance(job, Ingest))
        return sum(segment.num_blocks for segment in kept.values()) + coming

    def _no_room(self, job: Job) -> ResourceExhausted:
        size = self._placer.block_size
        needed, total = job.num_blocks * size, self._placer.num_blocks * size
        held = self._pinned_blocks() * size
        text = f"{needed} tokens are needed, and of {total} the contexts keep {held}; delete a context"
        return ResourceExhausted("pool", text)

    def _jobs(self) -> Iterable[Job]:
        yield from self._waiting
        yield from self._running.values()

    # --- schedule ---

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing is ready or enough is under way. Outcomes may appear: see `drain`."""
        if len(self._flights) == MAX_UNDER_WAY:
            return None
        self._begin_waiting()
        prefilling = self._prefilling()
        decoding = [job for job in self._running.values() if isinstance(job, Sequence) and job.has_rows]
        if not prefilling and not decoding:
            return None
        self._was_prefill = bool(prefilling) and not (self._was_prefill and decoding)
        if self._was_prefill:
            return self._plan_chunk(min(prefilling, key=lambda job: job.last_turn))
        return self._plan_rows(decoding)

    def _prefilling(self) -> list[Job]:
        """Jobs that may have the next chunk; none while a chunk is under way. A chunk is long, so little is lost when
        the next one is sent only after it, and whoever comes or is cancelled meanwhile waits for one chunk, not two."""
        if any(isinstance(flight.plan.work, Prefill) for flight in self._flights):
            return []
        return [job for job in self._running.values() if job.has_chunks]

    def _plan_chunk(self, job: Job) -> StepPlan:
        work = job.next_chunk(self._placer, self._config.chunk_size)
        job.last_turn = self._step + 1
        return self._plan(work, [job])

    def _plan_rows(self, jobs: TokenIds[Sequence]) -> StepPlan:
        return self._plan(Decode(tuple(job.next_row(self._placer) for job in jobs)), jobs)

    def _plan(self, work: Prefill | Decode, jobs: TokenIds[Job]) -> StepPlan:
        self._step += 1
        forgotten, self._forgotten = tuple(self._forgotten), []
        plan = StepPlan(self._epoch, self._step, work, self.segments.take_forgotten(), forgotten)
        self._flights.append(Flight(plan, tuple((job, job.num_begins) for job in jobs)))
        return plan

    def _begin_waiting(self) -> None:
        while self._waiting:
            job = self._waiting[0]
            num_sequences = sum(1 for other in self._running.values() if isinstance(other, Sequence))
            if isinstance(job, Sequence) and num_sequences >= self._config.max_sequences:
                return
            reservation = self._placer.reserve(job.num_blocks)
            if reservation is None:
                # Whatever the contexts kept when it was queued, the job fitted beside them, and what came later is
                # behind it: so only what runs can be in its way.
                assert self._running, "a queued job can never begin"
                return
            self._waiting.popleft()
            job.begin(self.segments.create(job.start), reservation)
            self._start(job)

    def _start(self, job: Job) -> None:
        self._running[job.id] = job
        job.last_turn = self._step
        if isinstance(job, Sequence):
            self._outcomes.append((job.id, Started(job.num_prompt, job.start)))

    # --- commit ---

    def commit(self, plan: StepPlan, result: StepResult, now: float = 0.0) -> list[Outcome]:
        """Takes in what the ranks did. `now` in seconds since the epoch dates contexts."""
        flight = self._flights.popleft()
        assert flight.plan is plan, "plans are committed in order"
        assert (plan.epoch, plan.step) == (result.epoch, result.step)
        for job, num_begins in flight.jobs:
            if self._running.get(job.id) is not job or job.num_begins != num_begins:
                continue
            if isinstance(plan.work, Prefill):
                self._commit_chunk(job, len(plan.work.token_ids), now)
            elif isinstance(job, Sequence):
                self._commit_token(job, result.token_ids[job.id])
        return self.drain()

    def drain(self) -> list[Outcome]:
        """What streams must be told, in order; each outcome is given once."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _commit_chunk(self, job: Job, num_tokens: int, now: float) -> None:
        job.num_read += num_tokens
        cached = job.start if isinstance(job, Sequence) else 0
        self._outcomes.append((job.id, Progress(cached + job.num_read, cached + len(job.token_ids))))
        if isinstance(job, Ingest) and job.num_read == job.num_prefill:
            self._acknowledge(job, now)

    def _acknowledge(self, job: Ingest, now: float) -> None:
        assert job.segment is not None
        self.segments.retain([job.segment])
        self.contexts.append(job.context, job.segment, now)
        self._outcomes.append((job.id, Acknowledged(job.context)))
        self.finish(job)

    def _commit_token(self, job: Sequence, token: int) -> None:
        self._outcomes.append((job.id, Tokens(job.num_generated, (token,))))
        job.take(token)
        if token in job.end_tokens:
            self._end(job, "end_token")
        elif job.num_generated == job.sampling.max_tokens:
            self._end(job, "length")

    def _end(self, job: Sequence, reason: EndReason) -> None:
        self._outcomes.append((job.id, Ended(reason, job.num_prompt, job.start, job.num_generated, 0.0, 0.0, 0.0)))
        self.finish(job)

    # --- finish, cancel ---

    def finish(self, job: Job) -> None:
        """Gives back all that a running job holds."""
        del self._running[job.id]
        assert job.segment is not None
        assert job.reservation is not None
        self.segments.release((*job.path, job.segment))
        self._placer.release(job.reservation)
        if isinstance(job, Sequence):
            self._forgotten.append(job.id)

    def cancel(self, job_id: int) -> bool:
        """Ends a job wherever it is. Its blocks are free at once: any step that reuses them comes later."""
        if job_id in self._running:
            self.finish(self._running[job_id])
            return True
        for job in self._waiting:
            if job.id == job_id:
                self._waiting.remove(job)
                self.segments.release(job.path)
                return True
        return False

    def delete_context(self, context_id: str) -> list[int]:
        """Deletes a context and gives the ids of the ingests into it, which are cancelled. Raises NotFound."""
        self.contexts.delete(context_id)
        ids = [job.id for job in self._jobs() if isinstance(job, Ingest) and job.context == context_id]
        return [job_id for job_id in ids if self.cancel(job_id)]

    def tokens_by_rank(self) -> list[int]:
        """Tokens whose keys and values each rank holds."""
        held = [0] * len(self._placer.pools)
        for run in (run for segment in self.segments for run in segment.runs):
            held[run.rank] += len(run)
        return held

    def check(self) -> None:
        """Blocks, segments, references and promises all add up."""
        check_scheduler(self.segments, self.contexts, self._placer, tuple(self._waiting), tuple(self._running.values()))
        assert len(self._flights) <= MAX_UNDER_WAY
        busy = {job.id for flight in self._flights for job, _ in flight.jobs}
        for job in self._running.values():
            assert job.has_chunks or (isinstance(job, Sequence) and job.has_rows) or job.id in busy


def check_scheduler(
    segments: Segments, contexts: Contexts, placer: Placer, waiting: tuple[Job, ...], running: tuple[Job, ...]
) -> None:
    """Every reference has an owner, every used block a segment, every promise a running job."""
    segments.check()
    contexts.check()
    placer.check(run for segment in segments for run in segment.runs)
    owners: dict[int, int] = {}
    paths = [context.path for context in contexts.list()] + [job.path for job in (*waiting, *running)]
    for segment in [s for path in paths for s in path] + [job.segment for job in running if job.segment]:
        owners[segment.id] = owners.get(segment.id, 0) + 1
    assert owners == {segment.id: segment.num_references for segment in segments}
    assert placer.num_reserved == sum(job.reservation.left for job in running if job.reservation)
