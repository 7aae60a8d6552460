"""Contexts as they are held in memory, and stored in catalogs, in notes on storage and in archives."""

from itertools import pairwise
from typing import Any

import msgspec

MAX_ENDS = 64
"""Maximum number of ends per context; services write 4."""


class ContextMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that all stored forms of a context have in common. Times in seconds since the Unix epoch.

    Own fields of the head of archives are not keyword-only, so that they are encoded before these.
    """

    num_tokens: int
    """Tokens of its whole path; the last segment of the path may have more."""
    ends: tuple[int, ...]
    """Positions at which it can be continued if windows are replicated: the ends of its last documents, and the
    positions of forks. The last one is the end of the context."""
    capacity: int
    """Number of positions for which its rope was chosen."""
    created: float
    updated: float
    display_name: str = ""
    is_pinned: bool = False
    expires: float | None = None
    """None: never."""

    @property
    def expiry(self) -> float | None:
        """Time of its deletion; None: never, as for pinned contexts."""
        return None if self.is_pinned else self.expires


class ContextRecord(ContextMetadata, frozen=True, kw_only=True):
    """A context without its segments. A context in memory refers to its record, and the catalog stores it."""

    id: str
    segment: int
    """The id of the last segment of its path, which is cut at `num_tokens`."""
    last_used: float
    num_hits: int = 0
    """The number of requests on it."""
    upload_id: str = ""
    """The client's upload id of its last document; empty if the client gave none."""


def metadata_fields(context: ContextMetadata, **changes: Any) -> dict[str, Any]:
    """The metadata of a context, with `changes`."""
    return {name: getattr(context, name) for name in ContextMetadata.__struct_fields__} | changes


def sound_ends(ends: tuple[int, ...], num_tokens: int) -> tuple[int, ...] | None:
    """The ends of a context of this length; by default its own end. None unless they increase up to its own end, or if
    there are too many."""
    ends = ends[: MAX_ENDS + 1] or (num_tokens,)
    is_rising = all(a < b for a, b in pairwise((0, *ends)))
    return ends if is_rising and ends[-1] == num_tokens and len(ends) <= MAX_ENDS else None
