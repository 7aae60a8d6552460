"""Limits of stored responses."""

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import HttpProblem
from gateway.openai.responses.store import RESPONSE_BYTES, ConversationTurn, ResponseStore
from longleaf.types import Message


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def turn_of(text: str, previous: ConversationTurn | None = None, owner: str = "a") -> ConversationTurn:
    return ConversationTurn(owner, previous, (Message("user", text), Message("assistant", text.upper())))


def texts(turn: ConversationTurn) -> list[str]:
    return [message.text for message in turn.conversation()]


def test_turns_share_their_history() -> None:
    store = ResponseStore(60)
    first = turn_of("one")
    store.add("a", "1", b"{}", first)
    store.add("a", "2", b"{}", turn_of("two", first))
    store.add("a", "3", b"{}", turn_of("three", first))
    store.audit()
    assert store.remove("a", "1") and not store.remove("a", "1")
    store.audit()
    second, third = store.get("a", "2"), store.get("a", "3")
    assert second is not None and texts(second.turn) == ["one", "ONE", "two", "TWO"]
    assert third is not None and texts(third.turn) == ["one", "ONE", "three", "THREE"]
    assert store.get("b", "2") is None and not store.remove("b", "2")
    assert store.remove("a", "2") and store.remove("a", "3")
    store.audit()


def test_responses_expire() -> None:
    clock = Clock()
    store = ResponseStore(60, clock=clock)
    store.add("a", "1", b"{}", turn_of("one"))
    clock.now = 30
    store.add("a", "2", b"{}", turn_of("two"))
    clock.now = 60
    assert store.get("a", "1") is None and store.get("a", "2") is not None
    store.audit()


def test_oldest_responses_of_the_owner_are_removed() -> None:
    store = ResponseStore(60, max_responses=2)
    store.add("b", "0", b"{}", turn_of("b", owner="b"))
    for i in range(4):
        store.add("a", str(i), b"{}", turn_of("a"))
    assert [store.get("a", str(i)) is not None for i in range(4)] == [False, False, True, True]
    assert store.get("b", "0") is not None
    store.audit()


def test_owner_with_most_bytes_makes_room() -> None:
    size = turn_of("").num_bytes + RESPONSE_BYTES
    store = ResponseStore(60, max_bytes=6 * size)
    store.add("b", "0", b"", turn_of("", owner="b"))
    for i in range(20):
        store.add("a", str(i), b"", turn_of(""))
        store.audit()
    assert store.get("b", "0") is not None and store.get("a", "19") is not None and store.get("a", "0") is None


def test_running_responses_are_counted_and_refused_beyond_the_limit() -> None:
    size = turn_of("").num_bytes
    store = ResponseStore(60, max_owner_bytes=3 * size + RESPONSE_BYTES)
    store.add("a", "0", b"", turn_of(""))
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(store.running(turn_of(""), 0))
        assert store.get("a", "0") is not None
        stack.enter_context(store.running(turn_of(""), size))
        assert store.get("a", "0") is None  # it made room
        store.audit()
        with pytest.raises(HttpProblem) as raised:
            stack.enter_context(store.running(turn_of(""), RESPONSE_BYTES))
        assert raised.value.code == "gateway_busy"
        stack.enter_context(store.running(turn_of("", owner="b"), 0))
        store.audit()
    store.audit()
    with store.running(turn_of(""), 0):
        pass


steps = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.integers(0, 9), st.sampled_from(["add", "remove", "wait"])),
    max_size=60,
)


@given(steps)
def test_any_order_keeps_the_counts(found: list[tuple[str, int, int, str]]) -> None:
    clock = Clock()
    store = ResponseStore(20, max_responses=4, max_owner_bytes=8_000, max_bytes=12_000, clock=clock)
    for number, (owner, first, second, kind) in enumerate(found):
        known = store.get(owner, str(first))
        match kind:
            case "add":
                turn = turn_of("x" * 100 * second, known and known.turn, owner)
                with store.running(ConversationTurn(owner, turn.previous, ()), second):
                    store.audit()
                    if store.get(owner, str(number % 10)) is None:
                        store.add(owner, str(number % 10), b"x", turn)
            case "remove":
                assert store.remove(owner, str(first)) == (known is not None)
            case _:
                clock.now += second
        store.audit()
