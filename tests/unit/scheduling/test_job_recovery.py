"""What follows the loss of a rank: who waits for what, what is read again and in which order, and what must go."""

import pytest

from coordinator.engine_messages import Prompt, SchedulingClaim
from longleaf.errors import InvalidArgument, ResourceExhausted, Unavailable
from longleaf.rank_protocol.step import Decode, Move, Prefill, StepPlan
from longleaf.sampling import Sampling
from longleaf.types import ContextSettings, Recovering
from tests.support.ranks_that_change import Group
from tests.support.scheduling import kinds


def reread(plans: list[StepPlan]) -> list[Prefill]:
    return [plan.work for plan in plans if isinstance(plan.work, Prefill)]


def test_only_the_share_of_a_lost_rank_is_read_again_several_runs_at_once() -> None:
    group = Group()
    group.document("a", 128)  # four chunks of four pieces
    group.change(0, 2, 3)
    works = reread(group.run())
    assert [(piece.start, piece.end) for piece in works[0].pieces] == [(8, 16), (48, 56), (72, 80)]
    assert sum(len(work.token_ids) for work in works) == 32
    assert all(len({piece.rank for piece in work.pieces}) == len(work.pieces) for work in works)
    assert works[0].token_ids == (*range(8, 16), *range(48, 56), *range(72, 80))
    assert group.holds("a")


def test_a_long_gap_is_dealt_over_all_ranks() -> None:
    group = Group(num_ranks=1, num_blocks=128)
    group.document("a", 128)
    group.change(None, None, None, None)
    works = reread(group.run())
    assert [len(work.token_ids) for work in works] == [32] * 4
    assert [len(work.pieces) for work in works] == [4] * 4


def test_what_a_stream_waits_for_comes_first_and_others_go_on_meanwhile() -> None:
    group = Group()
    for context in "abc":
        group.document(context, 64)
    group.change(0, 1, 2)
    requested = group.ask(20, max_tokens=2, context="b")
    free = group.ask(9, max_tokens=8)
    plans = group.run()
    path = group.scheduler.contexts.get("b").path.ids
    assert reread(plans)[0].path == path
    assert group.tokens(requested) == group.alone(20, 2)
    assert group.tokens(free) == group.alone(9, 8)
    assert "PDPD" in kinds(plans), "chunks alternate with the rows of whoever does not wait"
    assert group.holds("a") and group.holds("b") and group.holds("c")


def test_a_job_begins_when_its_own_path_is_held_again() -> None:
    group = Group()
    group.document("a", 128)
    group.scheduler.fork_context("a", "short", 40)
    group.change(0, 2, 3)
    group.ask(20, max_tokens=1, context="short")
    plans = group.run()
    row = next(i for i, plan in enumerate(plans) if isinstance(plan.work, Decode))
    assert any(max(piece.end for piece in work.pieces) > 80 for work in reread(plans[row:]))


def test_those_who_wait_are_told_how_far_it_is() -> None:
    group = Group()
    group.document("a", 128)
    job = group.ask(20, max_tokens=4, context="a")
    while not group.seen.get(job) or not group.tokens(job):
        group.step()
    group.change(0, 2, 3)
    assert group.scheduler.recovering == Recovering(lost_tokens=32, recovered_tokens=0, total_tokens=32)
    group.run()
    reported = [event for event in group.seen[job] if isinstance(event, Recovering)]
    assert reported == [Recovering(32 - done, done, 32) for done in (0, 24)]
    assert group.tokens(job) == group.alone(20, 4)
    assert group.scheduler.recovering is None


def test_a_document_goes_on_after_its_last_chunk_that_was_read() -> None:
    group = Group()
    job = group.ingest("a", 128)
    group.step()
    group.step()
    assert group.schedule() is not None  # and is lost
    group.change(0, 1, 2, 3)
    works = reread(group.run())
    assert [(work.start, len(work.token_ids)) for work in works] == [(64, 32), (96, 32)]
    assert "a" in group.contexts()
    assert job in group.seen


