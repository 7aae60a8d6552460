"""Selects the rows of a decode step that report attention attribution, and maps this rank's keys to columns.

The attention on a span is a sum over its keys, so each rank reports the keys that it holds. The selection is made once
per step, on integers. Columns are the spans of a context along its path, then prompt, answer, learned sinks and lead.

Kernels that report sums per block of keys get a `BlockPlan`. Spans are whole blocks, except for the last one of a
segment. Behind the context, the prompt may end inside a block: there the kernel reports the two parts separately, split
at the edge of the read. The lead of a context may also end inside a block. The sums of that block's parts are computed
separately, from its keys (`CutEntries`), because a read has only one edge.
"""

import sys
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
from longleaf.attention.masks import QueryRun, Read
from longleaf.rank_protocol.step import NUM_OTHER_SHARES, Positions, Row, Spans
from longleaf.runs import ceil_div, joined, without
from workers.kv_cache.block_table import BlockTable, SegmentRange
from workers.step.row_grouping import Query

PROMPT, ANSWER, SINK, LEAD = 0, 1, 2, 3
"""Columns behind the spans."""


class SpanKeys(NamedTuple):
    """Keys in consecutive slots, of consecutive positions."""

    position: int
    """The position of the first key."""
    slot: int
    num_keys: int
    column: int
    """The column of the first key."""
    before: int
    """The number of keys of that column before the first key."""
    size: int
    """Keys per column."""

    def tiles(self, most: int) -> Iterator["SpanKeys"]:
        """The same keys in parts of at most `most` keys."""
        for low in range(0, self.num_keys, most):
            number, before = divmod(self.before + low, self.size)
            count = min(most, self.num_keys - low)
            yield SpanKeys(self.position + low, self.slot + low, count, self.column + number, before, self.size)


class AttributionRow(NamedTuple):
    """Rows of one sequence that report attribution; several rows are averaged. A sequence with drafts has one item for
    each of its rows."""

    sequence: int
    run: QueryRun
    own: list[SpanKeys]
    """The keys behind the context."""


class SpanView(NamedTuple):
    """The common properties of sequences that are reported together: they see the same part of a context, and the same
    layers count.
    """

    parts: tuple[SegmentRange, ...]
    hidden: tuple[Positions, ...]
    size: int
    layers: tuple[int, ...]
    num_lead: int = 0

    @property
    def num_spans(self) -> int:
        return sum(ceil_div(part.end - part.start, self.size) for part in self.parts)


class AttributionGroup(NamedTuple):
    """Sequences that are reported together."""

    view: SpanView
    context: list[SpanKeys]
    rows: list[AttributionRow]
    cut: Sequence[SpanKeys] = ()
    """Further keys of the context: those of the block in which its lead ends, if it does not end with a block."""

    @property
    def num_columns(self) -> int:
        return self.view.num_spans + NUM_OTHER_SHARES

    @property
    def row_numbers(self) -> list[int]:
        """All rows, in order."""
        return [row for each in self.rows for row in _rows(each)]


def attribution_groups(
    block_table: BlockTable, queries: Iterable[tuple[Row, Query]], full_layers: Sequence[int]
) -> list[AttributionGroup]:
    """The attributions that rows request, in the same order on all ranks. Layers with a limited reach never count."""
    found: dict[SpanView, AttributionGroup] = {}
    for row, query in queries:
        if row.spans is None or not (row.spans.num_rows or row.token_index >= 0):
            continue
        layers = tuple(layer for layer in full_layers if not row.spans.layers or layer in row.spans.layers)
        if not layers:
            continue
        segments = set(row.path[: row.spans.num_segments])
        parts = tuple(part for part in query.parts if part.segment in segments)
        view = SpanView(parts, row.hidden, row.spans.size, layers, row.spans.num_lead)
        if view not in found:
            cut_start = view.num_lead // BLOCK * BLOCK
            cut_end = ceil_div(view.num_lead, BLOCK) * BLOCK
            context = [
                *_context_keys(block_table, view, 0, cut_start),
                *_context_keys(block_table, view, cut_end, sys.maxsize),
            ]
            cut = list(_context_keys(block_table, view, cut_start, cut_end))
            found[view] = AttributionGroup(view, context, [], cut)
        behind = [part for part in query.parts if part.segment not in segments]
        own = list(_own_keys(block_table, behind, row.spans, view.num_spans))
        found[view].rows.extend(AttributionRow(row.sequence, run, own) for run in _counted(row, query.run))
    return list(found.values())


