"""Recovery after the loss of a rank if every rank holds the last keys of windowed layers."""

import pytest

from longleaf.errors import Unavailable
from longleaf.positions import AttentionSpan, WindowSpec
from longleaf.rank_protocol.step import Move, Prefill, StepPlan
from tests.support.ranks_that_change import Group


def recomputed(plans: list[StepPlan]) -> list[Prefill]:
    return [plan.work for plan in plans if isinstance(plan.work, Prefill)]


def test_replicated_windows_are_recomputed_from_the_nearest_complete_position() -> None:
    group = Group(windows=WindowSpec(reaches=(AttentionSpan(window=6),), num_blocks=64))
    group.document("a", 64)
    group.document("a", 64, append=True)
    lost_from = 64
    group.change(0, 1, 2)
    works = recomputed(group.run())
    starts = [work.start for work in works]
    assert starts[0] == 0, "the first document is lost from its beginning"
    assert lost_from in starts, "and the second from where it was appended"
    assert sum(len(work.token_ids) for work in works) == 128
    assert all(a.end == b.start for work in works for a, b in zip(work.pieces, work.pieces[1:], strict=False))
    assert group.holds("a")


def test_joining_rank_receives_the_windows_first() -> None:
    group = Group(num_ranks=2, windows=WindowSpec(reaches=(AttentionSpan(window=6),), num_blocks=64))
    group.document("a", 64)
    job = group.ask(20, max_tokens=2, context="a")
    group.change(0, 1, None)
    first = group.step()
    assert first is not None and isinstance(first.work, Move) and first.work.windows
    group.run()
    assert group.tokens(job) == group.alone(20, 2)


def test_windows_that_cannot_be_sent_are_recomputed() -> None:
    group = Group(num_ranks=2, windows=WindowSpec(reaches=(AttentionSpan(window=6),), num_blocks=64))
    group.document("a", 64)
    group.change(0, 1, None)
    for _ in range(2):
        plan = group.schedule()
        assert plan is not None and isinstance(plan.work, Move) and plan.work.windows
        group.change(0, 1, 2, steps=(plan.step,))
    plan = group.schedule()
    assert plan is not None and isinstance(plan.work, Prefill)
    group.commit(plan)
    group.run()
    assert group.holds("a")


def test_windows_of_a_fork_are_recomputed_with_other_chunks() -> None:
    group = Group(windows=WindowSpec(reaches=(AttentionSpan(window=6),), num_blocks=64), chunk_size=64)
    group.seconds_per_token = 1.0
    group.ask(4, max_tokens=40)
    while len(group.seen) < 1 or not group.tokens(0):
        group.step()
    cuts = [len(work.token_ids) for work in recomputed(_until_there(group, "a", 50))]
    assert cuts == [16, 16, 16, 2], "chunks are short beside a decoding job"
    group.scheduler.fork_context("a", "fork", 48)
    group.run()
    group.change(0, 1, 2)
    assert [len(work.token_ids) for work in recomputed(group.run())] == [50]
    for end in (48, 50):
        group.keys.check_end(group.scheduler.contexts.get("a").path.ids, end)
    requested = group.ask(20, max_tokens=2, context="fork")
    group.run()
    assert group.tokens(requested) == group.alone(20, 2)


def _until_there(group: Group, context: str, count: int) -> list[StepPlan]:
    group.ingest(context, count)
    plans: list[StepPlan] = []
    while context not in group.contexts():
        plan = group.step()
        assert plan is not None
        plans.append(plan)
    return plans


def test_fork_at_a_temporary_window_is_refused() -> None:
    group = Group(windows=WindowSpec(reaches=(AttentionSpan(window=6),), num_blocks=64), chunk_size=16)
    group.document("a", 64)
    group.document("b", 48)
    path = group.scheduler.contexts.get("a").path
    group.change(0, 1, 2)
    plan = _until_read(group, 16)
    group.ask(20)
    with pytest.raises(Unavailable, match=r"contexts/a is being recomputed.*cannot be cut at 16"):
        group.scheduler.fork_context("a", "c", 16)
    group.scheduler.fork_context("a", "whole")
    group.commit(plan)
    group.run()
    assert group.scheduler.segments.placements[path.segments[0]].seams.keys() == {64}
    assert group.holds("a") and group.holds("b") and group.holds("whole")


def _until_read(group: Group, position: int) -> StepPlan:
    """Runs until lost tokens up to `end` are recomputed; returns the plan that is in flight."""
    while plan := group.schedule():
        if isinstance(plan.work, Prefill) and plan.work.start == position:
            return plan
        group.commit(plan)
    raise AssertionError
