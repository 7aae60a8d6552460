"""What the ranks that are left can hold, and what must go. Pure."""

from collections.abc import Callable, Iterator

from coordinator.kv_cache.block_placer import BlockCount, BlockPlacer
from coordinator.kv_cache.contexts import ContextTable, NamedContext
from coordinator.kv_cache.segment_placement import SegmentPlacement
from coordinator.kv_cache.segments import SegmentStore
from coordinator.kv_cache.token_paths import Segment
from coordinator.recovery.recovery import RecoveryManager
from coordinator.scheduling.jobs import IngestJob, Job, as_victims
from coordinator.scheduling.limits import JobLimits
from coordinator.scheduling.sequences import Sequence


class CapacityShrink:
    """Sees to it that whatever is held or lost has room, and every job once nothing else runs: as when it was
    admitted."""

    def __init__(
        self,
        placer: BlockPlacer,
        segments: SegmentStore,
        contexts: ContextTable,
        limits: JobLimits,
        recovery: RecoveryManager,
    ) -> None:
        self._placer = placer
        self._limits = limits
        self._segments = segments
        self._contexts = contexts
        self._recovery = recovery

    def too_much(self, jobs: Callable[[], list[Job]]) -> Iterator[NamedContext | Job]:
        """What must go, one after the other: each must be gone before the next one is asked for.

        First jobs that would have no room even alone with their contexts; then contexts that nobody asks and that are
        not pinned, the one that was not used for longest first; then jobs, if their contexts leave them too little
        room; then contexts that are asked, then those that are pinned.
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
        total, retained = self._placer.num_blocks, self._kept()
        victims = self._victims(jobs, self._wanted(retained), total)
        if victims is None:
            return None
        contexts = [context for context in self._contexts.list() if not context.is_resting]
        requested = {id(context) for context in contexts if any(asks(job, context) for job in jobs)}
        spare = [context for context in contexts if not context.is_pinned and id(context) not in requested]
        if spare:
            return min(spare, key=lambda context: context.last_use)
        if jobs and (not contexts or self._wanted(retained).fits(total)):
            return as_victims(victims or jobs)[0]
        return min(contexts, key=lambda context: (context.is_pinned, id(context) in requested, context.last_use))

    def _victims(self, jobs: list[Job], held: BlockCount, total: BlockCount) -> list[Job] | None:
        """The jobs for which there is no room beside what is held; None when there is room for all."""
        answers = [job for job in jobs if isinstance(job, Sequence)]
        retained = {holding.segment.id for holding in self._kept()}
        exporting = {s: None for job in answers for s in job.request.origin.segments if s.id not in retained}
        held += self._limits.wanted(self._segments.holdings.of(exporting))
        for job in jobs:
            if isinstance(job, IngestJob):
                held += job.num_blocks
                loss = job.tail.holding.loss if job.is_running else None
                held += BlockCount(windows=loss.window_blocks) if loss else BlockCount()
        if not held.fits(total):
            return jobs
        return [job for job in answers if not (held + job.num_blocks).fits(total)] or None

    def _kept(self) -> list[SegmentPlacement]:
        segments: dict[Segment, None] = {s: None for context in self._contexts.list() for s in context.path.segments}
        return self._segments.holdings.of(segments)

    def _wanted(self, holdings: list[SegmentPlacement]) -> BlockCount:
        """Blocks of holdings once nothing of them is lost."""
        return self._limits.wanted(holdings) + self._recovery.num_rolling


def asks(job: Job, context: NamedContext) -> bool:
    """Whether a job asks a context, or reads into it."""
    origin = job.request.origin
    return job.context == context.id and context.path.segments[: len(origin.segments)] == origin.segments
