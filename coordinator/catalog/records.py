"""What a catalog keeps, as structs."""

from array import array

import msgspec

from longleaf.geometry import OWN_ROPE, Rope


class SegmentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A sealed segment. Ids are given once, also when the segment is gone."""

    id: int
    parent: int | None
    """The last segment of the path that it continues: that one's path, cut at `start`."""
    start: int
    """Position of its first token."""
    rope: Rope = OWN_ROPE
    token_ids: "array[int]"


class ContextRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A context. Its path is that of its last segment, cut after `num_tokens`. Times in seconds since the epoch."""

    id: str
    segment: int
    num_tokens: int
    ends: tuple[int, ...]
    """Where its last documents ended."""
    capacity: int
    created: float
    updated: float
    display_name: str = ""
    is_pinned: bool = False
    expires: float | None = None
    last_used: float = 0.0
    num_hits: int = 0


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept at once, or not at all."""

    segments: tuple[SegmentRecord, ...] = ()
    """New ones, each after what it continues."""
    contexts: tuple[ContextRecord, ...] = ()
    """New ones, and such as replace what was kept under their ids."""
    dropped: tuple[str, ...] = ()
    """Ids of contexts that are deleted, and with them all segments that no other context leads through."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """All that a catalog holds when it is opened."""

    service_id: str
    """Of the database: nobody else has it."""
    epoch: int
    """The last epoch of the services before; 0: there was none."""
    next_segment: int
    """No segment had this id yet, nor a larger one."""
    segments: tuple[SegmentRecord, ...] = ()
    """In order of ids; without those that are damaged, and those that continue such."""
    contexts: tuple[ContextRecord, ...] = ()
    damaged: tuple[tuple[str, str], ...] = ()
    """Ids of contexts that are kept no longer as they were, and what is wrong."""
