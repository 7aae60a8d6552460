"""Recovery of jobs at a change of ranks: they wait for lost keys, then continue. Pure."""

from collections.abc import Iterator, Sequence

from coordinator.kv_cache.block_placer import BlockCount, BlockPlacer
from coordinator.kv_cache.rank_mapping import RankMapping
from coordinator.kv_cache.segment_placement import SegmentPlacement
from coordinator.kv_cache.segments import SegmentStore
from coordinator.kv_cache.token_paths import Segment, TokenPath
from coordinator.recovery.fault_score import DROP_SCORE
from coordinator.recovery.recovery import RecoveryManager
from coordinator.scheduling.capacity_shrink import CapacityShrink
from coordinator.scheduling.context_dropper import ContextDropper
from coordinator.scheduling.job_lifecycle import JobLifecycle
from coordinator.scheduling.jobs import IngestJob, Job
from coordinator.scheduling.limits import JobLimits
from coordinator.scheduling.sequences import SequenceJob
from longleaf.errors import ResourceExhausted
from longleaf.rank_protocol.step import StepResult
from longleaf.types import Recovering

NO_ROOM = "it does not fit on the remaining ranks"


class JobRecovery:
    """Carries jobs over to the next epoch: back to the last commit, then on as soon as nothing of their paths is
    lost."""

    def __init__(
        self,
        placer: BlockPlacer,
        segments: SegmentStore,
        limits: JobLimits,
        recovery: RecoveryManager,
        lifecycle: JobLifecycle,
        shrink: CapacityShrink,
        dropper: ContextDropper,
    ) -> None:
        self._placer = placer
        self._segments = segments
        self._placements = segments.placements
        self._limits = limits
        self._recovery = recovery
        self._lifecycle = lifecycle
        self._shrink = shrink
        self._dropper = dropper
        self.is_between_epochs = False
        """Nothing may be planned."""
        self.is_over = True
        """Everything is held, and all documents under way can continue."""

    # --- change of epoch ---

    def roll_back(self, steps: tuple[int, ...], suspicion: int) -> None:
        """Reverts plans under way. `steps` are those in which the epoch may have ended; empty if it ended outside a
        step."""
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
            self._dropper.drop_segment(recomputed.segment, "each attempt to recompute it made the ranks fail")

    def change_ranks(self, rank_mapping: RankMapping, *, may_grow: bool) -> None:
        """Moves the placements to other ranks. Documents under way wait until blocks are reserved for them again."""
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
        if not self._recovery.is_reserved:
            for job in self._running_sequences():
                self._lifecycle.preempt(job)
        for found in self._shrink.victims(lambda: list(self._lifecycle.requests.jobs())):
            if isinstance(found, Job):
                self._lifecycle.fail(found, ResourceExhausted("pool", NO_ROOM))
            else:
                self._dropper.drop(found, NO_ROOM)
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

    def begin_reload(self, evicted: Sequence[SegmentPlacement]) -> None:
        """Starts the reload of evicted segments. Each must come after the segments that it continues."""
        self._recovery.begin_reload(evicted)
        self.is_over = self.is_over and not evicted

    def resume(self) -> None:
        """Reserves free blocks for lost segments and for documents under way. Documents continue once nothing of their
        paths is lost."""
        self._reserve_lost()
        is_lacking = self.is_confirmed and not self._recovery.is_reserved
        if is_lacking and self._dropper.evict_unreserved():
            self._reserve_lost()  # recomputing the remaining segments may need fewer blocks
        self._lifecycle.mark_changed()
        while (waiting := self._resume_ingests()) and self._is_full(waiting):
            self._lifecycle.fail(waiting[-1], ResourceExhausted("pool", NO_ROOM))
        self.is_over = self._recovery.is_over and not waiting

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
            self._dropper.drop_segment(placement.segment, "the model computed values that are not finite")
        self.resume()
        self.report_progress()

    def report_progress(self) -> None:
        """Reports the progress of recovery to requests that wait for lost keys."""
        progress_by_request: dict[int, Recovering] = {}
        for job, path in self._waiting():
            if (progress := self._recovery.progress(path)) is not None:
                progress_by_request[job.request.id] = progress
        self._lifecycle.outcomes.extend(progress_by_request.items())

    def give_up(self, segment: Segment) -> None:
        """Drops everything that uses a segment that could not be recovered."""
        self._dropper.drop_segment(segment, "its tokens could not be recomputed")
        self.resume()

    def audit(self) -> None:
        """Asserts that no document waits after the recovery."""
        for job in self._ingests():
            assert job.tail.is_ready or not self.is_over or self.is_between_epochs
