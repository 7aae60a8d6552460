"""Selects the rows of a decode step that report attention attribution, and maps this rank's keys to columns.

The attention on a span is a sum over its keys, so each rank reports the keys that it holds. The selection is made once
per step, on integers. Columns are the spans of a context along its path, then prompt, answer and sink.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from longleaf.attention.masks import QueryRun
from longleaf.rank_protocol.step import NUM_OTHER_SHARES, Positions, Row, Spans
from longleaf.runs import ceil_div, joined, without
from workers.kv_cache.block_table import BlockTable, SegmentRange
from workers.step.row_grouping import Query

PROMPT, ANSWER, SINK = 0, 1, 2
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
    """The rows of one sequence that report attribution; several rows are averaged."""

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

    @property
    def num_spans(self) -> int:
        return sum(ceil_div(part.end - part.start, self.size) for part in self.parts)


class AttributionGroup(NamedTuple):
    """Sequences that are reported together."""

    view: SpanView
    context: list[SpanKeys]
    rows: list[AttributionRow]

    @property
    def num_columns(self) -> int:
        return self.view.num_spans + NUM_OTHER_SHARES


def attribution_groups(
    ledger: BlockTable, queries: Iterable[tuple[Row, Query]], full_layers: Sequence[int]
) -> list[AttributionGroup]:
    """The attributions that rows request, in the same order on all ranks. Layers with a limited reach never count."""
    found: dict[SpanView, AttributionGroup] = {}
    for row, query in queries:
        if row.spans is None or not (row.spans.of_all_rows or row.token_index >= 0):
            continue
        layers = tuple(layer for layer in full_layers if not row.spans.layers or layer in row.spans.layers)
        if not layers:
            continue
        segments = set(row.path[: row.spans.num_segments])
        parts = tuple(part for part in query.parts if part.segment in segments)
        view = SpanView(parts, row.hidden, row.spans.size, layers)
        if view not in found:
            found[view] = AttributionGroup(view, list(_context_keys(ledger, view)), [])
        behind = [part for part in query.parts if part.segment not in segments]
        own = list(_own_keys(ledger, behind, row.spans, view.num_spans))
        found[view].rows.append(AttributionRow(row.sequence, _counted(query.run, row.spans), own))
    return list(found.values())


def _counted(run: QueryRun, spans: Spans) -> QueryRun:
    """The rows that count."""
    return run if spans.of_all_rows else QueryRun(run.end - 1, run.end, run.row + run.end - 1 - run.start)


def _context_keys(ledger: BlockTable, view: SpanView) -> Iterator[SpanKeys]:
    column = 0
    for part in view.parts:
        for low, high in without(part.start, part.end, view.hidden):
            for resident in joined(ledger.resident_extents(part.segment, low, high)):
                number, before = divmod(resident.start - part.start, view.size)
                yield SpanKeys(
                    resident.start, resident.slot, resident.end - resident.start, column + number, before, view.size
                )
        column += ceil_div(part.end - part.start, view.size)


def _own_keys(ledger: BlockTable, parts: Iterable[SegmentRange], spans: Spans, num_spans: int) -> Iterator[SpanKeys]:
    for part in parts:
        edge = min(max(spans.prompt_end, part.start), part.end)
        for low, high, other in ((part.start, edge, PROMPT), (edge, part.end, ANSWER)):
            for resident in joined(ledger.resident_extents(part.segment, low, high)):
                count = resident.end - resident.start
                yield SpanKeys(resident.start, resident.slot, count, num_spans + other, 0, count)
