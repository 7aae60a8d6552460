"""A machine whose contexts outlive everything: they are evicted when room is needed, and the service may die and start
again between any two events."""

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from coordinator.engine_messages import DEFAULT_SCHEDULING, Outcome, Sealed
from coordinator.kv_cache.block_placer import BlockCount, BlockPlacer
from coordinator.kv_cache.contexts import NamedContext
from coordinator.kv_cache.segment_placement import count_all
from coordinator.kv_cache.token_paths import Segment, TokenPath
from coordinator.scheduling.fair_queue import AGEING
from coordinator.scheduling.jobs import IngestJob, Job
from coordinator.scheduling.scheduler import Scheduler
from longleaf.errors import LongleafError, StorageUnavailable
from longleaf.rank_protocol.row_delta import RowState
from tests.support.recovering_machine import RecoveringMachine
from tests.support.scheduler_machine import NAMES


class DurableMachine(RecoveringMachine):
    """Saves the state that a catalog would save: a context counts once it is acknowledged."""

    is_durable = True
    turn: tuple[int, int] | None = None
    """The oldest waiting job and the number of its begins, while it has the next turn. Waiting requests are deferred
    for it. A job that has begun since and was preempted has another turn."""
    ran_before_turn: frozenset[int] | set[int] = frozenset()
    """Jobs that ran when its turn came."""
    ran_before_schedule: frozenset[int] | set[int] = frozenset()
    """Jobs that ran before the latest call of the scheduler."""
    next_segment = 0
    """Greater than the id of any segment that was kept. Ids of others are used again after the end of everything."""

    @property
    def sealed(self) -> list[int]:
        """Documents that wait to be kept."""
        jobs = self.scheduler._running
        return [job for job in self.documents if job in self.open and job in jobs and jobs[job].prefill.is_over]

    @precondition(lambda self: self.sealed)
    @rule(data=st.data(), is_saved=st.booleans())
    def keep(self, data: st.DataObject, is_saved: bool) -> None:
        """Saving a document succeeds or fails."""
        job = data.draw(st.sampled_from(self.sealed), label="document")
        if is_saved:
            self._acknowledge(job)
        else:
            self.scheduler.fail(job, StorageUnavailable("the disk is full"))
        self._look()

    def _keep_all(self) -> None:
        for job in self.sealed:
            self._acknowledge(job)
        self._look()

    def _acknowledge(self, job: int) -> None:
        document = self.scheduler._running[job]
        assert isinstance(document, IngestJob)
        self.next_segment = max(self.next_segment, document.tail.segment.id + 1)
        self.scheduler.acknowledge(document, 9.0)

    def _schedule(self) -> bool:
        self.ran_before_schedule = set(self.scheduler._running)
        return super()._schedule() or (bool(self.sealed) and not self._keep_all() and super()._schedule())

    def _no_job_is_stuck(self) -> None:
        if not self.sealed:
            super()._no_job_is_stuck()

    def _no_job_waits_for_later_ones(self) -> None:
        queue = self.scheduler._queue
        waiting = [(job.id, job.num_begins) for job in queue.order()] if queue.turns.is_for_the_oldest else []
        if (oldest := min(waiting, default=None)) != self.turn:
            self.turn, self.ran_before_turn = oldest, set(self.scheduler._running)
        super()._no_job_waits_for_later_ones()

    def _form(self, before: list[int | None], may_grow: bool) -> None:
        self.turn = None  # the deferral ended with the epoch
        super()._form(before, may_grow)

    def _is_kept_out(self, job: Job) -> bool:
        """Whether the contexts in use and the documents leave too few blocks for a waiting job. A request references
        the path that it continues from its admission to its end, whether it runs or waits, and even if the context is
        deleted. So these blocks do not become free when the jobs that overtook the waiting one are preempted."""
        scheduler = self.scheduler
        if (job.id, job.num_begins) == self.turn and not self.ran_before_turn & scheduler._running.keys():
            return False
        paths = [request.origin for request in scheduler._requests]
        paths += [context.path for context in scheduler.contexts.bound(scheduler._requests.contexts)]
        placements = scheduler.segments.placements.for_segments(
            {segment: None for path in paths for segment in path.segments}
        )
        tails = [other.tail for other in scheduler._running.values() if isinstance(other, IngestJob)]
        reserved = sum((tail.reservation.left for tail in tails), BlockCount())
        held = count_all([*placements, *(tail.placement for tail in tails)]) + reserved
        return not (held + job.num_blocks).fits(self.placer.num_blocks)

    def _is_right(self, job: int, error: LongleafError) -> None:
        if not isinstance(error, StorageUnavailable):
            super()._is_right(job, error)

    def _see(self, outcomes: list[Outcome]) -> None:
        super()._see([(job, outcome) for job, outcome in outcomes if not isinstance(outcome, Sealed)])

    def _is_needed(self, job: int, error: LongleafError) -> bool:
        """Whether no running job remains. The job that needs the memory may run already."""
        still_running = self.ran_before_schedule & self.scheduler._running.keys()
        return job in self.paused and not still_running and "memory is needed by other requests" in str(error)

    # --- eviction ---

    @rule(context=NAMES)
    def rest(self, context: str) -> None:
        """As when room is needed."""
        found = self.scheduler.contexts.find(context)
        if found is not None and not found.is_evicted and context not in self.scheduler._requests.contexts:
            self.scheduler.contexts.evict(found)

    @rule(context=NAMES, question=st.integers(1, 12), steps=st.integers(0, 3))
    def rest_and_ask(self, context: str, question: int, steps: int) -> None:
        """The evicted context is restored; other contexts may be evicted for it."""
        self.rest(context)
        self.ask(list(range(question)), 2, context, 1, DEFAULT_SCHEDULING, False)
        self.run_steps(steps, 2, 0.001)

    @rule(
        size=st.integers(4, 40),
        percent=st.integers(20, 100),
        questions=st.lists(st.tuples(NAMES, st.integers(1, 4)), min_size=1, max_size=6),
        steps=st.integers(0, 2),
    )
    def ask_constantly(self, size: int, percent: int, questions: list[tuple[str, int]], steps: int) -> None:
        """The turn for age comes to a prompt that may have no room beside contexts that are queried constantly."""
        if self.is_between:
            return
        for name in sorted({name for name, _ in questions} - self.texts.keys()):
            self.ingest(list(range(size)), name, False, DEFAULT_SCHEDULING)
            self.run_steps(4, 2, 0.001)
        for _ in range(self.config.max_sequences):
            self.ask([0], 4, None, 1, DEFAULT_SCHEDULING, False)
        self.run_steps(steps, 2, 0.001)
        capacity = min(150, self.placer.num_blocks.sharded * self.block_size)
        self.ask(list(range(max(1, capacity * percent // 100 - 3))), 3, None, 1, DEFAULT_SCHEDULING, False)
        turns = self.scheduler._queue.turns
        turns._num_turns += (AGEING - 1 - turns._num_turns) % AGEING
        for other, count in questions:
            self.ask(list(range(count)), count, other, 1, DEFAULT_SCHEDULING, False)
            self.run_steps(1, 2, 0.001)

    # --- the end of everything ---

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """The service is killed and restarts from the saved state, with new ranks."""
        old = self.scheduler
        num_blocks = data.draw(st.lists(st.integers(4, 24), min_size=1, max_size=4), label="blocks")
        self.placer = BlockPlacer(num_blocks, self.block_size, self.windows)
        epoch = self.epoch + 1
        self._start_ranks(num_blocks, self.block_size, self.windows)
        self.epoch = epoch
        self.plans.clear()
        self.sequences = RowState(self.placer.window_block_size)
        self.scheduler = self._make_scheduler(epoch)
        revive(old, self.scheduler, self.next_segment)
        self.num_ended = self.num_submitted
        self.open.clear()
        self.paused.clear()
        self.waited.clear()
        self.ran.clear()
        self.turn = None


def revive(old: Scheduler, new: Scheduler, next_segment: int) -> None:
    """Has a scheduler take in the contexts of another one, as from a catalog."""
    new.segments.start_ids_at(next_segment)
    contexts = old.contexts.list()
    retained = {segment.id: segment for context in contexts for segment in context.path.segments}
    segments: dict[int, Segment] = {}
    for segment in sorted(retained.values(), key=lambda segment: segment.id):
        before = TokenPath(tuple(segments[part.id] for part in segment.before.segments), segment.before.end)
        segments[segment.id] = found = Segment(segment.id, before, segment.rope, segment.tenant)
        found.extend(segment.token_ids)
        new.segments.adopt(found)
    for context in contexts:
        path = TokenPath(tuple(segments[part.id] for part in context.path.segments), context.path.end)
        new.contexts.adopt(NamedContext(context.record, path))
