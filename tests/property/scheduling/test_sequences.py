"""Rows send constant fields once: the ranks reconstruct the whole rows."""

from collections import Counter, deque
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.kv_cache.windows import WindowBlockPool
from coordinator.scheduling.sequences import SequenceJob
from longleaf.errors import LongleafError
from longleaf.positions import OWN_ROPE, AttentionSpan, Rope, Rotary, WindowSpec
from longleaf.rank_protocol.encoding import decode_to_rank, encode
from longleaf.rank_protocol.row_delta import RowState, row_delta
from longleaf.rank_protocol.step import Decode, Prefill, Row, StepPlan
from longleaf.runs import Run
from tests.support.scheduling import Bench
from tests.support.shadow_window_cache import windows_of

SCALED_FROM = 24
"""Prompts and contexts of more positions have another rope."""
NUM_RANKS = 2


class Watched(Bench):
    """Records the whole rows of each plan when it is made, and compares each rank's reconstruction from the encoded
    plans, in their order.
    """

    def __init__(self, windows: WindowSpec | None = None, **changes: object) -> None:
        rotary = Rotary(kind="longrope", scaled_from=SCALED_FROM)
        super().__init__(blocks=(24, 24), windows=windows, rotary=rotary, check_every=50, **changes)
        self.ranks = [RowState(self.placer.window_block_size) for _ in range(NUM_RANKS)]
        self.under_way: deque[tuple[StepPlan, StepPlan]] = deque()
        self.num_first = Counter[int]()
        """By sequence, the number of rows with all fields."""

    def plan(self) -> bool:
        """Whether there was something to do."""
        if (plan := self.schedule()) is None:
            return False
        work = plan.work
        if isinstance(work, Decode):
            work = Decode(tuple(map(self._whole, work.rows)))
            self.num_first.update(row.sequence for row in plan.work.rows if row.path)
        self.under_way.append((plan, replace(plan, work=work)))
        return True

    def _whole(self, row: Row) -> Row:
        job = self.scheduler._running[row.sequence]
        assert isinstance(job, SequenceJob)
        return replace(row, path=job.tail.path_ids, rope=job.rope, window_runs=job.tail.placement.window_runs)

    def land(self) -> None:
        plan, whole = self.under_way.popleft()
        for rank in self.ranks:
            received = decode_to_rank(encode(plan))
            assert isinstance(received, StepPlan)
            assert rank.complete(received) == whole
        self.commit(plan)

    def steps(self, count: int, ahead: int) -> None:
        for _ in range(count):
            while len(self.under_way) < ahead and self.plan():
                pass
            if self.under_way:
                self.land()


NAMES = st.sampled_from(["a", "b"])
ASKS = st.tuples(
    st.just("ask"),
    st.integers(1, 40),
    st.integers(1, 14),
    st.none() | NAMES,
    st.just(()),
    st.integers(0, 2),
    st.sampled_from([1, 1, 2, 3]),
)
ACTIONS = st.one_of(
    ASKS,
    st.tuples(st.just("ingest"), NAMES, st.integers(1, 30), st.booleans()),
    st.tuples(st.just("fork"), NAMES, NAMES, st.none() | st.integers(1, 40)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("pause"), st.integers(0, 20), st.booleans()),
    st.tuples(st.just("steps"), st.integers(1, 12), st.integers(1, 2)),
)


def act(bench: Watched, action: tuple) -> None:  # type: ignore[type-arg]
    kind, *arguments = action
    scheduler = bench.scheduler
    others = {"fork": scheduler.fork_context, "cancel": scheduler.cancel, "pause": scheduler.pause}
    with suppress(LongleafError):  # refused
        (others[kind] if kind in others else getattr(bench, kind))(*arguments)


@given(
    windows=st.none() | windows_of(12, 40),
    max_sequences=st.integers(1, 3),
    actions=st.lists(ACTIONS, min_size=4, max_size=30),
)
@settings(max_examples=150, deadline=None)
def test_ranks_reconstruct_whole_rows(
    windows: WindowSpec | None,
    max_sequences: int,
    actions: list[tuple],  # type: ignore[type-arg]
) -> None:
    bench = Watched(windows, max_sequences=max_sequences)
    for action in actions:
        act(bench, action)
    for job in range(bench.num_jobs):
        bench.scheduler.pause(job, False)
    while bench.plan() or bench.under_way:
        bench.steps(1, 2)
    bench.scheduler.audit()


