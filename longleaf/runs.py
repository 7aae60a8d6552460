"""Runs: consecutive positions of one segment that one rank holds. Integers only.

A run is the unit of ownership, attention, snapshot and recovery. Positions are counted over the whole context.
"""

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import msgspec

Range = tuple[int, int]
"""Positions [start, end)."""


class Run(msgspec.Struct, frozen=True, array_like=True):
    """Positions [start, end) of a segment, held by `rank` in `blocks` of its pool, in order.

    Position p lies in slot `blocks[(p - start) // block_size] * block_size + (p - start) % block_size`.
    """

    rank: int
    start: int
    end: int
    blocks: tuple[int, ...]

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def range(self) -> Range:
        return self.start, self.end


class Extent(NamedTuple):
    """Positions [start, end) in consecutive slots starting at `slot`."""

    start: int
    end: int
    slot: int


def ceil_div(a: int, b: int) -> int:
    """How many of size `b` hold `a`."""
    return -(-a // b)


def join(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merges adjacent ranges [start, end), in their given order."""
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def union(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of ranges [start, end), sorted, with adjacent ranges merged."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        elif start < end:
            joined.append((start, end))
    return joined


def without(start: int, end: int, hidden: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The positions [start, end) except the hidden ones, which are sorted."""
    for low, high in hidden:
        if start < min(low, end):
            yield start, min(low, end)
        start = max(start, high)
    if start < end:
        yield start, end


def extents(run: Run, block_size: int) -> Iterator[Extent]:
    """Splits a run where its blocks are not adjacent, so that each extent is contiguous in memory."""
    first = 0
    for i in range(1, len(run.blocks) + 1):
        if i < len(run.blocks) and run.blocks[i] == run.blocks[i - 1] + 1:
            continue
        start, end = run.start + first * block_size, min(run.start + i * block_size, run.end)
        if start < end:
            yield Extent(start, end, run.blocks[first] * block_size)
        first = i


def joined(found: Iterable[Extent]) -> Iterator[Extent]:
    """Merges extents that are adjacent in positions and slots, in order of position."""
    last: Extent | None = None
    for extent in found:
        if last is not None and (extent.start, extent.slot) == (last.end, last.slot + last.end - last.start):
            last = Extent(last.start, extent.end, last.slot)
            continue
        if last is not None:
            yield last
        last = extent
    if last is not None:
        yield last


class Overlap(NamedTuple):
    """Queries [query_start, query_end) against keys [key_start, key_end), which are either all earlier (`full`)
    or the same positions (`diagonal`)."""

    query_start: int
    query_end: int
    key_start: int
    key_end: int
    kind: Literal["full", "diagonal"]


def overlaps(query_start: int, query_end: int, key_start: int, key_end: int) -> Iterator[Overlap]:
    """Splits the causal relation of a query range and a key range into full and diagonal rectangles.

        keys:     [key_start ........ query_start ........ key_end)
        queries:                     [query_start ........ key_end ........ query_end)
                   full for every query   diagonal here      full here

    Keys at or after query_end are not visible to any query and are left out.
    """
    past_end = min(key_end, query_start)
    if key_start < past_end:
        yield Overlap(query_start, query_end, key_start, past_end, "full")
    start, end = max(key_start, query_start), min(key_end, query_end)
    if start < end:
        yield Overlap(start, end, start, end, "diagonal")
        if end < query_end:
            yield Overlap(end, query_end, start, end, "full")


def until(run: Run, end: int, block_size: int) -> Run:
    """The run truncated at position `end`, in the minimum number of blocks; empty if it starts at or after `end`."""
    end = max(run.start, min(run.end, end))
    return Run(run.rank, run.start, end, run.blocks[: ceil_div(end - run.start, block_size)])


def cut_chunk(start: int, end: int, block_size: int, num_pieces: int) -> list[tuple[int, int]]:
    """Splits [start, end) into at most `num_pieces` pieces of whole blocks, of sizes as equal as possible.

    Pieces end at multiples of block_size counted from `start`, or at `end`. Fewer blocks than pieces give fewer pieces.
    """
    num_blocks = ceil_div(end - start, block_size)
    pieces = min(num_pieces, num_blocks)
    bounds = [start + (num_blocks * i // pieces) * block_size for i in range(pieces)] + [end]
    return list(zip(bounds[:-1], bounds[1:], strict=True)) if pieces else []


def serpentine(turn: int, world_size: int) -> list[int]:
    """Order of ranks in which chunk number `turn` distributes its pieces: 0..N-1, then N-1..0, and so on."""
    ranks = list(range(world_size))
    return ranks if turn % 2 == 0 else ranks[::-1]
