"""Plans the key reads of a decode step: keys that several rows see are read once for all of them.

The paths of segments form a tree. In the order of their paths, rows that share a segment are adjacent, and those that
see more of it come first, so a part of a segment is read by a range of rows:

    [ a document, read by rows 0 to 3 ][ an appendix, by rows 0 to 2 ][ tail of row 0 ]
                                                                      [ tail of row 1 ]
                                                                      [ tail of row 2 ]
                                       [ tail of row 3 ]

Where paths diverge, each row reads separately. A sequence with several tokens counts as one row here; keys that only
some of its tokens see are read under a mask.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby, pairwise
from operator import attrgetter, itemgetter
from typing import NamedTuple

from longleaf.attention.masks import QueryRun, Read, Reads, causal_reads, reads_within
from longleaf.positions import AttentionSpan
from longleaf.rank_protocol.step import Positions
from longleaf.runs import Extent, without
from workers.kv_cache.block_table import BlockTable, SegmentRange, stretches

MIN_SHARED = 128
"""Minimum number of common keys for which adjacent rows with a limited reach read together: fewer cost more in reads
than they save.
"""
MAX_SHOWN = 1 << 16
"""Limit on the number of boundaries of hidden ranges times the number of distinct groups of rows. Above it the groups
read separately, because the search for common reads would take longer.
"""


class Query(NamedTuple):
    """The rows of one sequence, and the parts of segments that its path uses, up to the last row."""

    run: QueryRun
    parts: Sequence[SegmentRange]
    hidden: tuple[Positions, ...] = ()
    """Positions of the path that none of the rows reads, in order."""

    @property
    def row_end(self) -> int:
        return self.run.row + self.run.end - self.run.start

    def seen(self, depth: int, reach: AttentionSpan) -> tuple[int, int]:
        """Positions [start, end) of a part that all of the rows see; empty if end <= start."""
        part = self.parts[depth]
        return max(part.start, reach.first(self.run.end - 1)), min(part.end, self.run.start + 1)

    def hides(self, position: int) -> bool:
        number = bisect_right(self.hidden, position, key=itemgetter(0))
        return number > 0 and position < self.hidden[number - 1][1]


Users = tuple[int, list[Query]]
"""The depth of a segment, and the queries whose path contains it."""


def order(parts: Sequence[SegmentRange], start: int) -> tuple[tuple[int, int], ...]:
    """Sort key of rows at `start`: adjacent rows share as many segments as possible; rows that see more of the last
    shared segment come first.
    """
    return tuple((part.segment, -min(part.end, start + 1)) for part in parts)


def row_reads(
    ledger: BlockTable, queries: Sequence[Query], reaches: Iterable[AttentionSpan], near_rank: int | None = None
) -> dict[AttentionSpan, Reads]:
    """The reads of sorted queries from this rank's pool; with a limited reach, from the extents of `near_rank`."""
    tree = list(_tree(queries))
    return {
        reach: Reads(
            _full_reads(ledger, queries, tree) if reach.is_full else _near_reads(ledger, tree, reach, near_rank)
        )
        for reach in reaches
    }


def most_together(queries: Sequence[Query]) -> int:
    """The maximum number of rows, of sorted queries, that may read keys together on any rank."""
    groups = (list(users) for _, users in groupby(queries, partial(_segment, depth=0)))
    return max((users[-1].row_end - users[0].run.row for users in groups), default=0)


def _full_reads(ledger: BlockTable, queries: Sequence[Query], tree: Sequence[Users]) -> Iterator[Read]:
    extents: dict[tuple[int, int], list[Extent]] = {}
    for depth, users in tree:
        for rows, low, high in _bands(users, depth):
            extents.setdefault(rows, []).extend(ledger.resident_extents(users[0].parts[depth].segment, low, high))
    for rows, found in extents.items():
        yield from (Read(*rows, low, high) for low, high in stretches(found))
    for query in queries:
        for extent in ledger.resident_extents(query.parts[-1].segment, query.run.start + 1, query.run.end):
            yield from causal_reads(query.run, extent)


def _bands(users: Sequence[Query], depth: int) -> Iterator[tuple[tuple[int, int], int, int]]:
    """Rows and positions [start, end) of a segment: first the positions that all users see, last those that only the
    first one sees.
    """
    left = list(users)
    low = left[0].parts[depth].start
    while left:
        high = left[-1].seen(depth, AttentionSpan())[1]
        if low < high:
            yield from _shown(left, low, high)
            low = high
        left.pop()


def _shown(users: Sequence[Query], low: int, high: int) -> Iterator[tuple[tuple[int, int], int, int]]:
    """Positions [low, high), cut where hidden ranges of users begin or end, with the rows that read each part."""
    if not any(user.hidden for user in users):
        yield (users[0].run.row, users[-1].row_end), low, high
        return
    alike = [list(group) for _, group in groupby(users, attrgetter("hidden"))]
    edges = {edge for each in alike for hidden in each[0].hidden for edge in hidden if low < edge < high}
    if len(edges) * len(alike) > MAX_SHOWN:
        for each in alike:
            yield from (((each[0].run.row, each[-1].row_end), *seen) for seen in without(low, high, each[0].hidden))
        return
    for start, end in pairwise([low, *sorted(edges), high]):
        for is_hidden, group in groupby(users, lambda user, at=start: user.hides(at)):
            if not is_hidden:
                readers = list(group)
                yield (readers[0].run.row, readers[-1].row_end), start, end


def _near_reads(ledger: BlockTable, tree: Sequence[Users], reach: AttentionSpan, rank: int | None) -> Iterator[Read]:
    for depth, users in tree:
        segment = users[0].parts[depth].segment
        for cluster, low, high in _clusters(users, depth, reach):
            is_shared = len(cluster) > 1
            if is_shared:
                for rows, start, end in _shown(cluster, low, high):
                    yield from (
                        Read(*rows, *slots) for slots in stretches(ledger.resident_extents(segment, start, end, rank))
                    )
            for query in cluster:
                first, end = reach.first(query.run.start), query.parts[depth].end
                for bounds in ((first, low), (high, end)) if is_shared else ((first, end),):
                    for extent in _resident(ledger, query, segment, bounds, rank):
                        yield from reads_within(query.run, extent, reach)


def _resident(
    ledger: BlockTable, query: Query, segment: int, bounds: tuple[int, int], rank: int | None
) -> Iterator[Extent]:
    """The extents within positions [start, end) of a segment, without the query's hidden positions."""
    for low, high in without(*bounds, query.hidden):
        yield from ledger.resident_extents(segment, low, high, rank)


def _clusters(users: Sequence[Query], depth: int, reach: AttentionSpan) -> Iterator[tuple[list[Query], int, int]]:
    """Adjacent queries that see enough common keys of a segment, with the positions [start, end) of those keys."""
    cluster, low, high = [users[0]], *users[0].seen(depth, reach)
    for query in users[1:]:
        start, end = query.seen(depth, reach)
        if min(high, end) - max(low, start) >= MIN_SHARED:
            cluster, low, high = [*cluster, query], max(low, start), min(high, end)
        else:
            yield cluster, low, high
            cluster, low, high = [query], start, end
    yield cluster, low, high


def _tree(queries: Sequence[Query]) -> Iterator[Users]:
    """Each segment of the tree of paths, with its users."""
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
