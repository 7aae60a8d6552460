"""An index of the n-grams of a segment's token ids, for finding the tokens that may follow a sequence. Pure.

A segment is divided into tables of up to TABLE_TOKENS tokens, so that two bytes address a position in a table.
"""

from array import array
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

MAX_SIZE = 16
"""Maximum size of an n-gram, in tokens: longer matches are not distinguished."""
SIZES = (1, 2, 4, 8)
"""Sizes of the hashed n-grams, in tokens."""
CHAINED = SIZES[-1]
"""Size of the n-grams that are chained, so that all occurrences can be found. Of smaller n-grams, only the last
occurrence in a table can be found."""
SLOTS = (4, 4, 2, 2)
"""Number of tokens per slot of a table, for each size."""
MAX_HOPS = 8
"""Maximum number of chained n-grams that are tried per table, after the first one."""
TABLE_TOKENS = 1 << 16
REST_TOKENS = 1 << 10
"""Fewer tokens than this are searched without a table."""
ID_BYTES = 4
MAX_BYTES = 8
"""Maximum size of all tables of a segment, in bytes per token."""
MULTIPLIERS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F, 0x165667B1, 0xD6E8FEB9, 0x7FEB352D, 0x846CA68B)
"""Odd 32-bit multipliers for the last token of an n-gram, and for those before it."""

Ids = NDArray[np.uint32]


class NgramMatch:
    """A search for the longest n-gram that matches the end of a query. Of several with equal size, it finds the last.

    `query` has the last 1 to MAX_SIZE tokens. A later candidate replaces the match only if it is longer, so candidates
    are tried from the last one on.
    """

    def __init__(self, query: Sequence[int]) -> None:
        self.newest_first = tuple(reversed(query))
        self.as_bytes = array("I", query).tobytes()
        self.probes = _probes(self.newest_first)
        self.size = 0
        """Size of the match so far, in tokens."""
        self.part, self.offset = -1, -1
        """Position of its last token: the number of the segment passed to `begin`, and the offset in it."""
        self._current = -1

    @property
    def is_longest(self) -> bool:
        """Whether no longer match is possible."""
        return self.size == len(self.newest_first)

    def begin(self, part: int) -> None:
        """Sets the number of the segment of the following candidates."""
        self._current = part

    def try_at(self, ids: "array[int]", offset: int) -> None:
        """Uses the n-gram that ends at `offset` of a segment's ids if it is longer than the match so far."""
        query, size = self.newest_first, 0
        most = min(len(query), offset + 1)
        while size < most and ids[offset - size] == query[size]:
            size += 1
        self.take(self._current, offset, size)

    def take(self, part: int, offset: int, size: int) -> None:
        """Uses an n-gram of `size` tokens if it is longer than the match so far."""
        if size > self.size:
            self.size, self.part, self.offset = size, part, offset


def _probes(newest_first: Sequence[int]) -> list[tuple[int, int, int]]:
    """The hashes to look up, the longest n-gram first: its index in SIZES, the maximum size of a match found with it,
    and its 32-bit hash."""
    found, total = list[tuple[int, int, int]](), 0
    for size, (token_id, multiplier) in enumerate(zip(newest_first, MULTIPLIERS, strict=False), 1):
        total += token_id * multiplier
        if size in SIZES:
            found.append((len(found), MAX_SIZE if size == CHAINED else size, total & 0xFFFFFFFF))
    return found[::-1]


