"""What the coordinator and a member say of pieces of contexts on storage, beside the steps.

A piece is one object: some runs of one segment, whole blocks of them, as they are kept. It says nothing of ranks.
Members write and read pieces on threads of their own, and answer whatever their steps do, in any order.
"""

from typing import Literal

import msgspec

from longleaf.runs import Run

MAX_PIECE_BYTES = 64 << 20
"""Keys and values of a piece, unless a block has more of them; windows are one piece, however many they are."""
Range = tuple[int, int]
"""Positions [start, end)."""
Trouble = Literal["unavailable", "damaged", "dropped"]


def max_header_bytes(num_tensors: int, num_ranges: int) -> int:
    """Bytes that the header of a piece has at most: its tensors by name, dtype, shape and place, and its positions."""
    return 4096 + 512 * num_tensors + 48 * num_ranges


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why a piece was not written or read."""

    trouble: Trouble
    """The storage cannot be used now; what it has is damaged or missing; or nobody has tried, for the epoch ended or it
    was discarded."""
    reason: str


class Save(msgspec.Struct, frozen=True, tag="save"):
    """Coordinator to member: write runs that you hold as a piece, behind all that was said before. They must stay where
    they are until the answer, or the end of the epoch."""

    ticket: int
    """Of this order, for this member; from 0."""
    name: str
    """Of the object."""
    segment: int
    runs: tuple[Run, ...]
    """In order of position."""
    of_windows: bool = False
    """Of the layers whose last keys lie on every rank: runs of EVERY_RANK."""


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """Member to coordinator, on the connection of its pulse: the piece is on storage, unless there is a failure."""

    member: int
    ticket: int
    num_bytes: int = 0
    digest: str = ""
    """Of the object, as the storage has made it."""
    failure: Failure | None = None


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """Coordinator to member: read a piece into the host's memory, for steps that restore it. It is damaged unless it
    has exactly the blocks of these positions."""

    ticket: int
    name: str
    num_bytes: int
    digest: str
    ranges: tuple[Range, ...]
    """Rising; whole blocks, each from the start of its range on."""
    of_windows: bool = False
    """Of the layers whose last keys lie on every rank."""


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """Member to coordinator, on the connection of its pulse: the piece is there, as it was written, unless there is a
    failure. It stays until it is discarded, whatever becomes of the epoch."""

    member: int
    ticket: int
    failure: Failure | None = None


class Discard(msgspec.Struct, frozen=True, tag="discard"):
    """Coordinator to member: nobody wants any more what was or is to be fetched under these tickets. What has not begun
    is answered as dropped; what was never heard of is no mistake. Saves have tickets of their own, and go on."""

    tickets: tuple[int, ...]


Order = Save | Fetch | Discard
Outcome = Saved | Fetched
