"""Where the n-grams of a segment's token ids lie: which tokens may follow the last ones of a sequence. Pure.

A segment is cut into tables of up to TABLE_TOKENS tokens, so that two bytes tell a position in one.
"""

from array import array
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

MAX_SIZE = 16
"""Tokens of the longest n-gram that is told from a shorter one."""
SIZES = (1, 2, 4, 8)
"""Tokens of the n-grams that are hashed."""
CHAINED = SIZES[-1]
"""All n-grams of so many tokens can be found, of shorter ones the last of a table."""
SLOTS = (4, 4, 2, 2)
"""Tokens for which a table has one slot, for each size."""
MAX_HOPS = 8
"""N-grams of a chain that are looked at before its last one, in each table."""
TABLE_TOKENS = 1 << 16
REST_TOKENS = 1 << 10
"""Tokens that are looked through without a table, for they are too few for one."""
ID_BYTES = 4
MAX_BYTES = 8
"""Per token of a segment, in all of its tables."""
MULTIPLIERS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F, 0x165667B1, 0xD6E8FEB9, 0x7FEB352D, 0x846CA68B)
"""Odd, of 32 bits: for the last token of an n-gram, and for those before it."""

Ids = NDArray[np.uint32]


class NgramMatch:
    """The search for the longest n-gram that ends like a query, and of equally long ones for the last.

    `query` has the last tokens, 1 to MAX_SIZE of them. What is tried later must be longer to be taken: so the places
    are tried from the last one on.
    """

    def __init__(self, query: Sequence[int]) -> None:
        self.newest_first = tuple(reversed(query))
        self.as_bytes = array("I", query).tobytes()
        self.probes = _probes(self.newest_first)
        self.size = 0
        """Tokens of the n-gram found so far."""
        self.part, self.offset = -1, -1
        """Where its last token is: number of the segment as `begin` was told, and offset in it."""
        self._current = -1

    @property
    def is_longest(self) -> bool:
        """Nothing longer can be found."""
        return self.size == len(self.newest_first)

    def begin(self, part: int) -> None:
        """What is tried from now on lies in the segment of this number."""
        self._current = part

    def try_at(self, ids: "array[int]", offset: int) -> None:
        """Takes the n-gram that ends at `offset` of a segment's ids, if it is longer than the one found so far."""
        query, size = self.newest_first, 0
        most = min(len(query), offset + 1)
        while size < most and ids[offset - size] == query[size]:
            size += 1
        self.take(self._current, offset, size)

    def take(self, part: int, offset: int, size: int) -> None:
        """Takes an n-gram of so many tokens, if it is longer than the one found so far."""
        if size > self.size:
            self.size, self.part, self.offset = size, part, offset


def _probes(newest_first: Sequence[int]) -> list[tuple[int, int, int]]:
    """What to look up, the longest n-gram first: its number among SIZES, the most tokens that can be found by it, and
    its hash of 32 bits."""
    found, total = list[tuple[int, int, int]](), 0
    for size, (token_id, multiplier) in enumerate(zip(newest_first, MULTIPLIERS, strict=False), 1):
        total += token_id * multiplier
        if size in SIZES:
            found.append((len(found), MAX_SIZE if size == CHAINED else size, total & 0xFFFFFFFF))
    return found[::-1]


