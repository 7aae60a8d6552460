"""The blocks for which kernels report weights, and the conditions under which no report is requested."""

from longleaf.attention.block_attribution import NO_EDGE
from longleaf.attention.masks import QueryRun, Read
from workers.kv_cache.block_table import SegmentRange
from workers.step.attribution_plan import AttributionGroup, AttributionRow, SpanKeys, SpanView, block_plan

LAYERS = (3,)
TAIL = 6400
"""Where the context ends, and the tail's block begins."""


def requested(*edges, size=64):
    """A context of 100 spans in slots from 0; each row has a tail behind it, and its prompt ends in slot `edge`."""
    view = SpanView((SegmentRange(0, 0, TAIL),), (), size, LAYERS)
    attribution_rows = [
        AttributionRow(row, QueryRun(TAIL + 99, TAIL + 100, row), [prompt(TAIL, edge), answer(edge, TAIL + 100)])
        for row, edge in enumerate(edges)
    ]
    return AttributionGroup(view, [SpanKeys(0, 0, TAIL, 0, 0, size)], attribution_rows)


def prompt(start, end):
    return SpanKeys(start, start, end - start, 100, 0, end - start)


def answer(start, end):
    return SpanKeys(start, start, end - start, 101, 0, end - start)


def test_spans_and_later_tokens_have_their_blocks():
    plan = block_plan([Read(0, 1, 0, TAIL + 100)], [requested(TAIL + 40)])
    assert plan is not None
    [reported] = plan.sums.reads
    assert reported == (0, 0, 1, TAIL + 40, 205)  # 204 blocks, of which one is cut
    [columns] = plan.columns
    context, question, output = columns.runs.tolist()
    assert context == [0, 0, 205, 0, 200, 0, 0, 2]
    assert question == [0, 0, 205, 200, 202, 100, 0, NO_EDGE]
    assert output == [0, 0, 205, 202, 205, 101, 0, NO_EDGE]
    assert columns.rows.tolist() == [[0, 1, 0, 3]]


def test_entries_of_a_read_are_ordered_by_row():
    reads = [Read(0, 2, 0, TAIL), Read(0, 1, TAIL, TAIL + 32), Read(1, 2, TAIL + 64, TAIL + 96)]
    group = requested(TAIL + 32, TAIL + 96)
    second = AttributionRow(1, group.rows[1].run, [prompt(TAIL + 64, TAIL + 96)])
    first = AttributionRow(0, group.rows[0].run, [prompt(TAIL, TAIL + 32)])
    plan = block_plan(reads, [group._replace(rows=[first, second])])
    assert plan is not None
    assert [reported.start for reported in plan.sums.reads] == [0, 400, 401]
    assert [run[:3] for run in plan.columns[0].runs.tolist()] == [[0, 0, 200], [0, 400, 1], [1, 200, 200], [1, 401, 1]]


def test_no_plan_if_a_block_would_be_cut_twice():
    reads = [Read(0, 2, 0, TAIL + 100)]
    assert block_plan(reads, [requested(TAIL + 40, TAIL + 40)]) is not None
    assert block_plan(reads, [requested(TAIL + 40, TAIL + 41)]) is None
    assert block_plan(reads, [requested(TAIL + 40, size=16)]) is None


def test_no_plan_if_another_row_would_cut_a_span():
    reads = [Read(0, 2, 0, TAIL + 100)]
    longer = requested(TAIL + 100)._replace(context=[SpanKeys(0, 0, TAIL + 100, 0, 0, 64)], rows=[])
    one = longer._replace(rows=[AttributionRow(1, QueryRun(TAIL + 99, TAIL + 100, 1), [])])
    assert block_plan(reads, [one]) is not None
    assert block_plan(reads, [requested(TAIL + 40), one]) is None
