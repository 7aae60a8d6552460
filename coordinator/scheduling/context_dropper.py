"""Drops contexts that the ranks cannot hold, or cannot compute, and fails the jobs that use them. Pure."""

from coordinator.engine_messages import ContextDropped
from coordinator.kv_cache.contexts import ContextTable, NamedContext
from coordinator.kv_cache.eviction import ContextEvictor
from coordinator.kv_cache.segments import SegmentStore
from coordinator.kv_cache.token_paths import Segment
from coordinator.scheduling.capacity_shrink import uses_context
from coordinator.scheduling.job_lifecycle import JobLifecycle
from coordinator.scheduling.sequences import SequenceJob
from longleaf.errors import ContextLost, LongleafError, ResourceExhausted


class ContextDropper:
    """Evicts contexts if they can be evicted; without an `evictor` it deletes them."""

    def __init__(
        self, segments: SegmentStore, contexts: ContextTable, lifecycle: JobLifecycle, evictor: ContextEvictor | None
    ) -> None:
        self._segments = segments
        self._contexts = contexts
        self._lifecycle = lifecycle
        self._evictor = evictor
        self._dropped: list[ContextDropped] = []

    def pop_dropped(self) -> list[ContextDropped]:
        """Removes and returns the contexts that were deleted."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def evict_unreserved(self) -> bool:
        """Evicts lost contexts without reserved blocks. Returns whether contexts can be evicted."""
        if self._evictor is not None:
            self._evictor.evict_unreserved()
        return self._evictor is not None

    def drop(self, context: NamedContext, reason: str) -> None:
        """Drops a context: evicts it if contexts can be evicted, else deletes it."""
        if self._evictor is not None:
            error = ResourceExhausted("pool", f"contexts/{context.id}: {reason}")
            self._fail_jobs_of(context, error)
            self._contexts.evict(context)
            return
        self._dropped.append(ContextDropped(context.id, context.num_tokens, reason))
        self._fail_jobs_of(context, ContextLost(f"contexts/{context.id}", f"it was dropped: {reason}"))
        self._contexts.delete(context.id)
        self._lifecycle.mark_changed()

    def drop_segment(self, segment: Segment, reason: str) -> None:
        """Drops everything that uses a segment. The ranks then forget the segment."""
        self._segments.drop_cached(lambda path: segment in path.segments)
        for job in list(self._lifecycle.running.values()):
            if isinstance(job, SequenceJob) and segment in job.prefill.path.segments:
                self._lifecycle.preempt(job)
        for context in self._contexts.list():
            if segment in context.path.segments and not context.is_evicted:
                self.drop(context, reason)
        for job in list(self._lifecycle.requests.jobs()):
            tail = (job.tail.segment,) if job.is_running else ()
            is_lost = segment in (*job.request.origin.segments, *tail)
            if is_lost and self._lifecycle.requests.get(job.request.id) is not None:
                self._lifecycle.fail(job, ContextLost(f"contexts/{job.context}", f"it was dropped: {reason}"))

    def _fail_jobs_of(self, context: NamedContext, error: LongleafError) -> None:
        for job in list(self._lifecycle.requests.jobs()):
            if uses_context(job, context) and self._lifecycle.requests.get(job.request.id) is not None:
                self._lifecycle.fail(job, error)
