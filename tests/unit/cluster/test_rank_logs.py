"""The log records of ranks in the coordinator's log."""

import logging
from collections.abc import Callable

import msgspec
import pytest

from coordinator.cluster.member import Member
from coordinator.cluster.ports import MemberEvent, MemberLost
from coordinator.cluster.rank_logs import MAX_AT_ONCE, NO_RANK, PER_SECOND, RankLogForwarder
from longleaf.rank_protocol.encoding import decode_from_rank, encode
from longleaf.rank_protocol.log_messages import MAX_RECORDS, MAX_TEXT_BYTES, MAX_TRACEBACK_BYTES, Logged, LogRecord
from longleaf.rank_protocol.member_messages import Hello

SLOWER = LogRecord(30, "slower", is_note=True)


class FakeCoordinator:
    """Members 5 and 6 are the ranks of epoch 4; member 7 is not a rank yet. The clock is stopped."""

    def __init__(self) -> None:
        self.epoch, self.ranks = 4, (5, 6)
        self.now = 100.0
        self.watchers: list[Callable[[MemberEvent], None]] = []
        self.records = RankLogForwarder(self, lambda: self.now)

    def subscribe(self, observer: Callable[[MemberEvent], None]) -> None:
        self.watchers.append(observer)

    def log(self, number: int, *records: LogRecord, num_dropped: int = 0) -> None:
        member = Member(number, hello=Hello(number, f"node-{number}", "127.0.0.1", 1))
        self.records.log_records(member, Logged(number, records, num_dropped))

    def lose(self, number: int) -> None:
        for watcher in self.watchers:
            watcher(MemberLost(number, None, 0, f"node-{number}", "died", True))


@pytest.fixture
def coordinator() -> FakeCoordinator:
    return FakeCoordinator()


def logged_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert {record.name for record in caplog.records} <= {"coordinator.cluster"}
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_record_has_rank_node_epoch_and_level(coordinator: FakeCoordinator, caplog: pytest.LogCaptureFixture) -> None:
    coordinator.log(6, LogRecord(30, "a warning"), LogRecord(50, "it failed", "Traceback\nValueError: 5% of it"))
    coordinator.log(7, LogRecord(40, "cannot load"))
    found = [(record.levelno, record.rank, record.node, record.epoch) for record in caplog.records]  # type: ignore[attr-defined]
    assert found == [(30, 1, "node-6", 4), (50, 1, "node-6", 4), (40, NO_RANK, "node-7", 4)]
    assert logged_messages(caplog) == [
        "rank 1: a warning",
        "rank 1: it failed\nTraceback\nValueError: 5% of it",
        "member 7: cannot load",
    ]


def test_flood_of_records_is_throttled_per_member(
    coordinator: FakeCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(1000):
        coordinator.log(5, *[LogRecord(30, "mad")] * MAX_RECORDS)
    coordinator.log(6, LogRecord(30, "sane"))
    assert logged_messages(caplog) == ["rank 0: mad"] * MAX_AT_ONCE + ["rank 1: sane"]
    coordinator.now += 2 / PER_SECOND
    coordinator.log(5, LogRecord(30, "still mad"), LogRecord(30, "and again"), LogRecord(30, "and again"))
    num_left_out = 1000 * MAX_RECORDS - MAX_AT_ONCE
    assert logged_messages(caplog) == [
        f"rank 0: {num_left_out} log records dropped: too many per second",
        "rank 0: still mad",
        "rank 0: and again",
    ]
    coordinator.now += 1e6
    coordinator.log(5, *[LogRecord(30, "rested")] * (MAX_AT_ONCE + 1))
    assert len(logged_messages(caplog)) == MAX_AT_ONCE + 1, "one message counts the dropped records"


def test_records_dropped_by_a_rank_are_counted(coordinator: FakeCoordinator, caplog: pytest.LogCaptureFixture) -> None:
    coordinator.log(5, LogRecord(30, "first"), num_dropped=7)
    assert logged_messages(caplog) == ["rank 0: first"]
    coordinator.log(5, LogRecord(30, "second"))
    coordinator.log(5, LogRecord(30, "third"))
    assert logged_messages(caplog) == [
        "rank 0: 7 log records dropped: too many per second",
        "rank 0: second",
        "rank 0: third",
    ]


def test_state_of_a_lost_member_is_removed(coordinator: FakeCoordinator, caplog: pytest.LogCaptureFixture) -> None:
    coordinator.log(5, LogRecord(30, "first"), num_dropped=7)
    coordinator.lose(5)
    coordinator.lose(6)
    assert logged_messages(caplog) == ["rank 0: first", "rank 0: 7 log records dropped: too many per second"]
    assert not coordinator.records._throttles


def test_notes_printed_at_startup_are_not_logged_again(
    coordinator: FakeCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    long = "é" * MAX_TEXT_BYTES
    coordinator.log(5, SLOWER, LogRecord(30, "no note"))
    coordinator.records.skip_notes(["slower", "a choice", long])
    coordinator.log(
        5, SLOWER, LogRecord(30, long[: MAX_TEXT_BYTES // 2], is_note=True), LogRecord(30, "new", is_note=True)
    )
    coordinator.log(6, LogRecord(30, "slower"))
    assert logged_messages(caplog) == ["rank 0: no note", "rank 0: new", "rank 1: slower"]


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (Logged(1, (LogRecord(20, "text"),)), "int` >= 30"),
        (Logged(1, (LogRecord(51, "text"),)), "int` <= 50"),
        (Logged(1, (LogRecord(30, "x" * (MAX_TEXT_BYTES + 1)),)), "length <= 1024"),
        (Logged(1, (LogRecord(30, "", "x" * (MAX_TRACEBACK_BYTES + 1)),)), "length <= 4096"),
        (Logged(1, (LogRecord(30, ""),) * (MAX_RECORDS + 1)), "length <= 32"),
        (Logged(1, (), -1), "int` >= 0"),
        (Logged(1, (LogRecord("30", "text"),)), "Expected `int`"),  # type: ignore[arg-type]
        (Logged(1, (LogRecord(30, b"text"),)), "Expected `str`"),  # type: ignore[arg-type]
    ],
)
def test_invalid_messages_are_rejected(message: Logged, what: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        decode_from_rank(encode(message))
    assert what in str(caught.value)


def test_largest_valid_message_is_accepted() -> None:
    largest = LogRecord(logging.CRITICAL, "x" * MAX_TEXT_BYTES, "x" * MAX_TRACEBACK_BYTES, True)
    message = Logged(1, (largest,) * MAX_RECORDS, 1 << 40)
    assert decode_from_rank(encode(message)) == message
