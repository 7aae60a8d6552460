"""Chooses the contexts and jobs to drop when fewer ranks are left. Pure."""

from collections.abc import Callable, Iterator

from coordinator.kv_cache.block_placer import BlockCount
from coordinator.kv_cache.contexts import NamedContext
from coordinator.kv_cache.kv_cache import KvCache
from coordinator.kv_cache.segment_placement import SegmentPlacement
from coordinator.kv_cache.token_paths import Segment
from coordinator.recovery.recovery import RecoveryManager
from coordinator.scheduling.admission import Admission
from coordinator.scheduling.jobs import IngestJob, Job, as_victims
from coordinator.scheduling.limits import JobLimits
from coordinator.scheduling.sequences import SequenceJob


class CapacityShrink:
    """Ensures that all held and lost keys fit, and that each job fits once nothing else runs, as at admission."""

    def __init__(self, cache: KvCache, limits: JobLimits, recovery: RecoveryManager, admission: Admission) -> None:
        self._placer = cache.placer
        self._limits = limits
        self._placements = cache.segments.placements
        self._contexts = cache.contexts
        self._can_evict = cache.evictor is not None
        self._recovery = recovery
        self._admission = admission

    def victims(self, jobs: Callable[[], list[Job]]) -> Iterator[NamedContext | Job]:
        """The contexts and jobs to drop. The caller must drop each one before it requests the next.

        First jobs that do not fit even without other jobs and contexts; then idle contexts that are not pinned, least
        recently used first; then jobs for which the contexts leave too little room; then contexts in use, then pinned
        contexts.
        """
        while (found := self._next(jobs())) is not None:
            yield found

    def _next(self, jobs: list[Job]) -> NamedContext | Job | None:
        if (
            hopeless := next(
                (job for job in jobs if not self._limits.fits_alone(job.request.origin, job.num_blocks)), None
            )
        ) is not None:
            return hopeless
        total, retained = self._placer.num_blocks, self._remaining()
        victims = self._victims(jobs, self._wanted(retained), total)
        if victims is None:
            return None
        contexts = [context for context in self._contexts.list() if not context.is_evicted]
        requested = {id(context) for context in contexts if any(job.uses(context) for job in jobs)}
        spare = [context for context in contexts if not context.record.is_pinned and id(context) not in requested]
        if spare:
            return min(spare, key=lambda context: context.last_use)
        if jobs and (not contexts or self._wanted(retained).fits(total)):
            return as_victims(victims or jobs)[0]
        return min(contexts, key=lambda context: (context.record.is_pinned, id(context) in requested, context.last_use))

    def _victims(self, jobs: list[Job], needed: BlockCount, total: BlockCount) -> list[Job] | None:
        """The jobs that do not fit beside the held keys; None when all fit."""
        answers = [job for job in jobs if isinstance(job, SequenceJob)]
        retained = {placement.segment.id for placement in self._remaining()}
        path_segments = {s: None for job in answers for s in job.request.origin.segments if s.id not in retained}
        needed += self._limits.wanted(self._placements.for_segments(path_segments))
        for job in jobs:
            if isinstance(job, IngestJob):
                needed += job.num_blocks
                loss = job.tail.placement.loss if job.is_running else None
                needed += BlockCount(windows=loss.window_blocks) if loss else BlockCount()
        if not needed.fits(total):
            return jobs
        crowded = [job for job in answers if not (needed + job.num_blocks).fits(total)]
        return [job for job in crowded if not self._may_defer_others(job, jobs)] or None

    def _may_defer_others(self, job: Job, jobs: list[Job]) -> bool:
        """Whether a job fits once the contexts of other answers are evicted for it. See `Deferral`."""
        if not self._can_evict:
            return False
        _, resident = self._admission.resident(job, [other for other in jobs if other is not job])
        return (resident + self._limits.num_scratch() + job.num_blocks).fits(self._placer.num_blocks)

    def _remaining(self) -> list[SegmentPlacement]:
        segments: dict[Segment, None] = {s: None for context in self._contexts.list() for s in context.path.segments}
        return self._placements.for_segments(segments)

    def _wanted(self, placements: list[SegmentPlacement]) -> BlockCount:
        """Blocks of the segments once nothing of them is lost, plus those for recomputation."""
        return self._limits.wanted(placements) + self._recovery.num_scratch
