"""Messages about pieces of contexts on storage, independent of steps.

A piece is one object: runs of one segment, as whole stored blocks. It is independent of ranks. Members write and read
pieces in dedicated threads, and answer in any order, regardless of running steps.
"""

from typing import Literal

import msgspec

from longleaf.runs import Range, Run

MAX_PIECE_BYTES = 64 << 20
"""Limit of keys and values per piece, unless a single block is larger; windows are always one piece."""
FailureKind = Literal["unavailable", "damaged", "dropped"]


def max_header_bytes(num_tensors: int, num_ranges: int) -> int:
    """Maximum size of a piece's header: name, dtype, shape and offset of its tensors, and its positions."""
    return 4096 + 512 * num_tensors + 48 * num_ranges


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Reason why a piece was not written or read."""

    kind: FailureKind
    """The storage is unavailable; the data is damaged or missing; or the operation was dropped because the epoch ended
    or it was discarded."""
    reason: str


class Save(msgspec.Struct, frozen=True, tag="save"):
    """Coordinator to member: write the given runs as a piece, after all earlier messages. The runs must stay in place
    until the answer, or the end of the epoch."""

    ticket: int
    """Number of this request for this member, from 0."""
    name: str
    """Object name."""
    segment: int
    runs: tuple[Run, ...]
    """In order of position."""
    of_windows: bool = False
    """Whether the piece contains the layers with replicated windows: runs of EVERY_RANK."""


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """Member to coordinator, on the heartbeat connection: the piece is on storage, unless `failure` is set."""

    member: int
    ticket: int
    num_bytes: int = 0
    digest: str = ""
    """Digest of the object, as computed by the storage."""
    failure: Failure | None = None


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """Coordinator to member: read a piece into host memory, for steps that restore it. It counts as damaged unless it
    has exactly the blocks of these positions."""

    ticket: int
    name: str
    num_bytes: int
    digest: str
    ranges: tuple[Range, ...]
    """Increasing; whole blocks, each counted from the start of its range."""
    of_windows: bool = False
    """Whether the piece contains the layers with replicated windows."""


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """Member to coordinator, on the heartbeat connection: the piece is in memory and intact, unless `failure` is set.
    It is kept until it is discarded, even after the end of the epoch."""

    member: int
    ticket: int
    failure: Failure | None = None


class Discard(msgspec.Struct, frozen=True, tag="discard"):
    """Coordinator to member: the pieces of these fetch tickets are no longer needed. Fetches that have not started are
    answered as dropped; unknown tickets are ignored. Saves have separate tickets and continue."""

    tickets: tuple[int, ...]


Order = Save | Fetch | Discard
Outcome = Saved | Fetched
