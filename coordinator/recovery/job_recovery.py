"""Recovery of jobs at a change of ranks: they wait for lost keys, then continue. Pure."""

from collections.abc import Iterator

from coordinator.engine_messages import ContextDropped
from coordinator.kv_cache.block_placer import BlockCount
from coordinator.kv_cache.contexts import NamedContext
from coordinator.kv_cache.kv_cache import KvCache
from coordinator.kv_cache.rank_mapping import RankMapping
from coordinator.kv_cache.token_paths import Segment, TokenPath
from coordinator.recovery.capacity_shrink import CapacityShrink
from coordinator.recovery.fault_score import BREAK_SCORE, DROP_SCORE
from coordinator.recovery.recovery import RecoveryManager
from coordinator.scheduling.admission import Admission
from coordinator.scheduling.deferral import Deferral
from coordinator.scheduling.job_lifecycle import JobLifecycle
from coordinator.scheduling.jobs import IngestJob, Job
from coordinator.scheduling.limits import JobLimits
from coordinator.scheduling.sequences import SequenceJob
from longleaf.errors import ContextLost, LongleafError, ResourceExhausted
from longleaf.rank_protocol.step import StepResult
from longleaf.types import Recovering

NO_ROOM = "it does not fit on the remaining ranks"


class JobRecovery:
    """Carries jobs over to the next epoch: back to the last commit, then on as soon as nothing of their paths is
    lost."""

    def __init__(
        self,
        cache: KvCache,
        limits: JobLimits,
        recovery: RecoveryManager,
        lifecycle: JobLifecycle,
        admission: Admission,
        deferral: Deferral,
    ) -> None:
        """If contexts cannot be evicted, those that cannot be held are dropped."""
        self._placer = cache.placer
        self._segments = cache.segments
        self._placements = cache.segments.placements
        self._contexts = cache.contexts
        self._evictor = cache.evictor
        self._limits = limits
        self._recovery = recovery
        self._lifecycle = lifecycle
        self._deferral = deferral
        self._shrink = CapacityShrink(cache, limits, recovery, admission)
        self._dropped: list[ContextDropped] = []
        self.is_between_epochs = False
        """Nothing may be planned."""
        self._has_waiting_ingests = False

    @property
    def is_over(self) -> bool:
        """Everything is held, and all documents under way can continue."""
        return self._recovery.is_over and not self._has_waiting_ingests

    # --- change of epoch ---

    def roll_back(self, steps: tuple[int, ...] = (), suspicion: int = BREAK_SCORE) -> None:
        """Ends an epoch. Plans in flight are discarded and must not be committed. Nothing is scheduled until
        `change_ranks`. Answers later continue at their next token, documents after the last committed chunk.

        `steps` are those in which the epoch may have ended; empty if it ended outside a step. Their work gets the fault
        score `suspicion`: a job that breaks a second epoch ends. See `Scheduler.pop_outcomes`.
        """
        self._deferral.end()
        self.is_between_epochs = True
        lifecycle = self._lifecycle
        works, guilty = lifecycle.planner.roll_back(steps, suspicion, set(lifecycle.requests.jobs()))
        recomputed = self._recovery.undo(works, suspicion)
        for job in self._running_sequences():
            lifecycle.preempt(job)
        for job in self._ingests():
            job.roll_back(self._placer)
        for job, work in guilty:
            lifecycle.fail(job, job.poisoned(work))
        if recomputed and recomputed.loss and recomputed.loss.suspicion >= DROP_SCORE:
            self._give_up_all(recomputed.segment, "each attempt to recompute it made the ranks fail")

    def change_ranks(self, rank_mapping: RankMapping, *, may_grow: bool = False) -> None:
        """Continues with the ranks of another epoch, after `roll_back`. The ranks must receive the layout of all
        segments before any plan. Documents under way wait until blocks are reserved for them again.

        Contexts and jobs that no longer fit are dropped. If more ranks are expected (`may_grow`), they are dropped
        later by `shrink_to_fit`, or not at all if another epoch brings enough ranks. See `pop_dropped` and
        `Scheduler.pop_outcomes`."""
        assert self.is_between_epochs
        for job in self._ingests():
            job.tail.is_ready = False
            self._placer.release(job.tail.reservation)
        self._recovery.change_ranks(rank_mapping)
        self._lifecycle.planner.change_ranks(rank_mapping.epoch)
        self.is_between_epochs = False
        self._limits.expect_ranks()
        if not may_grow:
            self.shrink_to_fit()
        self.resume()
        self.report_progress()

    def shrink_to_fit(self) -> None:
        """Drops or evicts contexts that no longer fit, and fails jobs that no longer fit, because no more ranks are
        expected."""
        self._deferral.end()
        if not self._recovery.is_reserved:
            for job in self._running_sequences():
                self._lifecycle.preempt(job)
        for found in self._shrink.victims(lambda: list(self._lifecycle.requests.jobs())):
            if isinstance(found, Job):
                self._lifecycle.fail(found, ResourceExhausted("pool", NO_ROOM))
            else:
                self._give_up(found, NO_ROOM)
        self._limits.confirm_ranks()
        self._lifecycle.mark_changed()

    @property
    def is_confirmed(self) -> bool:
        """No more ranks are expected, so that each job fits once nothing else runs."""
        return not self._limits.may_grow

    def _running_sequences(self) -> list[SequenceJob]:
        return [job for job in self._lifecycle.running.values() if isinstance(job, SequenceJob)]

    def _ingests(self) -> list[IngestJob]:
        return [job for job in self._lifecycle.running.values() if isinstance(job, IngestJob)]

    # --- recovery ---

    def resume(self) -> None:
        """Reserves free blocks for lost segments and for documents under way. Documents continue once nothing of their
        paths is lost."""
        self._reserve_lost()
        if self._evictor is not None and self.is_confirmed and not self._recovery.is_reserved:
            self._evictor.evict_unreserved()
            self._reserve_lost()  # recomputing the remaining segments may need fewer blocks
        self._lifecycle.mark_changed()
        while (waiting := self._resume_ingests()) and self._is_full(waiting):
            self._lifecycle.fail(waiting[-1], ResourceExhausted("pool", NO_ROOM))
        self._has_waiting_ingests = bool(waiting)

    def _reserve_lost(self) -> None:
        """Reserves blocks to recompute the lost tokens, if any are still lost."""
        self._recovery.check_complete()
        self._recovery.reserve_lost(list(self.paths()))

    def _resume_ingests(self) -> list[IngestJob]:
        """Resumes the documents under way that can continue. Returns the others."""
        for job in self._ingests():
            tail = job.tail
            if not tail.is_ready and self._reserve_remaining(job):
                tail.is_ready = tail.placement.loss is None and self._placements.holds(tail.segment.before)
        return [job for job in self._ingests() if not job.tail.is_ready]

    def _is_full(self, waiting: list[IngestJob]) -> bool:
        """Whether documents wait for blocks that no other job will free. Jobs that began during the recovery, and have
        ended, may have taken them."""
        return self._recovery.is_over and self.is_confirmed and len(waiting) == len(self._lifecycle.running)

    def _reserve_remaining(self, job: IngestJob) -> bool:
        """Reserves blocks for the rest of a document. Those for windows are reserved once nothing of its segment is
        lost. Returns False when too few are free."""
        tail, pool = job.tail, self._placer.window_pool
        left, windows = tail.reservation.left, 0
        if tail.placement.loss is None:
            windows = pool.chunk_blocks(len(job.prefill.token_ids)) - tail.placement.num_blocks.windows
        needed = self._limits.num_blocks(job.prefill, 0, 0).sharded
        more = BlockCount(needed - left.sharded, max(0, windows - left.windows))
        return self._segments.make_room(more) and self._placer.add(tail.reservation, more)

    def is_ready(self, job: Job) -> bool:
        """Whether a waiting job can begin during a recovery: nothing of its path is lost. Once recovery itself is over,
        documents that still wait for room go first."""
        is_next = not (self._recovery.is_over and self.is_confirmed)
        return is_next and self._placements.holds(job.request.origin)

    def _waiting(self) -> Iterator[tuple[Job, TokenPath]]:
        """The jobs that may wait for lost keys, and their paths, the most urgent first."""
        for job in self._lifecycle.queue.order(lambda job: not job.is_deferred):
            yield job, job.request.origin
        for job in self._ingests():
            if not job.tail.is_ready:
                yield job, job.tail.segment.path

    def paths(self) -> Iterator[TokenPath]:
        """The paths of jobs that may wait for lost keys, the most urgent first."""
        return (path for _, path in self._waiting())

    def commit(self, result: StepResult) -> None:
        """Commits a recovery step. Raises RecoveryFailed."""
        if result.has_finite_keys:
            self._recovery.commit()
        elif (placement := self._recovery.fail()) is not None:
            self._give_up_all(placement.segment, "the model computed values that are not finite")
        self.resume()
        self.report_progress()

    def report_progress(self) -> None:
        """Reports the progress of recovery to requests that wait for lost keys."""
        progress_by_request: dict[int, Recovering] = {}
        for job, path in self._waiting():
            if (progress := self._recovery.progress(path)) is not None:
                progress_by_request[job.request.id] = progress
        self._lifecycle.outcomes.extend(progress_by_request.items())

    def report_missing_weights(self, fraction: float) -> None:
        """Reports to all requests that they wait until ranks have read this fraction of the weights."""
        total = self._recovery.total or Recovering(0, 0, 0)
        waiting = {
            job.request.id: Recovering(
                self._placements.num_lost(job.request.origin), total.recovered_tokens, total.total_tokens, fraction
            )
            for job in self._lifecycle.requests.jobs()
        }
        self._lifecycle.outcomes.extend(waiting.items())

    # --- dropped contexts ---

    def pop_dropped(self) -> list[ContextDropped]:
        """Removes and returns the contexts that were dropped."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def _give_up(self, context: NamedContext, reason: str) -> None:
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

    def give_up(self, segment: Segment) -> None:
        """Drops everything that uses a segment that could not be recovered."""
        self._give_up_all(segment, "its tokens could not be recomputed")
        self.resume()

    def _fail_jobs_of(self, context: NamedContext, error: LongleafError) -> None:
        for job in list(self._lifecycle.requests.jobs()):
            if job.uses(context) and self._lifecycle.requests.get(job.request.id) is not None:
                self._lifecycle.fail(job, error)

    def _give_up_all(self, segment: Segment, reason: str) -> None:
        """Drops everything that uses a segment. The ranks then forget the segment."""
        self._segments.drop_cached(lambda path: segment in path.segments)
        for job in self._running_sequences():
            if segment in job.prefill.path.segments:
                self._lifecycle.preempt(job)
        for context in self._contexts.list():
            if segment in context.path.segments and not context.is_evicted:
                self._give_up(context, reason)
        for job in list(self._lifecycle.requests.jobs()):
            tail = (job.tail.segment,) if job.is_running else ()
            is_lost = segment in (*job.request.origin.segments, *tail)
            if is_lost and self._lifecycle.requests.get(job.request.id) is not None:
                self._lifecycle.fail(job, ContextLost(f"contexts/{job.context}", f"it was dropped: {reason}"))

    def audit(self) -> None:
        """Asserts that no document waits after the recovery."""
        for job in self._ingests():
            assert job.tail.is_ready or not self.is_over or self.is_between_epochs