class NgramTable:
    """Hash tables of the n-grams that end in up to `capacity` tokens of a segment, from offset `start` on.

    `capacity` is a power of 2. A slot holds the end of the last n-gram with that hash, counted from `start`. N-grams of
    CHAINED tokens in the same slot are chained, the last one first. An empty slot contains 0, which may also be a valid
    position: candidates are always compared by id, because hashes collide.
    """

    BYTES_PER_TOKEN = 2 + sum(2 / tokens for tokens in SLOTS)

    def __init__(self, start: int, capacity: int) -> None:
        self.start = start
        self.capacity = capacity
        self.count = 0
        """Number of tokens that are indexed."""
        nums = [*(capacity // tokens for tokens in SLOTS), capacity]
        room = memoryview(array("H", bytes(2 * sum(nums))))  # one allocation, which returns to the system as a whole
        ends = [*accumulate(nums)]
        *self._slots, self._previous = (room[end - num : end] for num, end in zip(nums, ends, strict=True))
        self._shifts = tuple(33 - num.bit_length() for num in nums[:-1])

    @property
    def num_bytes(self) -> int:
        return sum(slots.nbytes for slots in (*self._slots, self._previous))

    def enter(self, ids: Ids, end: int) -> None:
        """Indexes the n-grams that end at the next offsets, up to `end`. `ids` are those of the segment, uint32
        [tokens]."""
        first = self.start + self.count
        self.count = end - self.start
        hashes, num_hashed = np.zeros(end - first, np.uint32), 0
        for size, slots, shift in zip(SIZES, self._slots, self._shifts, strict=True):
            begin = max(first, size - 1)  # n-grams that begin before the segment are not indexed
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
            np.frombuffer(slots, np.uint16)[at] = places  # if several n-grams share a slot, the last one remains

    def _chain(self, at: Ids, places: NDArray[np.uint16]) -> None:
        """Links each n-gram to the previous one in its slot; `at` are the slots of the n-grams at `places`."""
        before = np.frombuffer(self._slots[-1], np.uint16)[at]
        order = np.argsort(at.astype(np.uint16), kind="stable")
        is_same = at[order[1:]] == at[order[:-1]]
        before[order[1:][is_same]] = places[order[:-1][is_same]]
        np.frombuffer(self._previous, np.uint16)[places] = before

    def match(self, match: NgramMatch, ids: "array[int]", visible: int) -> None:
        """Tries the n-grams found in this table. `ids` are those of the segment; only offsets below `visible` are used.

        If the last n-gram in a slot is not visible, its chain leads back to a visible one. N-grams of fewer than
        CHAINED tokens have no chain, and are missed in that case.
        """
        start, query, size = self.start, match.newest_first, match.size
        for number, most, hashed in match.probes:
            if size >= most:
                return
            place = self._slots[number][hashed >> self._shifts[number]]
            for _ in range(1 + MAX_HOPS if most == MAX_SIZE else 1):
                offset = start + place
                # a cheap test; an index before the segment wraps around safely, as there are more ids than query tokens
                if ids[offset - size] == query[size] and offset < visible:
                    match.try_at(ids, offset)
                    if (size := match.size) == len(query):
                        return
                if (before := self._previous[place]) >= place:
                    break
                place = before


class SegmentIndex:
    """Tables of the n-grams of a growing segment. `ids` are the segment's ids; no buffer over them is held, so
    that they can grow.

    Tokens are indexed once they can no longer be removed. The last ones, fewer than REST_TOKENS, are not in a table.
    """

    def __init__(self, ids: "array[int]") -> None:
        self.ids = ids
        self.count = 0
        """Number of indexed tokens, counted from the start of the segment."""
        self._tables: list[NgramTable] = []
        self._covered = 0
        """Number of tokens in tables."""

    @property
    def num_bytes(self) -> int:
        """At most MAX_BYTES per indexed token."""
        return sum(table.num_bytes for table in self._tables)

    def enter(self, count: int) -> None:
        """Indexes the first `count` tokens of the segment, which must not change later. Tokens that are already indexed
        remain indexed."""
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
        """The maximum capacity of the next table for which all tables have at most MAX_BYTES per token, even while it
        is empty."""
        most = int(self.count * MAX_BYTES / NgramTable.BYTES_PER_TOKEN) - self._covered
        return min(TABLE_TOKENS, 1 << (most.bit_length() - 1))

    def match(self, match: NgramMatch, visible: int) -> None:
        """Tries the indexed n-grams, the most recent first; only offsets below `visible` are used."""
        visible = min(visible, self.count)
        if self._covered < visible:
            self._match_rest(match, visible)
        for table in reversed(self._tables):
            if match.is_longest:
                return
            if table.start < visible:
                table.match(match, self.ids, visible)

    def _match_rest(self, match: NgramMatch, visible: int) -> None:
        """Searches the tokens that are not in a table, for the last one of the longest matches."""
        first = max(0, self._covered - MAX_SIZE + 1)
        rest = self.ids[first:visible].tobytes()
        while not match.is_longest:
            longer = match.as_bytes[-ID_BYTES * (match.size + 1) :]
            end = _rfind(rest, longer)
            if end < 0:
                return
            match.try_at(self.ids, first + end - 1)


def _rfind(ids: bytes, wanted: bytes) -> int:
    """The number of ids up to the end of the last occurrence of `wanted` in `ids`; -1 if there is none."""
    at = ids.rfind(wanted)
    while at % ID_BYTES and at >= 0:
        at = ids.rfind(wanted, 0, at + len(wanted) - 1)
    return (at + len(wanted)) // ID_BYTES if at >= 0 else -1