def _counted(row: Row, run: QueryRun) -> Iterator[QueryRun]:
    """The rows that count: the last ones together, or each one that is sampled from."""
    if row.spans is not None and row.spans.num_rows:
        start = max(run.start, run.end - row.spans.num_rows)
        yield QueryRun(start, run.end, run.row + start - run.start)
        return
    for position in range(run.end - 1 - len(row.draft_ids), run.end):
        yield QueryRun(position, position + 1, run.row + position - run.start)


def _context_keys(block_table: BlockTable, view: SpanView, start: int, end: int) -> Iterator[SpanKeys]:
    """The keys at positions [start, end) that the rows see."""
    column = 0
    for part in view.parts:
        for low, high in without(max(part.start, start), min(part.end, end), view.hidden):
            lead = min(max(view.num_lead, low), high)
            for resident in joined(block_table.resident_extents(part.segment, low, lead)):
                num_keys = resident.end - resident.start
                yield SpanKeys(resident.start, resident.slot, num_keys, view.num_spans + LEAD, 0, num_keys)
            for resident in joined(block_table.resident_extents(part.segment, lead, high)):
                number, before = divmod(resident.start - part.start, view.size)
                yield SpanKeys(
                    resident.start, resident.slot, resident.end - resident.start, column + number, before, view.size
                )
        column += ceil_div(part.end - part.start, view.size)


def _own_keys(
    block_table: BlockTable, parts: Iterable[SegmentRange], spans: Spans, num_spans: int
) -> Iterator[SpanKeys]:
    for part in parts:
        edge = min(max(spans.prompt_end, part.start), part.end)
        for low, high, other in ((part.start, edge, PROMPT), (edge, part.end, ANSWER)):
            for resident in joined(block_table.resident_extents(part.segment, low, high)):
                count = resident.end - resident.start
                yield SpanKeys(resident.start, resident.slot, count, num_spans + other, 0, count)


class CutEntries(NamedTuple):
    """Entries behind those of the reads: the sums of a group's rows over keys of a block that belongs to several
    columns."""

    keys: SpanKeys
    start: int
    """Index of the first row's entry, for one query per key head; the other rows follow."""


class BlockPlan(NamedTuple):
    """The block sums that kernels report in a step, and the columns to which they are added."""

    sums: BlockSums
    columns: list[AttributionColumns]
    """One item for each group of sequences that are reported together."""
    cuts: list[list[CutEntries]]
    """Entries of each group that the kernels do not report."""


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
    num_entries, cuts = max((read.end for read in attributed), default=0), list[list[CutEntries]]()
    for requested in groups:
        cuts.append([])
        for keys in requested.cut:
            cuts[-1].append(CutEntries(keys, num_entries))
            num_entries += len(requested.row_numbers)
    try:
        columns = [
            _columns(reads, attributed, seen, requested, cut) for requested, cut in zip(groups, cuts, strict=True)
        ]
    except BlockSpansColumns:
        return None
    return BlockPlan(BlockSums(attributed, num_entries), columns, cuts)


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
    reads: Sequence[Read],
    attributed: Sequence[AttributedRead],
    seen: dict[int, list[int]],
    columns: AttributionGroup,
    cuts: Sequence[CutEntries],
) -> AttributionColumns:
    runs, attribution_rows = list[tuple[int, ...]](), list[tuple[int, ...]]()
    num_rows = 0
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
            runs += [(row, cut.start + num_rows, 1, 0, 1, cut.keys.column, 0, NO_EDGE) for cut in cuts]
            num_rows += 1
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
