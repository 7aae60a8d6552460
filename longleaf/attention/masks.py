"""Visibility of keys, computed on integers: reads are the rectangles that the kernels compute.

Shape letters: Q queries, S keys.
"""

from collections.abc import Hashable, Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longleaf.attention.block_attribution import BlockSums
from longleaf.positions import AttentionSpan
from longleaf.runs import Extent, ceil_div, overlaps

MIN_TILE = 128
"""Smallest tile of queries under a window: smaller ones cost more in calls than they save in masked scores."""
ROWS = 256
"""Rows of a masked read that `cut` keeps together: only the two edges of their band need a mask."""
FAR_AHEAD, UNBOUNDED = 1 << 40, 1 << 41
"""In a table, an offset at which every query sees every key, and the window of a read without one."""


class QueryRun(NamedTuple):
    """Queries at positions [start, end) that lie in rows [row, row + end - start)."""

    start: int
    end: int
    row: int


class Read(NamedTuple):
    """Query rows [row_start, row_end) against the keys in slots [slot_start, slot_end).

    `offset` is None when every query sees every key. Otherwise it is the position of the first query minus that of
    the first key, and query i sees key j iff 0 <= offset + i - j, and < window if there is one.
    """

    row_start: int
    row_end: int
    slot_start: int
    slot_end: int
    offset: int | None = None
    window: int | None = None

    @property
    def is_causal(self) -> bool:
        """Whether this is a plain square diagonal, for which kernels need no mask."""
        num_queries, num_keys = self.row_end - self.row_start, self.slot_end - self.slot_start
        in_window = self.window is None or num_keys <= self.window
        return self.offset == 0 and num_queries == num_keys and in_window

    @property
    def mask(self) -> tuple[int, int]:
        """Offset and window as integers, also for unmasked reads, for compiled kernels."""
        if self.offset is None:
            return FAR_AHEAD, UNBOUNDED
        return self.offset, UNBOUNDED if self.window is None else self.window


class Reads(tuple[Read, ...]):
    """The reads of a layer, computed once per step for all layers with the same attention pattern."""

    attributed: BlockSums | None = None
    """Attribution that kernels report if supported; it does not affect attention."""

    @cached_property
    def table(self) -> Tensor:
        """The reads as integers, [N, 6] int64 in the order of a read's fields, for compiled kernels."""
        rows = [(*read[:4], *read.mask) for read in self]
        return torch.tensor(rows, dtype=torch.long).view(-1, 6)

    @cached_property
    def num_keys(self) -> int:
        """Number of key reads, counting repetitions."""
        return sum(read.slot_end - read.slot_start for read in self)

    @cached_property
    def cache(self) -> dict[Hashable, Any]:
        """Data that a backend derived from these reads and caches for the following layers, by cache key."""
        return {}


def causal_reads(query: QueryRun, keys: Extent) -> Iterator[Read]:
    """The reads of one query run over one extent of keys without a window."""
    for part in overlaps(query.start, query.end, keys.start, keys.end):
        row, slot = query.row - query.start, keys.slot - keys.start
        offset = 0 if part.kind == "diagonal" else None
        yield Read(
            row + part.query_start, row + part.query_end, slot + part.key_start, slot + part.key_end, offset=offset
        )


def window_reads(query: QueryRun, keys: Extent, window: int) -> Iterator[Read]:
    """The reads of one query run over one extent when a query sees only its last `window` keys, itself included.

    Queries are split into tiles, so that only a band along the diagonal is computed for long runs.
    """
    tile = max(window, MIN_TILE)
    first = max(query.start, keys.start)
    last = min(query.end, keys.end + window - 1)
    for start in range(first, last, tile):
        end = min(start + tile, last)
        low, high = max(keys.start, start - window + 1), min(keys.end, end)
        if low >= high:
            continue
        sees_all = high <= start + 1 and end - low <= window
        slot = keys.slot - keys.start
        yield Read(
            query.row + start - query.start,
            query.row + end - query.start,
            slot + low,
            slot + high,
            offset=None if sees_all else start - low,
            window=window,
        )


def section_reads(query: QueryRun, keys: Extent, section: int) -> Iterator[Read]:
    """The reads of one query run over one extent when a query sees only keys of its own section.

    Within a section this is plain causal attention, so kernels need no additional mask.
    """
    first, end = max(query.start, keys.start) // section, ceil_div(min(query.end, keys.end), section)
    for start in range(first * section, end * section, section):
        low, high = max(query.start, start), min(query.end, start + section)
        key_low, key_high = max(keys.start, start), min(keys.end, start + section)
        if low < high and key_low < key_high:
            part = QueryRun(low, high, query.row + low - query.start)
            yield from causal_reads(part, Extent(key_low, key_high, keys.slot + key_low - keys.start))


def reads_within(query: QueryRun, keys: Extent, reach: AttentionSpan) -> Iterator[Read]:
    """The reads of one query run over one extent of keys, limited to the span of attention."""
    if reach.section is not None:
        return section_reads(query, keys, reach.section)
    return causal_reads(query, keys) if reach.window is None else window_reads(query, keys, reach.window)


def cut(read: Read, most_keys: int) -> Iterator[Read]:
    """Splits a read: full ones and plain diagonals into at most `most_keys` keys, and others into at most ROWS rows and
    2 * ROWS keys, most of which have the same mask."""
    num_rows, num_keys = read.row_end - read.row_start, read.slot_end - read.slot_start
    if read.offset is None:
        for low in range(read.slot_start, read.slot_end, most_keys):
            yield read._replace(slot_start=low, slot_end=min(low + most_keys, read.slot_end))
    elif (read.is_causal and num_keys <= most_keys) or (num_rows <= ROWS and num_keys <= 2 * ROWS):
        yield read
    else:
        for start in range(read.row_start, read.row_end, ROWS):
            for part in _zones(read, start, min(start + ROWS, read.row_end)):
                yield from [part] if part.offset is not None else cut(part, most_keys)


def _zones(read: Read, start: int, end: int) -> Iterator[Read]:
    """The keys of rows [start, end) of a masked read: those that only the first rows see, those that all see, and those
    that only the last rows see. A single zone if the window is shorter than the number of rows."""
    height, window = end - start, UNBOUNDED if read.window is None else read.window
    own = read.slot_start + (read.offset or 0) + start - read.row_start  # the slot of the first row's own key
    edges = (own - window + 1, own + height - window, own, own + height)
    if height > window:
        edges = (edges[0], edges[3])
    inside = [min(max(edge, read.slot_start), read.slot_end) for edge in edges]
    for i, (low, high) in enumerate(pairwise(inside)):
        if low < high:
            yield Read(start, end, low, high, None if i == 1 else own - low, read.window)


def hidden(num_queries: int, num_keys: int, offset: int, window: int | None, device: str = "cpu") -> Tensor:
    """The keys of a read that each query does not see, [Q, S] boolean."""
    seen_QS = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril_(offset)
    if window is not None:
        seen_QS.triu_(offset - window + 1)
    return seen_QS.logical_not_()


def band(num_queries: int, num_keys: int, offset: int, window: int | None) -> Tensor:
    """Additive mask [Q, S] of a read, float32: 0 where visible, the lowest finite number elsewhere.

    Not -inf, for which torch's CPU flash kernel silently returns a wrong lse of 0 on rows without visible keys.
    """
    hidden_QS = hidden(num_queries, num_keys, offset, window)
    mask_QS = torch.zeros(num_queries, num_keys, dtype=torch.float32)
    return mask_QS.masked_fill_(hidden_QS, torch.finfo(torch.float32).min)
