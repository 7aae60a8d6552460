"""The loss history that clients see: lost ranks and the states of their slots."""

import pytest

from coordinator.cluster.loss_history import MAX_REMEMBERED, LossHistory
from coordinator.cluster.ports import (
    MemberEvent,
    MemberJoined,
    MemberLost,
    ReplacementAbandoned,
    ReplacementDelayed,
    ReplacementStarted,
)


def lost(member: int, rank: int | None = None, *, is_replaced: bool = True) -> MemberLost:
    return MemberLost(member, rank, 0 if rank is None else 4, "node", "died", is_replaced)


def slot_states(*events: MemberEvent) -> list[tuple[int, str, float | None, str]]:
    history = LossHistory(lambda: 100.0)
    for event in events:
        history.take(event)
    assert all(loss.time == 100.0 for loss in history.losses)
    return [(loss.member, loss.slot, loss.refill_time, loss.slot_reason) for loss in history.losses]


def test_slot_states_of_a_replacement() -> None:
    events = [
        lost(1, 1),
        ReplacementDelayed(1, 30.0, "too many"),
        ReplacementStarted(2, 1),
        MemberJoined(2, 1, "node", 5),
    ]
    states = [("waiting", None), ("waiting", 130.0), ("filling", None), ("filled", None)]
    for count, (slot, refill_time) in enumerate(states, start=1):
        assert slot_states(*events[:count]) == [(1, slot, refill_time, "")]


def test_loss_of_a_replacement_is_a_separate_entry() -> None:
    events = (lost(1, 1), ReplacementStarted(2, 1), MemberJoined(2, 1, "node", 5), lost(2, 1), ReplacementStarted(3, 2))
    assert slot_states(*events) == [(1, "filled", None, ""), (2, "filling", None, "")]


def test_loss_of_a_joining_member_keeps_the_slot_waiting() -> None:
    events = (lost(1, 1), ReplacementStarted(2, 1), lost(2), ReplacementStarted(3, 2), lost(3))
    assert slot_states(*events) == [(1, "waiting", None, ""), (2, "waiting", None, ""), (3, "waiting", None, "")]
    assert [
        slot for _, slot, _, _ in slot_states(*events, ReplacementStarted(4, 3), MemberJoined(4, 1, "node", 5))
    ] == ["filled"] * 3
    assert slot_states(*events, ReplacementAbandoned(3, "no memory"))[0] == (1, "given_up", None, "no memory")


def test_slot_without_replacement_has_a_reason() -> None:
    assert slot_states(lost(1, 1, is_replaced=False)) == [(1, "given_up", None, "ranks are not replaced")]


def test_history_is_bounded() -> None:
    assert [member for member, _, _, _ in slot_states(*map(lost, range(100)))] == list(range(100 - MAX_REMEMBERED, 100))


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (lost(1, 2), "lost member 1 on node node, rank 2 of epoch 4: died"),
        (lost(5), "lost member 5 on node node: died"),
        (MemberLost(5, None, 0, "", "no room", True), "lost member 5: no room"),
        (ReplacementStarted(6, 5), "started member 6 to replace member 5"),
        (ReplacementDelayed(5, 30.0, "too many"), "no replacement of member 5 for at least 30 s: too many"),
        (ReplacementAbandoned(5, "no memory"), "no replacement of member 5: no memory"),
        (MemberJoined(6, 2, "b", 5), "member 6 on node b joined as rank 2 of epoch 5"),
    ],
)
def test_member_events_are_described_for_the_log(event: MemberEvent, text: str) -> None:
    assert str(event) == text
