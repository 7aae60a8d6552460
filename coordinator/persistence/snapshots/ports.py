"""What snapshots are made of, as whoever makes them sees it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from coordinator.kv_cache.token_paths import Segment
from coordinator.persistence.catalog.ports import ContextCatalog, Outbox
from longleaf.errors import InvalidArgument
from longleaf.rank_protocol.snapshots import Save, Saved, max_header_bytes
from longleaf.runs import Run, ceil_div
from longleaf.storage.manifest import PieceRef, SegmentManifest

ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1}
"""Of the types in which keys and values are kept."""


@dataclass(frozen=True)
class HeldSegment:
    """A sealed segment that is wholly held now. It was held all the time between two equal ones."""

    segment: Segment
    runs: tuple[Run, ...]
    """In order of position."""
    window_runs: tuple[Run, ...]
    """Of EVERY_RANK, where every rank holds windows."""
    members: tuple[int, ...]
    """Their numbers, by rank."""
    epoch: int
    version: int
    """Another one whenever it has been parked."""


@dataclass(frozen=True)
class KvFormat:
    """How the ranks hold keys and values."""

    text: str
    """What another service must have the same of to take them in."""
    block_size: int

    @property
    def block_bytes(self) -> int:
        """Of one block, over all layers, as the text tells them: `blocks of 16; keys.0 F32 8x16x64; ...`."""
        return sum(_part_bytes(self.text.partition("|")[0]))

    def num_bytes(self, held: HeldSegment) -> int:
        """Bytes of all pieces of a segment, without their headers."""
        sharded, _, windows = self.text.partition("|")
        found = 0
        for runs, text in ((held.runs, sharded), (held.window_runs, windows)):
            found += _num_blocks([(run.start, run.end) for run in runs], self.block_size) * sum(_part_bytes(text))
        return found

    def check(self, manifest: SegmentManifest) -> None:
        """Raises InvalidArgument, naming the field, where ranks of this form cannot take in what a manifest names: runs
        that are no whole blocks, windows where there are none, and pieces larger than their blocks."""
        manifest.check_blocks(self.block_size)
        sharded, _, windows = self.text.partition("|")
        if manifest.windows is not None and not windows:
            raise InvalidArgument("windows", "these ranks store no windows separately")
        for piece in manifest.pieces:
            _check_size(piece, _part_bytes(sharded), self.block_size, "pieces")
        if manifest.windows is not None:
            _check_size(manifest.windows, _part_bytes(windows), self.block_size, "windows")


def _part_bytes(text: str) -> list[int]:
    """Bytes of each part of a block."""
    parts = (part.split() for part in text.split("; ")[1:])
    return [ITEM_BYTES[dtype] * prod(map(int, sizes.split("x"))) for _, dtype, sizes in parts]


def _num_blocks(ranges: Sequence[tuple[int, int]], block_size: int) -> int:
    return sum(ceil_div(end - start, block_size) for start, end in ranges)


def _check_size(piece: PieceRef, parts: Sequence[int], block_size: int, field: str) -> None:
    num_blocks = _num_blocks(piece.runs, block_size)
    most = num_blocks * sum(parts) + max_header_bytes(len(parts), len(piece.runs))
    if piece.num_bytes > most:
        raise InvalidArgument(field, f"{num_blocks:,} blocks have at most {most:,} bytes, not {piece.num_bytes:,}")


@dataclass(frozen=True)
class ContextUse:
    """When a context was used last, in seconds since the epoch, and the segments of its path."""

    id: str
    last_used: float
    is_pinned: bool
    segments: tuple[int, ...]


class SegmentSource(Protocol):
    """What ranks hold."""

    def held(self, segment_id: int) -> HeldSegment | None:
        """None: it is parked, or something of it is lost or moves, or nobody needs it."""
        ...

    def uses(self) -> Sequence[ContextUse]:
        """Of all contexts."""
        ...


class Savers(Protocol):
    """Ranks, as far as they save."""

    async def save(self, member: int, order: Save) -> Saved:
        """As `coordinator.cluster.ports.Ranks.save`."""
        ...


class SnapshotCatalog(ContextCatalog, Outbox, Protocol):
    """Keeps which snapshots there are, and what is to be told to storage."""
