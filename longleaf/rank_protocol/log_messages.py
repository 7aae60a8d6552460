"""What members log, as they tell the coordinator, whose log people read: theirs lie where nobody looks."""

from typing import Annotated

import msgspec
from msgspec import Meta

WARNING, CRITICAL = 30, 50
"""Levels of the logging module."""
MAX_TEXT_BYTES, MAX_TRACEBACK_BYTES = 1 << 10, 4 << 10
MAX_RECORDS = 32
"""That are told at once: as many of the longest are a message that the channel takes."""


class LogRecord(msgspec.Struct, frozen=True, array_like=True):
    """What was logged once."""

    level: Annotated[int, Meta(ge=WARNING, le=CRITICAL)]
    text: Annotated[str, Meta(max_length=MAX_TEXT_BYTES)]
    traceback: Annotated[str, Meta(max_length=MAX_TRACEBACK_BYTES)] = ""
    """The end of it, of an exception that was logged; its own text is the last line."""
    is_note: bool = False
    """Whether it is among the notes of the next `Ready`, too."""


class Logged(msgspec.Struct, frozen=True, tag="logged"):
    """Member to coordinator: what was logged since it was told last, on either connection: with its pulse, or before
    the word that ends its life."""

    member: int
    records: Annotated[tuple[LogRecord, ...], Meta(max_length=MAX_RECORDS)]
    """In order."""
    num_dropped: Annotated[int, Meta(ge=0)] = 0
    """Those that came behind these while too many waited: nothing is left of them but their number."""