@pytest.mark.parametrize(
    "windows", [None, WindowSpec(reaches=(AttentionSpan(8),), num_blocks=60)], ids=["sharded", "replicated"]
)
def test_a_preempted_answer_sends_all_fields_again(windows: WindowSpec | None) -> None:
    bench = Watched(windows, max_sequences=2)
    job = bench.ask(SCALED_FROM + 1, max_tokens=20, num_samples=2)
    bench.steps(9, 2)
    bench.ask(4, max_tokens=2, priority=1)
    while bench.plan() or bench.under_way:
        bench.steps(1, 2)
    assert sorted(bench.tokens(job)) == sorted(2 * bench.alone(SCALED_FROM + 1, 20))
    assert sorted(bench.num_first.values()) == [1, 1, 2]


@given(
    windows=windows_of(24, 40),
    block_size=st.integers(1, 5),
    start=st.integers(0, 20),
    steps=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=30),
)
@settings(max_examples=200, deadline=None)
def test_windows_end_where_accepted_drafts_end(
    windows: WindowSpec, block_size: int, start: int, steps: list[tuple[int, int]]
) -> None:
    pool, reported, known = WindowBlockPool(windows, block_size), RowState(block_size), ()
    for index, (num_drafts, num_accepted) in enumerate(steps):
        runs = pool.grow(pool.trim(known, start), start, start + 1 + num_drafts)
        row = Row(7, () if index else (4,), start, (), (), index, window_runs=runs, draft_ids=(1,) * num_drafts)
        sent = replace(row, window_runs=row_delta(known, runs, block_size)) if index else row
        assert reported.complete(step(sent)) == step(replace(row, path=(4,)))
        start += 1 + min(num_drafts, num_accepted)
        if num_accepted < num_drafts:
            reported.cut_back(7, start)
        known = pool.cut(runs, start)


def size(num_segments: int, window: int = 0) -> int:
    """Bytes of the last step of an answer after a path of so many segments, and so many tokens of it in a window."""
    windows = WindowSpec(reaches=(AttentionSpan(window),), num_blocks=400) if window else None
    bench = Bench(windows=windows, max_positions=4000, blocks=(400,), check_every=200)
    for number in range(num_segments):
        bench.ingest("doc", 12, append=number > 0)
        bench.run()
    bench.ask(3, context="doc", max_tokens=250)
    last = bench.run()[-1]
    assert isinstance(last.work, Decode)
    return len(encode(last))


def test_steps_do_not_grow_with_what_came_before() -> None:
    assert size(50) == pytest.approx(size(2), abs=12)  # numbers that are larger
    assert size(2, window=200) == pytest.approx(size(2, window=8), abs=12)


ROPE = Rope(scaled_for=100)
FIRST = Row(7, (1, 2), 40, (5, 6), (Run(0, 40, 42, (3,)),), 0, rope=ROPE)
NEXT = Row(7, (), 42, (), (Run(0, 40, 43, (3,)),), 1)


def step(*rows: Row, release: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(1, 1, Decode(rows), release_sequences=release)


def test_missing_fields_are_refused() -> None:
    reported = RowState(4)
    with pytest.raises(ValueError, match="unknown sequence 7"):
        reported.complete(step(NEXT))
    assert reported.complete(step(FIRST)) == step(FIRST)
    assert reported.complete(step(NEXT)) == step(replace(NEXT, path=(1, 2), rope=ROPE))
    reported.complete(StepPlan(1, 2, Prefill((9,), 0, (1,), ()), release_sequences=(7,)))
    with pytest.raises(ValueError, match="unknown sequence 7"):
        reported.complete(step(NEXT))


def test_a_sequence_restarts_in_the_plan_that_releases_it() -> None:
    reported, again = RowState(4), Row(7, (1, 3), 40, (5,), (Run(0, 40, 41, (8,)),), 0)
    reported.complete(step(FIRST))
    assert reported.complete(step(again, release=(7,))) == step(again, release=(7,))
    assert reported.complete(step(NEXT)).work.rows[0].rope == OWN_ROPE  # type: ignore[union-attr]
