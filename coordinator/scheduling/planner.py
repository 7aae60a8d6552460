"""From the jobs that run to the plans of their steps. Pure: no clock, no I/O.

Steps alternate between one chunk of one job and one token of every sequence that is ready.
"""

from collections.abc import Collection, Mapping
from collections.abc import Sequence as TokenIds

from coordinator.placement.blocks import Placer
from coordinator.placement.segments import Segments
from coordinator.scheduling.budget import Budget
from coordinator.scheduling.flights import Flights
from coordinator.scheduling.jobs import Job, Sequence
from coordinator.scheduling.queue import Turns
from coordinator.scheduling.speeds import Speeds
from longleaf.channel.step import Decode, Prefill, StepPlan
from longleaf.config import EngineConfig


class Planner:
    """Makes plans, and keeps those under way in their order. Two may be, so that the ranks find the next one when they
    have finished the first."""

    def __init__(self, config: EngineConfig, placer: Placer, segments: Segments, speeds: Speeds, epoch: int) -> None:
        self._placer = placer
        self._segments = segments
        self._epoch = epoch
        self._budget = Budget(config, len(placer.pools), speeds)
        self._chunk_turns = Turns()
        self._flights = Flights()
        self._forgotten: list[int] = []
        self._was_prefill = False
        self.step = 0
        """Number of the last plan."""

    @property
    def is_full(self) -> bool:
        """Enough is under way."""
        return self._flights.is_full

    @property
    def under_way(self) -> set[int]:
        """Ids of the jobs that plans under way work for."""
        return self._flights.job_ids

    def enter(self, client: str) -> None:
        """A client's job may come to be planned."""
        self._chunk_turns.enter(client)

    def keep(self, clients: Collection[str]) -> None:
        """Forgets all clients but these."""
        self._chunk_turns.keep(clients)

    def forget(self, sequence: int) -> None:
        """Tells the ranks with the next plan that a sequence has stopped."""
        self._forgotten.append(sequence)

    def plan(self, running: Collection[Job]) -> StepPlan | None:
        """The next step, or None when nothing is ready."""
        prefilling = self._prefilling(running)
        decoding = [job for job in running if isinstance(job, Sequence) and job.has_rows]
        if not prefilling and not decoding:
            return None
        self._was_prefill = bool(prefilling) and not (self._was_prefill and decoding)
        if self._was_prefill:
            return self._plan_chunk(prefilling, is_alone=not decoding)
        return self._plan_rows(decoding)

    def _prefilling(self, running: Collection[Job]) -> list[Job]:
        """Jobs that may have the next chunk; none while a chunk is under way. A chunk is long, so little is lost when
        the next one is sent only after it, and whoever comes or is cancelled meanwhile waits for one chunk, not two."""
        if self._flights.has_chunk:
            return []
        return [job for job in running if job.has_chunks]

    def _plan_chunk(self, jobs: list[Job], *, is_alone: bool) -> StepPlan:
        job = self._chunk_turns.order(jobs, lambda job: job.last_turn)[0]
        work = job.next_chunk(self._placer, self._budget.chunk_size(job, is_alone=is_alone))
        job.last_turn = self.step + 1
        self._chunk_turns.take(job.claim.client, len(work.token_ids))
        return self._plan(work, [job])

    def _plan_rows(self, jobs: TokenIds[Sequence]) -> StepPlan:
        return self._plan(Decode(tuple(job.next_row(self._placer) for job in jobs)), jobs)

    def _plan(self, work: Prefill | Decode, jobs: TokenIds[Job]) -> StepPlan:
        self.step += 1
        forgotten, self._forgotten = tuple(self._forgotten), []
        plan = StepPlan(self._epoch, self.step, work, self._segments.take_forgotten(), forgotten)
        self._flights.add(plan, jobs)
        return plan

    def land(self, plan: StepPlan, running: Mapping[int, Job]) -> list[Job]:
        """The jobs of `running` for which an answered plan counts; it must be the first one under way."""
        return self._flights.land(plan, running)
