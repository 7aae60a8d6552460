"""Recovery after the loss of a rank: jobs that wait, the order of recomputation, and contexts that are dropped."""

import pytest

from coordinator.engine_messages import Prompt, SchedulingParams
from longleaf.errors import InvalidArgument, ResourceExhausted, Unavailable
from longleaf.rank_protocol.step import Decode, Move, Prefill, StepPlan
from longleaf.sampling import SamplingParams
from longleaf.types import ContextSettings, Recovering
from tests.support.ranks_that_change import Group
from tests.support.scheduling import kinds


def recomputed(plans: list[StepPlan]) -> list[Prefill]:
    return [plan.work for plan in plans if isinstance(plan.work, Prefill)]


def test_lost_runs_are_recomputed_together() -> None:
    group = Group()
    group.document("a", 128)  # four chunks of four pieces
    group.change(0, 2, 3)
    works = recomputed(group.run())
    assert [(piece.start, piece.end) for piece in works[0].pieces] == [(8, 16), (48, 56), (72, 80)]
    assert sum(len(work.token_ids) for work in works) == 32
    assert all(len({piece.rank for piece in work.pieces}) == len(work.pieces) for work in works)
    assert works[0].token_ids == (*range(8, 16), *range(48, 56), *range(72, 80))
    assert group.holds("a")


def test_long_gap_is_distributed_over_all_ranks() -> None:
    group = Group(num_ranks=1, num_blocks=128)
    group.document("a", 128)
    group.change(None, None, None, None)
    works = recomputed(group.run())
    assert [len(work.token_ids) for work in works] == [32] * 4
    assert [len(work.pieces) for work in works] == [4] * 4


def test_requested_tokens_are_recomputed_first_and_other_jobs_continue() -> None:
    group = Group()
    for context in "abc":
        group.document(context, 64)
    group.change(0, 1, 2)
    requested = group.ask(20, max_tokens=2, context="b")
    free = group.ask(9, max_tokens=8)
    plans = group.run()
    path = group.scheduler.contexts.get("b").path.ids
    assert recomputed(plans)[0].path == path
    assert group.tokens(requested) == group.alone(20, 2)
    assert group.tokens(free) == group.alone(9, 8)
    assert "PDPD" in kinds(plans), "chunks alternate with rows of jobs that do not wait"
    assert group.holds("a") and group.holds("b") and group.holds("c")


def test_job_begins_when_its_own_path_is_recovered() -> None:
    group = Group()
    group.document("a", 128)
    group.scheduler.fork_context("a", "short", 40)
    group.change(0, 2, 3)
    group.ask(20, max_tokens=1, context="short")
    plans = group.run()
    row = next(i for i, plan in enumerate(plans) if isinstance(plan.work, Decode))
    assert any(max(piece.end for piece in work.pieces) > 80 for work in recomputed(plans[row:]))


def test_waiting_jobs_receive_the_progress() -> None:
    group = Group()
    group.document("a", 128)
    job = group.ask(20, max_tokens=4, context="a")
    while not group.seen.get(job) or not group.tokens(job):
        group.step()
    group.change(0, 2, 3)
    assert group.scheduler.recovery.total == Recovering(lost_tokens=32, recovered_tokens=0, total_tokens=32)
    group.run()
    reported = [event for event in group.seen[job] if isinstance(event, Recovering)]
    assert reported == [Recovering(32 - done, done, 32) for done in (0, 24)]
    assert group.tokens(job) == group.alone(20, 4)
    assert group.scheduler.recovery.total is None


def test_ingest_continues_after_its_last_committed_chunk() -> None:
    group = Group()
    job = group.ingest("a", 128)
    group.step()
    group.step()
    assert group.schedule() is not None  # and is lost
    group.change(0, 1, 2, 3)
    works = recomputed(group.run())
    assert [(work.start, len(work.token_ids)) for work in works] == [(64, 32), (96, 32)]
    assert "a" in group.contexts()
    assert job in group.seen


def test_ingest_waits_for_its_lost_beginning() -> None:
    group = Group()
    group.ingest("a", 128)
    group.step()
    group.step()
    group.change(0, 1, 3)
    works = recomputed(group.run())
    assert [piece.start for piece in works[0].pieces] == [16, 40]
    assert [work.start for work in works[1:]] == [64, 96]
    assert group.holds("a")


def test_contexts_that_do_not_fit_are_dropped_in_order() -> None:
    group = Group(num_ranks=3, num_blocks=16)
    for context in "abcd":
        group.document(context, 40)
    group.scheduler.contexts.change("b", ContextSettings(is_pinned=True), 0.0)
    requested = group.ask(4, max_tokens=2, context="a")
    group.change(0, 1)
    assert [dropped.context for dropped in group.scheduler.job_recovery.pop_dropped()] == ["c"]
    group.run()
    assert group.tokens(requested) == group.alone(4, 2)
    group.change(0)
    assert [dropped.context for dropped in group.scheduler.job_recovery.pop_dropped()] == ["d", "a"]
    group.run()
    assert group.contexts() == ["b"]


def test_cached_prompts_are_dropped_before_contexts() -> None:
    group = Group(num_ranks=2, num_blocks=16)
    group.ask(41, max_tokens=1)
    group.run()
    group.document("a", 40)
    assert list(group.scheduler.segments.cached)
    group.change(0)
    assert group.scheduler.job_recovery.pop_dropped() == []
    group.run()
    assert group.holds("a")


