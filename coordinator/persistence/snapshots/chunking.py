"""Division of a segment into pieces for storage. Pure."""

from collections.abc import Iterator, Sequence

from longleaf.rank_protocol.snapshots import MAX_PIECE_BYTES
from longleaf.runs import Run

NUM_PIECES = 64
"""Minimum number of pieces of a large segment: they spread evenly over the ranks of any service that restores it."""
MIN_PIECE_BYTES = 1 << 20
"""Minimum bytes of a piece: a smaller object costs more than it saves."""


def piece_blocks(num_blocks: int, block_bytes: int) -> int:
    """Maximum number of blocks of a piece, for a segment of this many."""
    target = min(MAX_PIECE_BYTES, max(MIN_PIECE_BYTES, num_blocks * block_bytes // NUM_PIECES))
    return max(1, target // block_bytes)


def cut_pieces(runs: Sequence[Run], block_size: int, block_bytes: int) -> list[tuple[Run, ...]]:
    """Pieces of runs on one rank, in order of position. All blocks are whole, except at the end of a run."""
    most = piece_blocks(sum(len(run.blocks) for run in runs), block_bytes)
    found = list[tuple[Run, ...]]()
    for rank in sorted({run.rank for run in runs}):
        found += _fill(_parts([run for run in runs if run.rank == rank], block_size, most), most)
    return found


def _parts(runs: Sequence[Run], block_size: int, most: int) -> Iterator[Run]:
    """Splits runs into runs of at most this many blocks."""
    for run in runs:
        for first in range(0, len(run.blocks), most):
            start, blocks = run.start + first * block_size, run.blocks[first : first + most]
            yield Run(run.rank, start, min(run.end, start + len(blocks) * block_size), blocks)


def _fill(parts: Iterator[Run], most: int) -> Iterator[tuple[Run, ...]]:
    piece, size = list[Run](), 0
    for part in parts:
        if piece and size + len(part.blocks) > most:
            yield tuple(piece)
            piece, size = [], 0
        piece.append(part)
        size += len(part.blocks)
    if piece:
        yield tuple(piece)
