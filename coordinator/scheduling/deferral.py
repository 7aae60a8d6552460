"""Deferral: requests wait while the oldest waiting job needs the space of their contexts. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from coordinator.kv_cache.block_placer import BlockCount
from coordinator.kv_cache.contexts import NamedContext
from coordinator.kv_cache.kv_cache import KvCache
from coordinator.kv_cache.token_paths import Segment
from coordinator.recovery.recovery import RecoveryManager
from coordinator.scheduling.admission import Admission
from coordinator.scheduling.job_lifecycle import JobLifecycle
from coordinator.scheduling.jobs import Job
from coordinator.scheduling.limits import JobLimits
from coordinator.scheduling.preemption import RunningSet
from coordinator.scheduling.sequences import SequenceJob

GroupKey = str | Segment | None
"""The id of a context or, where contexts are evicted together, their first segment."""


@dataclass(slots=True)
class _Group:
    """Questions about contexts that are evicted together, and these contexts."""

    jobs: list[Job] = field(default_factory=list[Job])
    contexts: list[NamedContext] = field(default_factory=list[NamedContext])

    @property
    def is_deferred(self) -> bool:
        return any(job.is_deferred for job in self.jobs)

    @property
    def last_use(self) -> int:
        return max((context.last_use for context in self.contexts), default=0)

    def segments(self) -> Iterable[Segment]:
        """All segments that stay in use while the questions wait."""
        paths = [*(job.request.origin for job in self.jobs), *(context.path for context in self.contexts)]
        return (segment for path in paths for segment in path.segments)


class Deferral:
    """Defers the waiting questions about some contexts until the oldest waiting job has begun.

    A waiting question references the path of its context, so that the context is not evicted. Without deferral, a job
    that has no room beside the context would wait as long as new questions about the context arrive.

    Deferral begins when the next turn goes to the oldest job. Contexts for which there is room beside that job stay in
    use, the most recently used ones first. The questions about the others are deferred: they do not begin, and their
    references are those of an evicted context. So a context is evicted when no running job uses it. After the oldest
    job has begun, or no longer waits for room, the deferred questions wait for the reload of their contexts.

    Contexts that were in use together may not fit together while they are reloaded, because recomputation takes more
    window blocks. If no job can run, the other questions are then deferred for the oldest job, and paused jobs that
    hold its room are preempted: see `unblock_reload`.
    """

    def __init__(
        self,
        cache: KvCache,
        limits: JobLimits,
        admission: Admission,
        lifecycle: JobLifecycle,
        recovery: RecoveryManager,
    ) -> None:
        """If contexts cannot be evicted, nothing is deferred."""
        self._placer = cache.placer
        self._segments = cache.segments
        self._placements = cache.segments.placements
        self._contexts = cache.contexts
        self._evictor = cache.evictor
        self._limits = limits
        self._admission = admission
        self._lifecycle = lifecycle
        self._recovery = recovery
        self._oldest: Job | None = None
        """The job for which others are deferred, from its turn until it begins."""
        self._is_forced = False
        """Whether others are deferred for that job even if there is no room for it before its context is reloaded."""
        self._has_preempted = False
        """Whether jobs were preempted for the reload of that job's context."""
        self._kept: set[GroupKey] = set()
        """Groups that are not deferred for that job. Others that arrive later do not displace them, because running
        jobs may use them by then."""

    def update(self) -> bool:
        """Defers and resumes waiting questions. Returns whether lost segments were added or evicted."""
        is_turn = self._evictor is not None and self._lifecycle.queue.turns.is_for_the_oldest
        if self._oldest is None and not is_turn:
            return False  # the usual case
        oldest = self._oldest_waiting()
        has_changed = oldest is not self._oldest and self.end()
        if oldest is None or self._limits.may_grow:
            return has_changed
        if self._oldest is None:
            free = self._placer.num_free + self._segments.num_reclaimable
            if not is_turn or (self._placements.holds(oldest.request.origin) and oldest.num_blocks.fits(free)):
                return has_changed
        return self._divide(oldest) or has_changed

    def unblock_reload(self) -> bool:
        """Defers questions for the oldest waiting job if lost keys have no room and no running job will free blocks:
        contexts do not fit together while they are reloaded, or paused jobs hold the room. Returns whether it did."""
        if self._evictor is None or self._limits.may_grow or not self._is_reload_blocked:
            return False
        if (oldest := self._oldest_waiting()) is None:
            return False
        self._is_forced = True
        self._divide(oldest)
        return True

    @property
    def _is_reload_blocked(self) -> bool:
        if self._recovery.is_over or self._recovery.is_reserved:
            return False
        return not any(job.tail.is_ready and not job.request.is_paused for job in self._lifecycle.running.values())

    def is_reloading(self, job: Job) -> bool:
        """Whether others are deferred for this job, and it waits for the reload of its context. Other jobs then
        overtake it as if it had no room, so that they can be preempted for the reload and for the job."""
        return job is self._oldest and not self._placements.holds(job.request.origin)

    @property
    def reloading(self) -> Job | None:
        """The job that `is_reloading`, unless jobs were preempted for it already."""
        job = self._oldest
        return job if job is not None and not self._has_preempted and self.is_reloading(job) else None

    def mark_preempted(self) -> None:
        """Jobs were preempted for the reload of the context of `reloading`."""
        self._has_preempted = True

    def _oldest_waiting(self) -> Job | None:
        """The oldest waiting job among those that are neither paused nor wait for the quota of their tenant."""
        running_set = RunningSet(self._lifecycle.running.values())
        jobs = (job for job in self._lifecycle.queue if not job.request.is_paused and running_set.is_allowed(job))
        return min(jobs, key=lambda job: job.id, default=None)

    def _divide(self, oldest: Job) -> bool:
        """Defers the questions about all contexts that have no room beside the oldest job. Returns whether lost
        segments were added or evicted."""
        others = [job for job in self._lifecycle.requests.jobs() if job is not oldest]
        retained, resident = self._admission.resident(oldest, others)
        # without the scratch of contexts that will be deferred, or whose request may be refused
        room = self._placer.num_blocks - resident - oldest.num_blocks - self._limits.num_scratch(retained)
        if not (BlockCount().fits(room) or self._is_forced):
            return self.end()  # deferral cannot make enough room
        self._oldest, has_changed = oldest, False
        kept = set[GroupKey]()
        groups = self._groups(oldest)
        for key in sorted(groups, key=lambda key: (key not in self._kept, -groups[key].last_use)):
            group = groups[key]
            more = {segment.id: segment for segment in group.segments() if segment.id not in retained}
            needed = self._limits.wanted(self._placements.for_segments(more.values()))
            needed += self._limits.num_scratch(retained | more) - self._limits.num_scratch(retained)
            if not more or (not group.is_deferred and needed.fits(room)):
                kept.add(key)
                retained |= more
                room -= needed
                has_changed |= self._resume(group.jobs)
            else:
                has_changed |= self._defer(group)
        self._kept = kept
        return has_changed

    def _groups(self, oldest: Job) -> dict[GroupKey, _Group]:
        """The waiting questions except the oldest job, grouped by context, with the running ones of kept groups."""
        groups = dict[GroupKey, _Group]()
        is_by_root = self._placer.windows is not None
        for job in self._lifecycle.requests.jobs():
            if job is not oldest and isinstance(job, SequenceJob) and (origin := job.request.origin).segments:
                key = origin.segments[0] if is_by_root else job.context
                if not job.is_running or key in self._kept:
                    groups.setdefault(key, _Group()).jobs.append(job)
        ids = {job.context for group in groups.values() for job in group.jobs}
        for context in self._contexts.bound(ids):
            key = context.path.segments[0] if is_by_root else context.id
            if key in groups:
                groups[key].contexts.append(context)
        return groups

    def _defer(self, group: _Group) -> bool:
        """Defers the waiting jobs of a group, and evicts those of its contexts that are being reloaded. Returns whether
        there were any."""
        for job in group.jobs:
            if not (job.is_deferred or job.is_running):
                job.is_deferred = True
                self._segments.release_to_idle(job.request.origin)
        assert self._evictor is not None
        return self._evictor.evict_lost(group.contexts)

    def _resume(self, jobs: Iterable[Job]) -> bool:
        """Resumes deferred jobs: their contexts are reloaded. Returns whether there were any."""
        deferred = [job for job in jobs if job.is_deferred]
        for job in deferred:
            job.is_deferred, path = False, job.request.origin
            self._segments.activate(path)
            context = self._contexts.find(job.context)
            if context is not None and job.uses(context):
                self._contexts.activate(context)
                path = context.path
            self._recovery.begin_reload(self._placements.evicted(path))
        if deferred:
            self._lifecycle.mark_changed()
        return bool(deferred)

    def end(self) -> bool:
        """Resumes all deferred jobs. Returns whether there were any."""
        self._oldest = None
        self._is_forced = False
        self._has_preempted = False
        self._kept = set()
        return self._resume(self._lifecycle.queue)

    def audit(self) -> None:
        """Asserts that only waiting questions are deferred, and only for a job that waits."""
        deferred = [job for job in self._lifecycle.requests.jobs() if job.is_deferred]
        assert self._oldest is not None or not deferred
        assert all(isinstance(job, SequenceJob) and job.context is not None for job in deferred)
        assert self._oldest not in deferred
