"""What this process logs that the coordinator's log should tell, until it is told."""

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
from workers.member_process import is_noted

LOGGERS = ("workers", "longleaf")
MAX_KEPT = 100
"""Records that wait to be told; what comes then is counted."""


class RankLogBuffer(logging.Handler):
    """Keeps warnings, and what is worse, until they are taken. To keep one waits for nothing."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept = deque[LogRecord]()
        self._num_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Any thread may call it."""
        if len(self._kept) >= MAX_KEPT:
            self._num_dropped += 1
            return
        try:
            self._kept.append(_told(record))
        except Exception:  # it was logged with something that has no text
            self.handleError(record)

    def take(self, member: int) -> Logged | None:
        """The next of them, for a message of this member; None when there are none. Any thread may call it."""
        self.acquire()
        try:
            records = tuple(self._kept.popleft() for _ in range(min(MAX_RECORDS, len(self._kept))))
            num_dropped = 0 if self._kept else self._num_dropped
            self._num_dropped -= num_dropped
        finally:
            self.release()
        return Logged(member, records, num_dropped) if records else None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Keeps what is logged meanwhile, which then is not on standard error."""
        loggers = [logging.getLogger(name) for name in LOGGERS]
        for logger in loggers:
            logger.addHandler(self)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeHandler(self)


def _told(record: logging.LogRecord) -> LogRecord:
    reported = ""
    if record.exc_info and record.exc_info[0] is not None:  # `exc_info=False` stays False
        reported = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
    level = min(record.levelno, logging.CRITICAL)
    text = _encoded(record.getMessage())[:MAX_TEXT_BYTES].decode(errors="ignore")
    end = _encoded(reported)[-MAX_TRACEBACK_BYTES:].decode(errors="ignore")
    return LogRecord(level, text, end, is_noted(record))


def _encoded(text: str) -> bytes:
    """With names of files that are no text as Python writes them."""
    return text.encode(errors="backslashreplace")