class NgramTable:
    """Hash tables over the n-grams that end in up to `capacity` tokens of a segment, from offset `start` on.

    `capacity` is a power of 2. A slot holds where the last n-gram that fell into it ends, counted from `start`. From
    one of CHAINED tokens a chain leads to those before it in its slot. An empty slot is a 0, which could be a place as
    well: whoever looks compares ids anyway, for hashes collide.
    """

    BYTES_PER_TOKEN = 2 + sum(2 / tokens for tokens in SLOTS)

    def __init__(self, start: int, capacity: int) -> None:
        self.start = start
        self.capacity = capacity
        self.count = 0
        """Tokens that are entered."""
        nums = [*(capacity // tokens for tokens in SLOTS), capacity]
        room = memoryview(array("H", bytes(2 * sum(nums))))  # in one piece, which the system gets back
        ends = [*accumulate(nums)]
        *self._slots, self._earlier = (room[end - num : end] for num, end in zip(nums, ends, strict=True))
        self._shifts = tuple(33 - num.bit_length() for num in nums[:-1])

    @property
    def num_bytes(self) -> int:
        return sum(slots.nbytes for slots in (*self._slots, self._earlier))

    def enter(self, ids: Ids, end: int) -> None:
        """Enters the n-grams that end at the next offsets, up to `end`; `ids` are the segment's, uint32 [tokens]."""
        first = self.start + self.count
        self.count = end - self.start
        hashes, num_hashed = np.zeros(end - first, np.uint32), 0
        for size, slots, shift in zip(SIZES, self._slots, self._shifts, strict=True):
            begin = max(first, size - 1)  # those that begin before the segment are not entered
            if begin >= end:
                return
            hashes = hashes[begin - end :]
            for i in range(num_hashed, size):
                hashes += ids[begin - i : end - i] * np.uint32(MULTIPLIERS[i])
            num_hashed = size
            at = hashes >> np.uint32(shift)
            places = np.arange(begin - self.start, end - self.start, dtype=np.uint16)
            if size == CHAINED:
                self._chain(at, places)
            np.frombuffer(slots, np.uint16)[at] = places  # of several for one slot the last stays

    def _chain(self, at: Ids, places: NDArray[np.uint16]) -> None:
        """Has each n-gram lead to the one before it in its slot; `at` are the slots of those at `places`."""
        before = np.frombuffer(self._slots[-1], np.uint16)[at]
        order = np.argsort(at.astype(np.uint16), kind="stable")
        is_same = at[order[1:]] == at[order[:-1]]
        before[order[1:][is_same]] = places[order[:-1][is_same]]
        np.frombuffer(self._earlier, np.uint16)[places] = before

    def match(self, match: NgramMatch, ids: "array[int]", visible: int) -> None:
        """Tries what is found, `ids` being the segment's; of its offsets only those below `visible` are seen.

        Where the last n-gram lies further on, a chain leads back to one that is seen; n-grams of fewer than CHAINED
        tokens are missed then, in this table.
        """
        start, query, size = self.start, match.newest_first, match.size
        for number, most, hashed in match.probes:
            if size >= most:
                return
            place = self._slots[number][hashed >> self._shifts[number]]
            for _ in range(1 + MAX_HOPS if most == MAX_SIZE else 1):
                offset = start + place
                # quick, and rough where it reaches before the segment: there are more tokens than a query has
                if ids[offset - size] == query[size] and offset < visible:
                    match.try_at(ids, offset)
                    if (size := match.size) == len(query):
                        return
                if (before := self._earlier[place]) >= place:
                    break
                place = before


class SegmentIndex:
    """Tables of the n-grams of a growing segment. `ids` are the segment's own: they are read, and never held on to
    while they grow.

    Tokens are entered once nothing can take them back; the last ones, fewer than REST_TOKENS, are in no table yet.
    """

    def __init__(self, ids: "array[int]") -> None:
        self.ids = ids
        self.count = 0
        """Tokens that are entered, the first ones of the segment."""
        self._tables: list[NgramTable] = []
        self._covered = 0
        """Tokens in tables."""

    @property
    def num_bytes(self) -> int:
        """At most MAX_BYTES per token that is entered."""
        return sum(table.num_bytes for table in self._tables)

    def enter(self, count: int) -> None:
        """Enters the segment's tokens up to the first `count` of them, which stay as they are. Those that are entered
        already stay so."""
        assert count <= len(self.ids)
        self.count = max(self.count, count)
        if self.count - self._covered < REST_TOKENS:
            return
        ids = np.frombuffer(self.ids, np.uint32)
        while self.count - self._covered >= REST_TOKENS:
            if not self._tables or self._tables[-1].count == self._tables[-1].capacity:
                self._tables.append(NgramTable(self._covered, self._next_capacity()))
            table = self._tables[-1]
            end = min(self.count, table.start + table.capacity)
            table.enter(ids, end)
            self._covered = end

    def _next_capacity(self) -> int:
        """The most that a table may have so that all of them have at most MAX_BYTES per token, even while it is
        empty."""
        most = int(self.count * MAX_BYTES / NgramTable.BYTES_PER_TOKEN) - self._covered
        return min(TABLE_TOKENS, 1 << (most.bit_length() - 1))

    def match(self, match: NgramMatch, visible: int) -> None:
        """Tries what was entered, the most recent first; of the segment only offsets below `visible` are seen."""
        visible = min(visible, self.count)
        if self._covered < visible:
            self._match_rest(match, visible)
        for table in reversed(self._tables):
            if match.is_longest:
                return
            if table.start < visible:
                table.match(match, self.ids, visible)

    def _match_rest(self, match: NgramMatch, visible: int) -> None:
        """Tries what is in no table: the last one of the longest."""
        first = max(0, self._covered - MAX_SIZE + 1)
        rest = self.ids[first:visible].tobytes()
        while not match.is_longest:
            longer = match.as_bytes[-ID_BYTES * (match.size + 1) :]
            end = _rfind(rest, longer)
            if end < 0:
                return
            match.try_at(self.ids, first + end - 1)


def _rfind(ids: bytes, wanted: bytes) -> int:
    """The number of ids up to the end of the last place where all those wanted lie in `ids`; -1 where there is none."""
    at = ids.rfind(wanted)
    while at % ID_BYTES and at >= 0:
        at = ids.rfind(wanted, 0, at + len(wanted) - 1)
    return (at + len(wanted)) // ID_BYTES if at >= 0 else -1
