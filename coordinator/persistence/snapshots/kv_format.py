"""The layout of keys and values on the ranks, which the pieces of a snapshot must match."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from coordinator.persistence.snapshots.segments_on_ranks import PlacedSegment
from longleaf.errors import InvalidArgument
from longleaf.rank_protocol.snapshots import max_header_bytes
from longleaf.runs import Range, ceil_div
from longleaf.storage.manifest import PieceRef, SegmentManifest

ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1}
"""Names of the dtypes in which keys and values are stored."""


@dataclass(frozen=True)
class KvFormat:
    """Layout of keys and values on the ranks."""

    text: str
    """The layout that another service must share to import pieces."""
    block_size: int

    @property
    def block_bytes(self) -> int:
        """Layout of one block over all layers: `blocks of 16; keys.0 F32 8x16x64; ...`."""
        return sum(_part_bytes(self.text.partition("|")[0]))

    def num_bytes(self, segment: PlacedSegment) -> int:
        """Bytes of all pieces of a segment, without their headers."""
        sharded, _, windows = self.text.partition("|")
        found = 0
        for runs, text in ((segment.runs, sharded), (segment.window_runs, windows)):
            found += _num_blocks([run.range for run in runs], _block_size(text)) * sum(_part_bytes(text))
        return found

    def check(self, manifest: SegmentManifest) -> None:
        """Raises InvalidArgument naming the field where ranks with this layout cannot import the pieces of a manifest:
        runs that are not whole blocks, windows without windowed layers, and pieces larger than their blocks."""
        manifest.check_blocks(self.block_size)
        sharded, _, windows = self.text.partition("|")
        if manifest.windows is not None and not windows:
            raise InvalidArgument("windows", "these ranks store no windows separately")
        for piece in manifest.pieces:
            _check_size(piece, _part_bytes(sharded), self.block_size, "pieces")
        if manifest.windows is not None:
            _check_size(manifest.windows, _part_bytes(windows), _block_size(windows), "windows")


def _block_size(text: str) -> int:
    """Positions per block. Blocks of windows may have another size than those of other keys."""
    first, _, _ = text.partition("; ")
    return int(first.removeprefix("blocks of ")) if first else 1


def _part_bytes(text: str) -> list[int]:
    """Bytes of each part of a block."""
    parts = (part.split() for part in text.split("; ")[1:])
    return [ITEM_BYTES[dtype] * prod(map(int, sizes.split("x"))) for _, dtype, sizes in parts]


def _num_blocks(ranges: Sequence[Range], block_size: int) -> int:
    return sum(ceil_div(end - start, block_size) for start, end in ranges)


def _check_size(piece: PieceRef, parts: Sequence[int], block_size: int, field: str) -> None:
    num_blocks = _num_blocks(piece.runs, block_size)
    most = num_blocks * sum(parts) + max_header_bytes(len(parts), len(piece.runs))
    if piece.num_bytes > most:
        raise InvalidArgument(field, f"{num_blocks:,} blocks have at most {most:,} bytes, not {piece.num_bytes:,}")