def test_a_document_waits_for_its_own_lost_beginning() -> None:
    group = Group()
    group.ingest("a", 128)
    group.step()
    group.step()
    group.change(0, 1, 3)
    works = reread(group.run())
    assert [piece.start for piece in works[0].pieces] == [16, 40]
    assert [work.start for work in works[1:]] == [64, 96]
    assert group.holds("a")


def test_what_cannot_be_held_goes_in_order() -> None:
    group = Group(num_ranks=3, num_blocks=16)
    for context in "abcd":
        group.document(context, 40)
    group.scheduler.contexts.change("b", ContextSettings(is_pinned=True), 0.0)
    requested = group.ask(4, max_tokens=2, context="a")
    group.change(0, 1)
    assert [given_up.context for given_up in group.scheduler.take_given_up()] == ["c"]
    group.run()
    assert group.tokens(requested) == group.alone(4, 2)
    group.change(0)
    assert [given_up.context for given_up in group.scheduler.take_given_up()] == ["d", "a"]
    group.run()
    assert group.contexts() == ["b"]


def test_prompts_that_are_kept_go_before_contexts() -> None:
    group = Group(num_ranks=2, num_blocks=16)
    group.ask(41, max_tokens=1)
    group.run()
    group.document("a", 40)
    assert list(group.scheduler.segments.kept)
    group.change(0)
    assert group.scheduler.take_given_up() == []
    group.run()
    assert group.holds("a")


def test_a_job_that_never_fits_again_fails_and_one_whose_context_goes_is_told_so() -> None:
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


def test_no_context_goes_for_a_job_that_has_no_room_even_alone() -> None:
    group = Group(num_ranks=2, num_blocks=16)
    group.document("a", 40)
    large = group.ask(36, max_tokens=40)
    group.change(0)
    error = group.seen[large][-1]
    assert isinstance(error, ResourceExhausted) and error.subject == "pool"
    assert group.scheduler.take_given_up() == []
    group.run()
    assert group.holds("a")


def test_nothing_goes_while_others_are_to_come() -> None:
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
    assert group.scheduler.take_given_up() == []


def test_an_answer_that_needs_all_ranks_waits_for_those_that_are_to_come() -> None:
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


def test_what_only_all_ranks_have_room_for_is_to_be_asked_again() -> None:
    group = Group(num_ranks=2, num_blocks=16)
    group.change(0, may_grow=True)
    with pytest.raises(
        ResourceExhausted, match="the pool of all ranks has 64.* until a lost rank is replaced"
    ) as reported:
        group.ask(80)
    assert reported.value.retry_seconds == 5.0
    group.scheduler.settle()
    with pytest.raises(InvalidArgument):
        group.ask(80)


def test_who_finds_contexts_in_its_place_is_to_ask_again() -> None:
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


def test_who_comes_takes_a_share() -> None:
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
    assert resident[2] >= 192 // 3 - 2 * group.config.block_size, "but for what the stream held meanwhile"
    assert group.tokens(stream) == group.alone(20, 9)
    assert group.holds("a")


def test_a_run_is_at_its_old_place_until_the_move_is_answered() -> None:
    group = Group(num_ranks=1)
    group.document("a", 64)
    group.change(0, None)
    plan = group.schedule()
    assert plan is not None and isinstance(plan.work, Move)
    group.change(0)  # the new one has gone again, amid the move
    assert group.scheduler.recovering is None
    assert group.holds("a")


def test_a_deadline_that_only_recovery_breaks_says_when_to_come_again() -> None:
    group = Group()
    group.seconds_per_token = 0.01
    group.document("a", 128)
    group.change(0, 1, 2)
    prompt = Prompt(
        context="a",
        token_ids=(1, 2),
        sampling=Sampling(max_tokens=1),
        claim=SchedulingClaim(deadline=0.1),
        end_tokens=frozenset(),
    )
    with pytest.raises(Unavailable) as caught:
        group.scheduler.admit(99, prompt)
    assert caught.value.retry_seconds == pytest.approx(0.32)
