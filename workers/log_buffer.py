"""Buffers log records of this process until they are sent to the coordinator."""

import logging
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from longleaf.rank_protocol.log_messages import (
    MAX_RECORDS,
    MAX_TEXT_BYTES,
    MAX_TRACEBACK_BYTES,
    Logged,
    LogRecord,
)
from workers.member_process import is_captured

LOGGERS = ("workers", "longleaf")
MAX_BUFFERED_RECORDS = 100
"""Maximum number of buffered records. Further records are dropped and counted."""


class RankLogBuffer(logging.Handler):
    """Buffers warnings and errors until `pop_batch` returns them. Buffering never blocks."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._records = deque[LogRecord]()
        self._num_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Buffers a record. Thread-safe."""
        if len(self._records) >= MAX_BUFFERED_RECORDS:
            self._num_dropped += 1
            return
        try:
            self._records.append(_to_record(record))
        except Exception:  # an argument of the record cannot be formatted
            self.handleError(record)

    def pop_batch(self, member: int) -> Logged | None:
        """The next records, as a message of this member; None when there are none. Thread-safe."""
        self.acquire()
        try:
            records = tuple(self._records.popleft() for _ in range(min(MAX_RECORDS, len(self._records))))
            num_dropped = 0 if self._records else self._num_dropped
            self._num_dropped -= num_dropped
        finally:
            self.release()
        return Logged(member, records, num_dropped) if records else None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Buffers the records that are logged in the body, and keeps them off standard error."""
        loggers = [logging.getLogger(name) for name in LOGGERS]
        for logger in loggers:
            logger.addHandler(self)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeHandler(self)


def _to_record(record: logging.LogRecord) -> LogRecord:
    traceback_text = ""
    if record.exc_info and record.exc_info[0] is not None:  # `exc_info=False` stays False
        traceback_text = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
    level = min(record.levelno, logging.CRITICAL)
    text = _encoded(record.getMessage())[:MAX_TEXT_BYTES].decode(errors="ignore")
    end = _encoded(traceback_text)[-MAX_TRACEBACK_BYTES:].decode(errors="ignore")
    return LogRecord(level, text, end, is_captured(record))


def _encoded(text: str) -> bytes:
    """The text as UTF-8; characters that cannot be encoded, as in some file names, become backslash escapes."""
    return text.encode(errors="backslashreplace")
