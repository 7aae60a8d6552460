"""An allocator for the blocks of one pool. It tracks block ids only and stores no keys."""

from bisect import bisect_left
from collections.abc import Iterable

from longleaf.errors import ResourceExhausted
from longleaf.runs import join


class BlockAllocator:
    """The free blocks of one pool, as sorted stretches of neighbouring ids.

    Neighbouring blocks are one stretch of memory, which a kernel reads without a copy, so allocations prefer one
    stretch.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_used = 0
        self._free: list[tuple[int, int]] = [(0, num_blocks)] if num_blocks else []

    @property
    def num_free(self) -> int:
        return self.num_blocks - self.num_used

    def allocate(self, count: int) -> tuple[int, ...]:
        """Allocates `count` blocks: from the smallest stretch that holds them all, else from the longest stretches in
        turn.

        Raises ResourceExhausted, and allocates nothing, when fewer blocks are free.
        """
        if count > self.num_free:
            raise ResourceExhausted("blocks", f"{count:,} blocks are needed, {self.num_free:,} are free")
        self.num_used += count
        taken: list[int] = []
        while len(taken) < count:
            taken.extend(self._take(count - len(taken)))
        return tuple(taken)

    def _take(self, wanted: int) -> range:
        """Allocates up to `wanted` blocks from one stretch."""
        shrink = [i for i, (_, length) in enumerate(self._free) if length >= wanted]
        by_length = [length for _, length in self._free]
        index = min(shrink, key=by_length.__getitem__) if shrink else by_length.index(max(by_length))
        first, length = self._free[index]
        count = min(wanted, length)
        self._free[index : index + 1] = [(first + count, length - count)] if count < length else []
        return range(first, first + count)

    def free(self, ids: Iterable[int]) -> None:
        """Frees blocks. Raises ValueError when one of them is not in use."""
        # a duplicate id is not adjacent to itself, so it is refused like an id that is free
        for first, end in join((block, block + 1) for block in sorted(ids)):
            self._insert(first, end - first)
            self.num_used -= end - first

    def _insert(self, first: int, length: int) -> None:
        index = bisect_left(self._free, (first, 0))
        before = self._free[index - 1] if index else (0, 0)
        after = self._free[index] if index < len(self._free) else (self.num_blocks, 0)
        if sum(before) > first or first + length > after[0]:
            raise ValueError(f"blocks {first} to {first + length - 1} are not all in use")
        low, high = index, index
        if index and sum(before) == first:
            low, first, length = index - 1, before[0], length + before[1]
        if after[1] and first + length == after[0]:
            high, length = index + 1, length + after[1]
        self._free[low:high] = [(first, length)]

    def audit(self) -> None:
        """Asserts that free plus used is the total, and that stretches are sorted, disjoint, and inside the pool."""
        assert sum(length for _, length in self._free) + self.num_used == self.num_blocks
        ends = [first + length for first, length in self._free]
        assert all(end < first for end, (first, _) in zip(ends, self._free[1:], strict=False))
        assert all(length > 0 for _, length in self._free)
        assert not ends or ends[-1] <= self.num_blocks
