"""Maps the per-block sums of kernels to the columns of attention attribution.

Spans are whole blocks, except for the last one of a segment. Behind the context, the prompt may end inside a block:
there the kernel reports the two parts separately, split at the edge of the read.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from longleaf.attention.block_attribution import (
    BLOCK,
    NO_EDGE,
    AttributedRead,
    AttributionColumns,
    BlockSums,
    attributed_read,
    table,
)
from longleaf.attention.masks import Read
from longleaf.runs import ceil_div
from workers.step.attribution_rows import AttributionGroup, AttributionRow, SpanKeys


class BlockPlan(NamedTuple):
    """The block sums that kernels report in a step, and the columns to which they are added."""

    sums: BlockSums
    columns: list[AttributionColumns]
    """One item for each group of sequences that are reported together."""


class BlockSpansColumns(Exception):
    """Keys of one block belong to several columns, which the kernels cannot separate."""


class ReadPiece(NamedTuple):
    """Slots [low, high) of a read, which belong to consecutive columns."""

    read: int
    low: int
    high: int
    keys: SpanKeys


def block_plan(reads: Sequence[Read], groups: Sequence[AttributionGroup]) -> BlockPlan | None:
    """The plan of a step. None if spans are not whole blocks, or if a block would have to be split at several
    places.
    """
    if any(requested.view.size % BLOCK for requested in groups):
        return None
    rows = sorted({row for requested in groups for attribution_row in requested.rows for row in _rows(attribution_row)})
    seen = {row: _read_by(reads, row) for row in rows}
    edges: dict[int, set[int]] = {}
    for requested in groups:
        for attribution_row in requested.rows:
            for row in _rows(attribution_row):
                for piece in _pieces(reads, seen[row], attribution_row.own):
                    if reads[piece.read].slot_start < piece.low and piece.low % BLOCK:
                        edges.setdefault(piece.read, set()).add(piece.low)
    attributed = list(_attributed(reads, rows, {read: min(found) for read, found in edges.items()}))
    try:
        return BlockPlan(BlockSums(attributed), [_columns(reads, attributed, seen, requested) for requested in groups])
    except BlockSpansColumns:
        return None


def _rows(attribution_row: AttributionRow) -> range:
    return range(attribution_row.run.row, attribution_row.run.row + attribution_row.run.end - attribution_row.run.start)


def _read_by(reads: Sequence[Read], row: int) -> list[int]:
    """The numbers of the reads of a row, in the order of their slots."""
    found = [number for number, read in enumerate(reads) if read.row_start <= row < read.row_end]
    return sorted(found, key=lambda number: reads[number].slot_start)


def _pieces(reads: Sequence[Read], numbers: Sequence[int], keys: Iterable[SpanKeys]) -> Iterator[ReadPiece]:
    """The pieces of these reads that contain any of the keys. `numbers` must be in the order of slots."""
    ahead = sorted(keys, key=lambda each: each.slot)
    first = 0
    for number in numbers:
        read = reads[number]
        while first < len(ahead) and ahead[first].slot + ahead[first].num_keys <= read.slot_start:
            first += 1
        at = first
        while at < len(ahead) and ahead[at].slot < read.slot_end:
            low, high = max(read.slot_start, ahead[at].slot), ahead[at].slot + ahead[at].num_keys
            yield ReadPiece(number, low, min(read.slot_end, high), ahead[at])
            at += 1


def _attributed(reads: Sequence[Read], rows: Sequence[int], edges: dict[int, int]) -> Iterator[AttributedRead]:
    start = 0
    for number, read in enumerate(reads):
        asking = [row for row in rows if read.row_start <= row < read.row_end]
        span = (asking[0], asking[-1] + 1) if asking else (0, 0)
        attributed = attributed_read((read.slot_start, read.slot_end), start, span, edges.get(number, NO_EDGE))
        yield attributed
        start = attributed.end


def _columns(
    reads: Sequence[Read], attributed: Sequence[AttributedRead], seen: dict[int, list[int]], columns: AttributionGroup
) -> AttributionColumns:
    runs, attribution_rows = list[tuple[int, ...]](), list[tuple[int, ...]]()
    context = dict[tuple[int, ...], list[tuple[int, ...]]]()
    for attribution_row in columns.rows:
        first = len(runs)
        for row in _rows(attribution_row):
            alike = tuple(seen[row])
            if alike not in context:
                context[alike] = [_run(reads, attributed, piece) for piece in _pieces(reads, alike, columns.context)]
            own = [_run(reads, attributed, piece) for piece in _pieces(reads, alike, attribution_row.own)]
            for number, *rest in (*context[alike], *own):
                read = attributed[number]
                runs.append((row, read.start + (row - read.first_row) * read.num_entries, read.num_entries, *rest))
        rows = _rows(attribution_row)
        attribution_rows.append((rows.start, rows.stop, first, len(runs)))
    return AttributionColumns(table(runs, 8), table(attribution_rows, 4))


def _run(reads: Sequence[Read], attributed: Sequence[AttributedRead], piece: ReadPiece) -> tuple[int, ...]:
    """The read's number, then the description of entries and columns for block_attribution.c. Raises
    BlockSpansColumns.
    """
    read, edge, keys = reads[piece.read], attributed[piece.read].edge, piece.keys
    if piece.low not in (read.slot_start, edge) and piece.low % BLOCK:
        raise BlockSpansColumns

    def entry(slot: int) -> int:
        return slot // BLOCK - read.slot_start // BLOCK + (slot >= edge)

    number, before = divmod(keys.before + piece.low - keys.slot, keys.size)
    per_column = ceil_div(keys.size, BLOCK)
    if number == 0 and keys.num_keys == keys.size:  # one column for all keys, wherever block boundaries are
        before, per_column = 0, NO_EDGE
    elif piece.low < edge < piece.high:
        raise BlockSpansColumns
    return (piece.read, entry(piece.low), entry(piece.high - 1) + 1, keys.column + number, before // BLOCK, per_column)
