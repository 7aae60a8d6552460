"""Selection of the reads of a chunk for flash kernels, and their grouping into launches.

A launch of a flash kernel reads one stretch of keys for each row, whole or as a square diagonal. A round is a launch:
reads of disjoint rows, all whole or all diagonal. It reads keys in place, in any order. A contiguous chunk after one
stretch of keys needs two rounds; one whose rows belong to many ranks needs three.

Rows over many stretches would need as many rounds, a contiguous copy of the keys, or a block table. Copies of a long
past take memory that the pool uses. A block table has pages of 256 slots of which only a row's last one may be partly
filled, while stretches start and end anywhere. So the reads with the most work form up to MAX_ROUNDS rounds, and all
others are left to the kernel over work items, which processes all stretches in one launch, applies masks, and splits
keys if there are too few rows to fill the device. If that kernel would have most of the work, it gets all of it.

For kernels that are built for each number of rows and keys, reads are first cut into regular parts: rows into powers of
two, keys into numbers of three significant bits, four for each power of two. So few shapes serve chunks of any size
after any number of keys. Remainders are left to the other kernel.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from longleaf.attention.masks import Read, Reads
from longleaf.runs import ceil_div

MAX_ROUNDS = 4
"""Each costs a launch and a partial in memory, per layer."""
MIN_ROWS = 64
"""Minimum rows of a read: the kernels' tiles have 64 or 128 rows, and padding wastes work."""
MIN_KEYS = 512
"""Minimum keys of a whole read: below it, writing and merging a partial is slow relative to its products."""
TILE_ROWS = 128
"""Rows of a program of a flash kernel, for one head."""
FEW_KEYS = 2048
"""Keys that a program may read while the rest of the device is idle."""
MIN_REGULAR_ROWS, MIN_REGULAR_KEYS = 256, 1024
"""Minimum rows and keys of a regular part."""
SIGNIFICANT_BITS = 3
"""Of a regular number of keys."""
MAX_PARTS = 3
"""Maximum regular parts of the keys of a read. Each leaves less than a quarter, so that all leave less than a 64th."""
PIECE_KEYS = 4096
"""Keys that one program checks for non-finite numbers."""


class VarlenRound(NamedTuple):
    """Reads of one launch, in the order of their rows."""

    is_causal: bool
    reads: Sequence[Read]

    @property
    def max_rows(self) -> int:
        return max(read.row_end - read.row_start for read in self.reads)

    @property
    def max_keys(self) -> int:
        return max(read.slot_end - read.slot_start for read in self.reads)


class VarlenSequences(NamedTuple):
    """A round in the kernels' format: rows [bounds[i], bounds[i + 1]) see keys [starts[i], starts[i] + lengths[i]).

    Rows without a read are sequences without keys. `starts` has one extra element, as cumulative lengths do.
    """

    bounds: list[int]
    starts: list[int]
    lengths: list[int]


class LaunchPiece(NamedTuple):
    """A range of keys of a read, and the rows that see it."""

    slot_start: int
    slot_end: int
    row_start: int
    row_end: int
    round: int


class VarlenPlan(NamedTuple):
    """The rounds of a chunk, and the reads outside of all rounds."""

    rounds: Sequence[VarlenRound]
    rest: Reads


@dataclass
class _Open:
    """A round that is being filled."""

    is_causal: bool
    reads: list[Read] = field(default_factory=list[Read])

    def takes(self, read: Read) -> bool:
        """Adds a read, unless it is of another kind or shares rows with the round."""
        place = bisect_left(self.reads, read)
        is_ahead = place == len(self.reads) or read.row_end <= self.reads[place].row_start
        is_behind = not place or self.reads[place - 1].row_end <= read.row_start
        if self.is_causal != read.is_causal or not (is_ahead and is_behind):
            return False
        insort(self.reads, read)
        return True


def plan(
    reads: Iterable[Read], num_heads: int, num_multiprocessors: int, *, needs_regular_shapes: bool = False
) -> VarlenPlan:
    """The rounds of some reads for queries with this number of heads on a device."""
    reads = [read for read in reads if read.row_start < read.row_end and read.slot_start < read.slot_end]
    wanted, rest = [read for read in reads if fits(read)], [read for read in reads if not fits(read)]
    if needs_regular_shapes:
        parts = [regular_parts(read) for read in wanted]
        wanted = [part for regular, _ in parts for part in regular]
        rest += [part for _, remainder in parts for part in remainder]
    opened: list[_Open] = []
    for read in sorted(wanted, key=lambda read: -work_of(read)):
        if not any(one.takes(read) for one in opened) and len(opened) < MAX_ROUNDS:
            opened.append(_Open(read.is_causal, [read]))
    rounds = [VarlenRound(one.is_causal, tuple(one.reads)) for one in opened]
    rounds = [one for one in rounds if fills(one, num_heads, num_multiprocessors)]
    taken = {read for one in rounds for read in one.reads}
    rest += [read for read in wanted if read not in taken]
    if sum(map(work_of, taken)) < sum(map(work_of, rest)):
        return VarlenPlan([], Reads(reads))
    return VarlenPlan(rounds, Reads(rest))