def test_jobs_that_no_longer_fit_fail() -> None:
    group = Group(num_ranks=2, num_blocks=16)
    group.document("a", 40)
    group.document("b", 24)
    for context in "ab":
        group.scheduler.contexts.change(context, ContextSettings(is_pinned=True), 0.0)
    small, large = group.ask(4, max_tokens=2, context="b"), group.ask(36, max_tokens=20)
    group.change(0)
    error = group.seen[large][-1]
    assert isinstance(error, ResourceExhausted) and error.subject == "pool"
    assert group.contexts() == ["a", "b"] or group.contexts() == ["b"]
    error = group.seen[small][-1]
    assert isinstance(error, ResourceExhausted)


def test_no_context_is_dropped_for_a_job_that_never_fits() -> None:
    group = Group(num_ranks=2, num_blocks=16)
    group.document("a", 40)
    large = group.ask(36, max_tokens=40)
    group.change(0)
    error = group.seen[large][-1]
    assert isinstance(error, ResourceExhausted) and error.subject == "pool"
    assert group.scheduler.job_recovery.pop_dropped() == []
    group.run()
    assert group.holds("a")


def test_nothing_is_dropped_while_replacements_are_expected() -> None:
    group = Group(num_ranks=2, num_blocks=16)
    for context in "abc":
        group.document(context, 32)
    job = group.ask(4, max_tokens=2, context="c")
    group.change(0, may_grow=True)
    group.run()
    assert group.contexts() == ["a", "b", "c"]
    group.change(0, None)
    group.run()
    assert all(map(group.holds, "abc"))
    assert group.tokens(job) == group.alone(4, 2)
    assert group.scheduler.job_recovery.pop_dropped() == []


def test_answer_that_needs_all_ranks_waits_for_replacements() -> None:
    group = Group(num_ranks=2, num_blocks=16)
    job = group.ask(36, max_tokens=60)
    for _ in range(5):
        group.step()
    group.change(0, may_grow=True)
    group.run()
    assert group.scheduler.num_waiting == 1
    group.change(0, None)
    group.run()
    assert group.tokens(job) == group.alone(36, 60)


def test_request_that_only_fits_all_ranks_is_retryable() -> None:
    group = Group(num_ranks=2, num_blocks=16)
    group.change(0, may_grow=True)
    with pytest.raises(
        ResourceExhausted, match="the pool of all ranks has 64.* until a lost rank is replaced"
    ) as reported:
        group.ask(80)
    assert reported.value.retry_seconds == 5.0
    group.scheduler.job_recovery.shrink_to_fit()
    with pytest.raises(InvalidArgument):
        group.ask(80)


def test_request_displaced_by_contexts_is_retryable() -> None:
    group = Group(num_ranks=2, num_blocks=16)
    group.document("a", 48)
    group.change(0, may_grow=True)
    with pytest.raises(
        ResourceExhausted, match="contexts use too many of .* until a lost rank is replaced"
    ) as reported:
        group.ask(40)
    assert reported.value.retry_seconds == 5.0
    group.change(0, None)
    group.ask(40)
    group.run()


def test_joining_rank_takes_a_share() -> None:
    group = Group(num_ranks=2, max_moved_blocks=3)
    group.document("a", 192)
    stream = group.ask(20, max_tokens=9, context="a")
    group.change(0, 1, None)
    plans = group.run()
    moves = [plan.work for plan in plans if isinstance(plan.work, Move)]
    assert len(moves) > 1
    assert all(sum(len(transfer.target.blocks) for transfer in move.transfers) <= 3 for move in moves)
    assert all(transfer.target.rank == 2 for move in moves for transfer in move.transfers)
    while_streaming = zip(plans[:5], plans[1:6], strict=True)
    assert not any(isinstance(a.work, Move) and isinstance(b.work, Move) for a, b in while_streaming)
    resident = group.scheduler.segments.tokens_by_rank()
    assert resident[2] >= 192 // 3 - 2 * group.config.block_size, "except for the blocks that the stream used meanwhile"
    assert group.tokens(stream) == group.alone(20, 9)
    assert group.holds("a")


def test_run_stays_at_its_old_rank_until_the_move_completes() -> None:
    group = Group(num_ranks=1)
    group.document("a", 64)
    group.change(0, None)
    plan = group.schedule()
    assert plan is not None and isinstance(plan.work, Move)
    group.change(0)  # the new rank is lost again during the move
    assert group.scheduler.recovery.total is None
    assert group.holds("a")


def test_deadline_missed_only_due_to_recovery_is_retryable() -> None:
    group = Group()
    group.seconds_per_token = 0.01
    group.document("a", 128)
    group.change(0, 1, 2)
    prompt = Prompt(
        context="a",
        token_ids=(1, 2),
        sampling=SamplingParams(max_tokens=1),
        scheduling=SchedulingParams(deadline=0.1),
        end_tokens=frozenset(),
    )
    with pytest.raises(Unavailable) as caught:
        group.scheduler.admit(99, prompt)
    assert caught.value.retry_seconds == pytest.approx(0.32)
