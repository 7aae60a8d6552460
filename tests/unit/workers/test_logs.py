"""The log records that a rank buffers until they are sent to the coordinator."""

import logging
from collections.abc import Iterator

import pytest

from longleaf.rank_protocol.encoding import decode_from_rank, encode
from longleaf.rank_protocol.log_messages import MAX_RECORDS, MAX_TEXT_BYTES, MAX_TRACEBACK_BYTES, Logged, LogRecord
from workers.logs import MAX_BUFFERED_RECORDS, RankLogBuffer, capturing_logs

LARGEST = 240 << 10
"""The size of a message that the channel always accepts."""
ours = logging.getLogger("workers.some.module")
library = logging.getLogger("longleaf.some.module")


@pytest.fixture
def records() -> Iterator[RankLogBuffer]:
    records = RankLogBuffer()
    with records.listening():
        yield records


def taken(records: RankLogBuffer) -> list[Logged]:
    """All messages, as they arrive."""
    found: list[Logged] = []
    while (logged := records.pop_batch(3)) is not None:
        message = decode_from_rank(encode(logged))
        assert isinstance(message, Logged)
        found.append(message)
    return found


def texts(records: RankLogBuffer) -> list[tuple[int, str]]:
    return [(record.level, record.text) for logged in taken(records) for record in logged.records]


def test_own_warnings_are_buffered_in_order(records: RankLogBuffer) -> None:
    ours.info("too little")
    ours.warning("%d of %d", 1, 2)
    library.error("an error")
    logging.getLogger("another.library").critical("of no interest")
    logging.getLogger("workersfriend").critical("of no interest")
    ours.log(70, "worse than all")
    assert records.pop_batch(3) == Logged(
        3, (LogRecord(30, "1 of 2"), LogRecord(40, "an error"), LogRecord(50, "worse than all"))
    )
    assert records.pop_batch(3) is None


@pytest.mark.parametrize("exc_info", [False, None, True])
def test_record_without_an_exception(records: RankLogBuffer, exc_info: bool | None) -> None:
    ours.warning("epoch %d is broken", 3, exc_info=exc_info)
    assert texts(records) == [(30, "epoch 3 is broken")]


def test_records_after_the_end_are_not_buffered(records: RankLogBuffer) -> None:
    other = RankLogBuffer()
    with other.listening():
        ours.warning("while both listen")
    ours.warning("later")
    assert texts(other) == [(30, "while both listen")]
    assert [text for _, text in texts(records)] == ["while both listen", "later"]


def test_dropped_records_are_counted_once(records: RankLogBuffer) -> None:
    for number in range(MAX_BUFFERED_RECORDS + 7):
        ours.warning("record %d", number)
    found = taken(records)
    assert [text for logged in found for text in (record.text for record in logged.records)] == [
        f"record {number}" for number in range(MAX_BUFFERED_RECORDS)
    ]
    assert [logged.num_dropped for logged in found] == [0] * (len(found) - 1) + [7]
    ours.warning("there is room again")
    assert records.pop_batch(3) == Logged(3, (LogRecord(30, "there is room again"),))


def test_end_of_a_traceback_is_included(records: RankLogBuffer) -> None:
    try:
        raise ValueError("at the bottom")
    except ValueError:
        ours.exception("it failed")
    try:
        raise ValueError("é" * MAX_TRACEBACK_BYTES + "at the end")
    except ValueError:
        ours.exception("it failed")
    [short, long] = [record for logged in taken(records) for record in logged.records]
    assert (short.level, short.text) == (40, "it failed")
    assert short.traceback.startswith("Traceback (most recent call last):\n")
    assert short.traceback.endswith("\nValueError: at the bottom")
    assert MAX_TRACEBACK_BYTES - 2 < len(long.traceback.encode()) <= MAX_TRACEBACK_BYTES
    assert long.traceback.endswith("éat the end")


def test_longest_records_fit_a_message(records: RankLogBuffer) -> None:
    for _ in range(MAX_RECORDS):
        try:
            raise ValueError("\x00" * MAX_TRACEBACK_BYTES)
        except ValueError:
            ours.exception("x" * 9999)
    logged = records.pop_batch(1 << 40)
    assert logged is not None
    assert len(logged.records) == MAX_RECORDS
    assert len(logged.records[0].text) == MAX_TEXT_BYTES
    assert len(encode(logged)) < LARGEST


def test_file_names_with_surrogates_are_escaped(records: RankLogBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    for handler in logging.getLogger().handlers:  # records that the tests' handlers catch are sent as text
        monkeypatch.setattr(handler, "emit", lambda record: None)
    ours.warning("cannot read %s", "a\udcff")
    assert texts(records) == [(30, "cannot read a\\udcff")]


def test_record_that_cannot_be_formatted_is_dropped(records: RankLogBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    for handler in logging.getLogger().handlers:  # those of the tests themselves raise
        monkeypatch.setattr(handler, "emit", lambda record: None)
    ours.warning("%d", "no number")
    assert records.pop_batch(3) is None


def test_startup_notes_are_marked(records: RankLogBuffer) -> None:
    with capturing_logs() as notes:
        library.warning("slower")
        library.info("a choice")
        ours.warning("no note")
    library.warning("too late")
    assert (notes.warnings, notes.details) == (["slower"], ["a choice"])
    assert records.pop_batch(3) == Logged(
        3, (LogRecord(30, "slower", is_note=True), LogRecord(30, "no note"), LogRecord(30, "too late"))
    )
