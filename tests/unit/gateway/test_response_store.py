"""Limits of stored responses."""

from contextlib import ExitStack
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import HttpProblem
from gateway.openai.responses.files import ResponseFiles
from gateway.openai.responses.store import RESPONSE_BYTES, ConversationTurn, ResponseStore
from longleaf.types import Message


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def turn_of(
    text: str, previous: ConversationTurn | None = None, owner: str = "a", turn_id: str = ""
) -> ConversationTurn:
    return ConversationTurn(owner, previous, (Message("user", text), Message("assistant", text.upper())), turn_id)


def texts(turn: ConversationTurn) -> list[str]:
    return [message.text for message in turn.conversation()]


def test_turns_share_their_history() -> None:
    store = ResponseStore(60)
    first = turn_of("one", turn_id="1")
    store.add(first, b"{}")
    store.add(turn_of("two", first, turn_id="2"), b"{}")
    store.add(turn_of("three", first, turn_id="3"), b"{}")
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
    store.add(turn_of("one", turn_id="1"), b"{}")
    clock.now = 30
    store.add(turn_of("two", turn_id="2"), b"{}")
    clock.now = 60
    assert store.get("a", "1") is None and store.get("a", "2") is not None
    store.audit()


def test_oldest_responses_of_the_owner_are_removed() -> None:
    store = ResponseStore(60, max_responses=2)
    store.add(turn_of("b", owner="b", turn_id="0"), b"{}")
    for i in range(4):
        store.add(turn_of("a", turn_id=str(i)), b"{}")
    assert [store.get("a", str(i)) is not None for i in range(4)] == [False, False, True, True]
    assert store.get("b", "0") is not None
    store.audit()


def test_owner_with_most_bytes_makes_room() -> None:
    size = turn_of("").num_bytes + RESPONSE_BYTES
    store = ResponseStore(60, max_bytes=6 * size)
    store.add(turn_of("", owner="b", turn_id="0"), b"")
    for i in range(20):
        store.add(turn_of("", turn_id=str(i)), b"")
        store.audit()
    assert store.get("b", "0") is not None and store.get("a", "19") is not None and store.get("a", "0") is None


def test_running_responses_are_counted_and_refused_beyond_the_limit() -> None:
    size = turn_of("").num_bytes
    store = ResponseStore(60, max_owner_bytes=3 * size + RESPONSE_BYTES)
    store.add(turn_of("", turn_id="0"), b"")
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


Step = tuple[str, int, int, str]
steps = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 20), st.integers(0, 9), st.sampled_from(["add", "remove", "wait"])),
    max_size=60,
)


def apply(store: ResponseStore, clock: Clock, found: list[Step]) -> None:
    for number, (owner, first, second, kind) in enumerate(found):
        known = store.get(owner, str(first))
        match kind:
            case "add":
                turn = turn_of("x" * 100 * second, known and known.turn, owner, str(number))
                with store.running(ConversationTurn(owner, turn.previous, ()), second):
                    store.audit()
                    store.add(turn, b"x")
            case "remove":
                assert store.remove(owner, str(first)) == (known is not None)
            case _:
                clock.now += second
        store.audit()


def contents(store: ResponseStore, num_ids: int) -> list[tuple[bytes, list[str]] | None]:
    """The responses and conversations of two owners."""
    found = (store.get(owner, str(number)) for owner, number in product("ab", range(num_ids)))
    return [None if stored is None else (stored.encoded, texts(stored.turn)) for stored in found]


@settings(max_examples=30)
@given(steps)
def test_any_order_keeps_the_counts_and_the_files(found: list[Step]) -> None:
    clock = Clock()
    limits: dict[str, Any] = {"max_responses": 4, "max_owner_bytes": 8_000, "max_bytes": 12_000, "clock": clock}
    with TemporaryDirectory() as folder:
        files = ResponseFiles(Path(folder))
        store = ResponseStore(20, **limits, files=files)
        apply(store, clock, found)
        before = contents(store, len(found))
        files.close()
        again = ResponseFiles(Path(folder))
        loaded = ResponseStore(20, **limits, files=again)
        loaded.audit()
        assert contents(loaded, len(found)) == before
        for owner, number in product("ab", range(len(found))):
            loaded.remove(owner, str(number))
        again.close()
        assert not list(Path(folder).glob("*.response"))


def test_unreadable_and_orphaned_files_are_deleted(tmp_path: Path) -> None:
    files = ResponseFiles(tmp_path)
    store = ResponseStore(60, files=files)
    first = turn_of("one", turn_id="1")
    store.add(first, b"{}")
    store.add(turn_of("two", first, turn_id="2"), b"{}")
    store.add(turn_of("three", turn_id="3"), b"{}")
    files.close()
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    (tmp_path / "1.response").write_bytes(b"\xc1")
    (tmp_path / "4.response").write_bytes((tmp_path / "3.response").read_bytes())
    files = ResponseFiles(tmp_path)
    store = ResponseStore(60, files=files)
    store.audit()
    files.close()
    assert store.get("a", "2") is None and store.get("a", "3") is not None
    assert [path.name for path in tmp_path.glob("*.response")] == ["3.response"]


def test_folder_is_private_and_has_one_gateway(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "responses"
    files = ResponseFiles(folder)
    assert [path.stat().st_mode & 0o777 for path in (folder.parent, folder)] == [0o700, 0o700]
    with pytest.raises(BlockingIOError):
        ResponseFiles(folder)
    files.close()
    ResponseFiles(folder).close()