def fits(read: Read) -> bool:
    """Whether the kernels support a read, and it is large enough."""
    num_rows, num_keys = read.row_end - read.row_start, read.slot_end - read.slot_start
    return num_rows >= MIN_ROWS and (read.is_causal or (read.offset is None and num_keys >= MIN_KEYS))


def regular_parts(read: Read) -> tuple[list[Read], list[Read]]:
    """The parts of a read with regular numbers of rows and keys, and the remainder, both of any number of reads."""
    regular, remainder = list[Read](), list[Read]()
    if read.is_causal:
        num_rows = power_of_two_in(read.row_end - read.row_start)
        if num_rows < MIN_REGULAR_ROWS:
            return [], [read]
        row, slot = read.row_start + num_rows, read.slot_start + num_rows
        regular.append(read._replace(row_end=row, slot_end=slot))
        below = read._replace(row_start=row, slot_end=slot, offset=None, window=None)
        own = read._replace(row_start=row, slot_start=slot)
        parts = [regular_parts(part) for part in (below, own) if part.row_start < part.row_end]
        return (
            [*regular, *(part for found, _ in parts for part in found)],
            [part for _, found in parts for part in found],
        )
    slots = [read.slot_start]
    while len(slots) <= MAX_PARTS and (num_keys := regular_keys(read.slot_end - slots[-1])):
        slots.append(slots[-1] + num_keys)
    row = read.row_start
    while (num_rows := power_of_two_in(read.row_end - row)) >= MIN_REGULAR_ROWS:
        for low, high in pairwise(slots):
            regular.append(Read(row, row + num_rows, low, high))
        row += num_rows
    if row < read.row_end:
        remainder.append(read._replace(row_start=row))
    if read.row_start < row and slots[-1] < read.slot_end:
        remainder.append(read._replace(row_end=row, slot_start=slots[-1]))
    return regular, remainder


def power_of_two_in(number: int) -> int:
    """The largest power of two that is at most this number; 0 for 0."""
    return 1 << number.bit_length() - 1 if number else 0


def regular_keys(number: int) -> int:
    """The largest regular number of keys that is at most this number; 0 if it is below the minimum."""
    shift = max(0, number.bit_length() - SIGNIFICANT_BITS)
    return number >> shift << shift if number >= MIN_REGULAR_KEYS else 0


def work_of(read: Read) -> int:
    """Approximate number of row-key pairs."""
    rectangle = (read.row_end - read.row_start) * (read.slot_end - read.slot_start)
    return rectangle // 2 if read.is_causal else rectangle


def fills(one: VarlenRound, num_heads: int, num_multiprocessors: int) -> bool:
    """Whether a round keeps half of the device busy, or is short: with variable lengths the kernels do not split
    keys."""
    tiles = sum(ceil_div(read.row_end - read.row_start, TILE_ROWS) for read in one.reads)
    return 2 * tiles * num_heads >= num_multiprocessors or one.max_keys <= FEW_KEYS


def sequences(one: VarlenRound, num_rows: int) -> VarlenSequences:
    """A round over queries with this number of rows."""
    bounds, starts, lengths = [0], list[int](), list[int]()
    for read in (*one.reads, Read(num_rows, num_rows, 0, 0)):
        if bounds[-1] < read.row_start:
            bounds.append(read.row_start)
            starts.append(0)
            lengths.append(0)
        if read.row_start < read.row_end:
            bounds.append(read.row_end)
            starts.append(read.slot_start)
            lengths.append(read.slot_end - read.slot_start)
    return VarlenSequences(bounds, [*starts, 0], lengths)


def pieces(rounds: Sequence[VarlenRound]) -> Iterator[LaunchPiece]:
    """All keys of all rounds."""
    for i, one in enumerate(rounds):
        for read in one.reads:
            for low in range(read.slot_start, read.slot_end, PIECE_KEYS):
                yield LaunchPiece(low, min(low + PIECE_KEYS, read.slot_end), read.row_start, read.row_end, i)


def members(rounds: Sequence[VarlenRound], num_rows: int) -> list[int]:
    """A bit mask per row of the rounds that contain it."""
    bits = [0] * num_rows
    for i, one in enumerate(rounds):
        for read in one.reads:
            for row in range(read.row_start, read.row_end):
                bits[row] |= 1 << i
    return bits
