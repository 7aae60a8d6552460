"""A scheduler machine whose ranks are lost, join and are renumbered at any time."""

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from coordinator.engine_messages import DEFAULT_SCHEDULING, Outcome
from coordinator.kv_cache.rank_mapping import RankMapping
from coordinator.kv_cache.token_paths import TokenPath
from coordinator.recovery.fault_score import BREAK_SCORE, DROP_SCORE, LOSS_SCORE
from longleaf.errors import ContextLost, LongleafError, ResourceExhausted, Unavailable
from longleaf.positions import WindowSpec
from longleaf.rank_protocol.row_delta import RowState
from longleaf.rank_protocol.step import StepPlan
from longleaf.sampling import Token
from longleaf.types import Recovering
from tests.support.scheduler_machine import NAMES, SchedulerMachine
from tests.support.shadow_key_cache import ShadowKeyCache

MOST_RANKS = 5


class RecoveringMachine(SchedulerMachine):
    """The ranks are a ledger of keys: recomputed keys must equal the lost ones."""

    def _start_ranks(self, blocks: list[int], block_size: int, windows: WindowSpec | None) -> None:
        self.keys = ShadowKeyCache(len(blocks), block_size, windows)
        self.block_size = block_size
        self.num_blocks = list(blocks)
        self.epoch = 1
        self.is_between = False
        self.may_grow = False
        self.broken = Counter[int]()
        """By job, the epochs that ended in a step of it."""

    def _execute(self, plan: StepPlan) -> dict[int, tuple[Token, ...]]:
        assert plan.epoch == self.epoch
        return self.keys.apply(plan)

    def _token_ids(self, path: tuple[int, ...]) -> list[int]:
        return [key.token_id for key in self.keys.chain(path, self.keys.books[path[-1]].runs[-1].end)]

    def _check_end(self, path: TokenPath) -> None:
        if self.is_calm and self.scheduler.segments.placements.holds(path):
            self.keys.check_end(path.ids, path.end)

    @property
    def is_calm(self) -> bool:
        """The ranks and the coordinator agree on the stored keys."""
        return not self.is_between and not self.plans and not self.scheduler.recovery.needs_windows

    @property
    def is_disturbed(self) -> bool:
        return self.is_between or self.may_grow or not self.scheduler.job_recovery.is_over

    def _no_job_is_stuck(self) -> None:
        if not (self.is_between or self.may_grow):
            super()._no_job_is_stuck()

    # --- the end of an epoch ---

    @precondition(lambda self: not self.is_between)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """The epoch ends; the ranks may have executed all or none of the plans in flight."""
        in_order = [self.sequences.complete(plan) for plan in self.plans]
        num_done = data.draw(st.integers(0, len(in_order)), label="done")
        for plan in in_order[:num_done]:
            self.keys.apply(plan)
        for plan in in_order[num_done:]:
            self.keys.wreck(plan)
        plans = list(self.plans)
        ended = data.draw(st.sampled_from([[], plans, plans[:1], plans[-1:]]), label="ended")
        suspicion = data.draw(st.sampled_from([BREAK_SCORE, LOSS_SCORE]), label="suspicion")
        for plan in ended:
            self._accuse(plan, suspicion)
        steps = tuple(plan.step for plan in ended)
        self.plans.clear()
        self.scheduler.job_recovery.roll_back(steps, suspicion)
        self.is_between = True
        self.waited.clear()
        self.ran.clear()
        self._look()

    def _accuse(self, plan: StepPlan, suspicion: int) -> None:
        flight = next((f for f in self.scheduler._planner._flights if f.plan is plan), None)
        for job, _ in flight.jobs if flight else ():
            self.broken[job.request.id] += suspicion

    @precondition(lambda self: self.is_between)
    @rule(data=st.data(), may_grow=st.booleans())
    def form(self, data: st.DataObject, may_grow: bool) -> None:
        """Some of the ranks that there were, and others, are an epoch."""
        old = list(range(len(self.num_blocks)))
        gone = data.draw(st.sets(st.sampled_from(old), max_size=len(old)), label="gone")
        survivors = [rank for rank in old if rank not in gone]
        num_new = data.draw(st.sampled_from([0, 0, 0, 1, 1, 2]), label="newcomers")
        num_new = min(max(num_new, 0 if survivors else 1), max(1, MOST_RANKS - len(survivors)))
        before: list[int | None] = [*survivors, *[None] * num_new]
        if data.draw(st.integers(0, 3)) == 0:
            before = data.draw(st.permutations(before), label="before")
        self._form(before, may_grow)

    def _form(self, before: list[int | None], may_grow: bool) -> None:
        most = max(self.num_blocks)
        self.num_blocks = [most if rank is None else self.num_blocks[rank] for rank in before]
        self.epoch += 1
        self.keys.change_ranks(before)
        self.scheduler.job_recovery.change_ranks(
            RankMapping(self.epoch, tuple(before), tuple(self.num_blocks)), may_grow=may_grow
        )
        self.keys.set_layout(self.scheduler.segments.layout())
        self.sequences = RowState(self.placer.window_block_size)
        self.is_between, self.may_grow = False, may_grow
        self._look()

    @precondition(lambda self: self.may_grow and not self.is_between)
    @rule()
    def finish_growth(self) -> None:
        self.scheduler.job_recovery.shrink_to_fit()
        self.may_grow = False
        self.waited.clear()
        self._look()

    @rule(data=st.data())
    def lose_and_form(self, data: st.DataObject) -> None:
        if not self.is_between:
            self.lose(data)
        self.form(data, False)

    @rule(data=st.data(), steps=st.integers(0, 6))
    def lose_one_amid_steps(self, data: st.DataObject, steps: int) -> None:
        """One of several, as mostly, with a plan under way."""
        if self.is_between or len(self.num_blocks) < 2:
            return
        self.run_steps(steps, 2, 0.001)
        self._schedule()
        self._lose_one(data)

    def _lose_one(self, data: st.DataObject) -> None:
        self.lose(data)
        gone = data.draw(st.integers(0, len(self.num_blocks) - 1), label="gone")
        self._form([rank for rank in range(len(self.num_blocks)) if rank != gone], False)

    @rule(data=st.data(), context=NAMES, count=st.integers(8, 40), steps=st.integers(1, 5), question=st.integers(0, 40))
    def lose_one_amid_a_document(
        self, data: st.DataObject, context: str, count: int, steps: int, question: int
    ) -> None:
        """The document continues, and it and its prefix are queried while it recovers."""
        if self.is_between or len(self.num_blocks) < 2:
            return
        self.ingest(list(range(count)), context, context in self.texts, DEFAULT_SCHEDULING)
        self.run_steps(steps, 2, 0.001)
        self._lose_one(data)
        self.ask(list(range(question)), 2, None, 1, DEFAULT_SCHEDULING, False)
        self.ask([1, 2], 2, context, 1, DEFAULT_SCHEDULING, False)
        self.run_steps(1, 2, 0.001)
        if len(self.num_blocks) > 1 and data.draw(st.booleans(), label="twice"):
            self._lose_one(data)

    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        """Adds a rank in a separate epoch: no plan is in flight."""
        if self.is_between or len(self.num_blocks) >= MOST_RANKS:
            return
        while self.plans:
            self.commit()
        self.lose(data)
        self._form([*range(len(self.num_blocks)), None], False)

    def _look(self) -> None:
        """Processes the losses and the outcomes of waiting or failing jobs."""
        for dropped in self.scheduler.job_recovery.pop_dropped():
            assert dropped.num_tokens == len(self.texts[dropped.context])
            del self.texts[dropped.context], self.ends[dropped.context]
        self._see(self.scheduler.pop_outcomes())

    def _see(self, outcomes: list[Outcome]) -> None:
        for dropped in self.scheduler.job_recovery.pop_dropped():
            del self.texts[dropped.context], self.ends[dropped.context]
        for _, outcome in outcomes:
            if isinstance(outcome, Recovering):
                assert 0 < outcome.lost_tokens <= outcome.total_tokens - outcome.recovered_tokens
        super()._see(outcomes)

    def _is_right(self, job: int, error: LongleafError) -> None:
        if isinstance(error, Unavailable):
            assert self.broken[job] >= DROP_SCORE
        elif not isinstance(error, ContextLost) and not (
            isinstance(error, ResourceExhausted) and error.subject == "pool"
        ):
            super()._is_right(job, error)

    @invariant()
    def books_are_equal(self) -> None:
        """The ranks and the coordinator agree on the location of every key, and the keys are correct."""
        if not hasattr(self, "scheduler") or not self.is_calm:
            return
        placements, cut = self.scheduler.segments.placements, self.scheduler.segments._cuts
        for placement in placements:  # the ranks cut a segment with the next plan
            if placement.segment.token_ids and placement.is_reported and placement.segment.id not in cut:
                assert self.keys.books[placement.segment.id].runs == placement.runs
                assert self.keys.books[placement.segment.id].start == placement.segment.start
        for context in self.scheduler.contexts.list():
            if placements.holds(context.path):
                assert self._keys_of(context.path) == self.texts[context.id]

    def _keys_of(self, path: TokenPath) -> list[int]:
        return [key.token_id for key in self.keys.chain(path.ids, path.end)]

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            if self.is_between:
                self._form(list(range(len(self.num_blocks))), False)
            if self.may_grow:
                self.finish_growth()
            self._recovers()
        super().teardown()

    def _recovers(self) -> None:
        """All lost keys are restored, whichever other jobs wait."""
        for job in sorted(self.paused):
            self._pause(job, False)
        self._run_until(lambda: not (self.open or self.scheduler.recovery.total))
        contexts = [context for context in self.scheduler.contexts.list() if not context.is_evicted]
        assert all(self.scheduler.segments.placements.holds(context.path) for context in contexts)
        self.adds_up()
