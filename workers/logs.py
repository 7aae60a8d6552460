"""Log records of this process: captured while a rank joins an epoch, or buffered until they are sent."""

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

LIBRARY = "longleaf"
"""Name of the logger whose records are captured."""
LOGGERS = ("workers", LIBRARY)
MAX_BUFFERED_RECORDS = 100
"""Maximum number of buffered records. Further records are dropped and counted."""


@contextmanager
def capturing_logs() -> Iterator["LogCapture"]:
    """Captures the log messages of the library from INFO on.

    Only the coordinator reports these messages. The local log of a rank is hard to find: under Ray it is a file of the
    worker.
    """
    logger, notes = logging.getLogger(LIBRARY), LogCapture()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(notes)
    logger.propagate = False
    try:
        yield notes
    finally:
        logger.propagate = True
        logger.removeHandler(notes)
        logger.setLevel(level)


class LogCapture(logging.Handler):
    """Collects the formatted messages of log records."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.warnings: list[str] = []
        """Messages of WARNING and above, such as performance hints."""
        self.details: list[str] = []
        """Messages below WARNING, such as the choice of the merge and its reason."""

    def emit(self, record: logging.LogRecord) -> None:
        texts = self.details if record.levelno < logging.WARNING else self.warnings
        texts.append(record.getMessage())


def is_captured(record: logging.LogRecord) -> bool:
    """Whether a record is being captured."""
    is_taking = any(isinstance(handler, LogCapture) for handler in logging.getLogger(LIBRARY).handlers)
    return is_taking and record.name.split(".")[0] == LIBRARY


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
