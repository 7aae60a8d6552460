"""Which rows of a decode step read which keys: what several rows see is read once for all of them.

A path of segments is a way down a tree. Rows in the order of their paths have those that share a segment side by side,
and of these the ones that see more of it first, so a part of a segment is read by a range of rows:

    rows 0..3   [ a document ............ ][ question ][ tail of row 0 ]
                                           [ question ][ tail of row 1 ]
                                                       [ tail of row 2 ]
                             [ a fork ....][ tail of row 3 ]

Where paths part, each row reads on alone. A sequence that brings several tokens counts as one here; what only some of
its tokens see is read under a mask.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

from longleaf.attention.masks import QueryRun, Read, Reads, causal_reads, window_reads
from longleaf.runs import Extent
from workers.cache import Part, Segments, stretches

MIN_SHARED = 128
"""Keys that neighbours must have in common under a window to be read together: fewer cost more in reads than they
save."""


class Query(NamedTuple):
    """The rows of one sequence and what their path uses of its segments, up to the last of them."""

    run: QueryRun
    parts: Sequence[Part]

    @property
    def row_end(self) -> int:
        return self.run.row + self.run.end - self.run.start

    def seen(self, depth: int, window: int | None = None) -> tuple[int, int]:
        """Positions [start, end) of a part that all of the rows see; empty if end <= start."""
        part = self.parts[depth]
        low = part.start if window is None else max(part.start, self.run.end - window)
        return low, min(part.end, self.run.start + 1)


def order(parts: Sequence[Part], start: int) -> tuple[tuple[int, int], ...]:
    """Key by which rows at `start` are sorted: neighbours share as many segments as they can, those that see more of
    the last of them first."""
    return tuple((part.segment, -min(part.end, start + 1)) for part in parts)


def row_reads(segments: Segments, queries: Sequence[Query], window: int | None) -> Reads:
    """What sorted queries read from this rank's pool."""
    if window is None:
        return Reads(_full_reads(segments, queries))
    return Reads(_window_reads(segments, queries, window))


def _full_reads(segments: Segments, queries: Sequence[Query]) -> Iterator[Read]:
    extents: dict[tuple[int, int], list[Extent]] = {}
    for depth, users in _tree(queries):
        for rows, low, high in _bands(users, depth):
            extents.setdefault(rows, []).extend(segments.held(users[0].parts[depth].segment, low, high))
    for rows, found in extents.items():
        yield from (Read(*rows, low, high) for low, high in stretches(found))
    for query in queries:
        for extent in segments.held(query.parts[-1].segment, query.run.start + 1, query.run.end):
            yield from causal_reads(query.run, extent)


def _bands(users: Sequence[Query], depth: int) -> Iterator[tuple[tuple[int, int], int, int]]:
    """Rows and positions [start, end) of a segment: first what all users see, in the end what the first one sees."""
    left = list(users)
    low = left[0].parts[depth].start
    while left:
        high = left[-1].seen(depth)[1]
        if low < high:
            yield (left[0].run.row, left[-1].row_end), low, high
            low = high
        left.pop()


def _window_reads(segments: Segments, queries: Sequence[Query], window: int) -> Iterator[Read]:
    for depth, users in _tree(queries):
        segment = users[0].parts[depth].segment
        for cluster, low, high in _clusters(users, depth, window):
            if len(cluster) == 1:
                low = high  # nothing is shared
            rows = cluster[0].run.row, cluster[-1].row_end
            yield from (Read(*rows, *slots) for slots in stretches(segments.held(segment, low, high)))
            for query in cluster:
                first, end = query.run.start - window + 1, query.parts[depth].end
                for bounds in ((first, low), (max(first, high), end)):
                    for extent in segments.held(segment, *bounds):
                        yield from window_reads(query.run, extent, window)


def _clusters(users: Sequence[Query], depth: int, window: int) -> Iterator[tuple[list[Query], int, int]]:
    """Neighbours whose windows have enough keys of a segment in common, with the positions [start, end) of those."""
    cluster, low, high = [users[0]], *users[0].seen(depth, window)
    for query in users[1:]:
        start, end = query.seen(depth, window)
        if min(high, end) - max(low, start) >= MIN_SHARED:
            cluster, low, high = [*cluster, query], max(low, start), min(high, end)
        else:
            yield cluster, low, high
            cluster, low, high = [query], start, end
    yield cluster, low, high


def _tree(queries: Sequence[Query]) -> Iterator[tuple[int, list[Query]]]:
    """Each segment of the tree that the paths make up: its depth, and the queries whose path leads through it."""
    pending = [(0, list(queries))]
    while pending:
        depth, above = pending.pop()
        for segment, group in groupby(above, partial(_segment, depth=depth)):
            if segment is not None:
                users = list(group)
                yield depth, users
                pending.append((depth + 1, users))


def _segment(query: Query, *, depth: int) -> int | None:
    return query.parts[depth].segment if depth < len(query.parts) else None
