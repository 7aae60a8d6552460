"""Log records that members send to the coordinator, which writes them to its own log."""

from typing import Annotated

import msgspec
from msgspec import Meta

WARNING, CRITICAL = 30, 50
"""Levels of the logging module."""
MAX_TEXT_BYTES, MAX_TRACEBACK_BYTES = 1 << 10, 4 << 10
MAX_RECORDS = 32
"""Maximum number of records per message. A message with so many records of maximum size fits the channel's limit."""


class LogRecord(msgspec.Struct, frozen=True, array_like=True):
    """One log record."""

    level: Annotated[int, Meta(ge=WARNING, le=CRITICAL)]
    text: Annotated[str, Meta(max_length=MAX_TEXT_BYTES)]
    traceback: Annotated[str, Meta(max_length=MAX_TRACEBACK_BYTES)] = ""
    """The end of the traceback of a logged exception; the last line is the exception's message."""
    is_note: bool = False
    """Whether it is also one of the notes of the next `Ready`."""


class Logged(msgspec.Struct, frozen=True, tag="logged"):
    """Member to coordinator: records since the previous Logged message. Sent on either connection: with a heartbeat, or
    before the last message of the member."""

    member: int
    records: Annotated[tuple[LogRecord, ...], Meta(max_length=MAX_RECORDS)]
    """In the order in which they were logged."""
    num_dropped: Annotated[int, Meta(ge=0)] = 0
    """Number of later records that were dropped because too many were queued."""
