"""Preemption: chooses the running jobs to stop so that a waiting job can begin."""

from collections import Counter
from collections.abc import Iterable

from coordinator.kv_cache.block_placer import BlockCount, BlockPlacer
from coordinator.kv_cache.eviction import ContextEvictor
from coordinator.kv_cache.segment_placement import SegmentPlacements
from coordinator.kv_cache.segments import SegmentStore
from coordinator.kv_cache.token_paths import Segment
from coordinator.scheduling.jobs import Job, as_victims
from coordinator.scheduling.sequences import SequenceJob


class RunningSet:
    """A summary of the running jobs. It is computed once for all waiting jobs, because there may be many."""

    def __init__(self, running: Iterable[Job]) -> None:
        running = list(running)
        self.sequences = [other for other in running if isinstance(other, SequenceJob)]
        self.num_tails = sum(other.num_tails for other in running)
        limited = {other.request for other in running if other.request.scheduling.max_concurrent is not None}
        self._num_limited = Counter(request.scheduling.tenant for request in limited)
        self._is_any_paused = any(other.request.is_paused for other in self.sequences)
        self._passed = frozenset[int]().union(*(other.passed for other in self.sequences))
        self._least_priority: dict[str, int] = {}
        """Lowest priority by tenant, among jobs that are not spared."""
        for scheduling in (other.request.scheduling for other in self.sequences if not other.is_spared):
            least = self._least_priority.setdefault(scheduling.tenant, scheduling.priority)
            self._least_priority[scheduling.tenant] = min(least, scheduling.priority)

    def is_allowed(self, job: Job) -> bool:
        """Whether the limit of its tenant on concurrent requests allows the job to run."""
        max_concurrent = job.request.scheduling.max_concurrent
        if max_concurrent is None or self._num_limited[job.request.scheduling.tenant] < max_concurrent:
            return True
        return job.request.is_running

    def may_yield_to(self, job: Job) -> bool:
        """Whether the job may preempt any running job."""
        if self._is_any_paused or job.id in self._passed:
            return True
        scheduling = job.request.scheduling
        return self._least_priority.get(scheduling.tenant, scheduling.priority) < scheduling.priority


class Preemption:
    """Chooses running sequences to preempt for their blocks or for their share of the concurrent answers."""

    def __init__(
        self, max_sequences: int, placer: BlockPlacer, segments: SegmentStore, evictor: ContextEvictor | None = None
    ) -> None:
        self._evictor = evictor
        self._max_sequences = max_sequences
        self._placer = placer
        self._segments = segments

    def has_places(self, job: Job, running_set: RunningSet) -> bool:
        """Whether the limit on concurrent answers allows the job to run."""
        return self._num_places_lacking(job, running_set) <= 0

    def _num_places_lacking(self, job: Job, running_set: RunningSet) -> int:
        return running_set.num_tails + job.num_tails - self._max_sequences if job.num_tails else 0

    def victims(
        self, job: Job, running_set: RunningSet, reloaded: BlockCount | None = None
    ) -> list[SequenceJob] | None:
        """Sequences to preempt so that a job without room can begin or, with `reloaded`, so that so many blocks can be
        reserved for the reload of its context; None when preemption cannot make enough room.

        A paused sequence yields to any job, and one that passed the job yields to it. Others yield only to a higher
        priority of the same tenant. Those with the lowest priority, then the youngest, come first.
        """
        if not running_set.may_yield_to(job):
            return None  # the usual case, and many jobs may wait
        candidates = [other for other in running_set.sequences if job.may_preempt(other)]
        places = 0 if reloaded else self._num_places_lacking(job, running_set)
        lacking = (reloaded or job.num_blocks) - self._placer.num_free - self._segments.num_reclaimable
        dropped = self._evictor.spare_references() if self._evictor is not None else Counter[Segment]()
        lacking -= self._segments.num_freed(dropped)
        chosen: list[SequenceJob] = []
        for other in as_victims(candidates):
            if lacking.fits(BlockCount()) and places <= 0:
                break
            chosen.append(other)
            places -= other.num_tails
            lacking -= _num_freed(other, dropped, self._segments.placements)
        return chosen if lacking.fits(BlockCount()) and places <= 0 else None


def _num_freed(job: SequenceJob, dropped: Counter[Segment], placements: SegmentPlacements) -> BlockCount:
    """Blocks that become free or reclaimable when a running job is preempted, beyond those that become so when the
    references that `dropped` counts are dropped: of evictable contexts and of jobs that are preempted before."""
    num_blocks = job.tail.placement.num_blocks + job.tail.reservation.left
    for placement in placements.for_segments(job.prefill.path.segments[len(job.request.origin.segments) :]):
        dropped[placement.segment] += 1
        if placement.is_idle_after(dropped[placement.segment]):
            num_blocks += placement.num_blocks
    return num_blocks
