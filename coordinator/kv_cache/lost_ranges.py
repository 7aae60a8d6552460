"""What is lost of a segment, and the blocks that are promised for it. Integers only."""

from bisect import bisect_right
from collections.abc import Iterable

from coordinator.kv_cache.block_placer import BlockCount, Reservation
from longleaf.runs import ceil_div

Range = tuple[int, int]


class LostRanges:
    """Positions of a segment whose keys nobody holds any more, until they are held again.

    Ranges begin where a run began, and are held again in whole blocks from there on.
    """

    def __init__(self, ranges: Iterable[Range], before: "LostRanges | None" = None) -> None:
        """In place of what was lost `before`, if anything was."""
        self.ranges = tuple(ranges)
        """All that was lost, [start, end), in order."""
        self.left = list(self.ranges)
        """What is not held again yet."""
        self.windows_from = 0
        """With replicated windows, where those begin that the segment has once it is held again."""
        self.window_blocks = 0
        """Blocks that these take at most."""
        self.promise: Reservation | None = None
        """Blocks for what is left, once there is room for it."""
        self.front: int | None = None
        """With replicated windows, the place on the segment's path before which they are kept to go on from."""
        self.may_return = before.may_return if before else True
        """It has not been tried in vain to bring it back from storage."""
        self.has_failed = False
        """It could not be planned, and is not tried again."""
        self.suspicion = before.suspicion if before else 0
        """How much its tokens are suspected of ending epochs, for they were not read past that place again."""
        self.suspect_end = before.suspect_end if before else 0
        """Where that ends."""

    @property
    def first(self) -> int:
        """The first position that is lost."""
        return self.left[0][0]

    @property
    def num_tokens(self) -> int:
        return sum(end - start for start, end in self.left)

    def num_blocks(self, block_size: int) -> BlockCount:
        """What all that is left takes."""
        return BlockCount(sum(ceil_div(end - start, block_size) for start, end in self.left), self.window_blocks)

    def num_before(self, end: int) -> int:
        """Tokens before `end` that are lost."""
        return sum(max(0, min(high, end) - low) for low, high in self.left)

    def fill(self, start: int, end: int) -> None:
        """Positions [start, end), all of which are lost and neighbours, are held again."""
        index = bisect_right(self.left, start, key=_start) - 1
        low, high = self.left[index]
        assert 0 <= index
        assert low <= start < end <= high
        self.left[index : index + 1] = [(a, b) for a, b in ((low, start), (end, high)) if a < b]
        if self.left and self.first >= self.suspect_end:
            self.suspicion = 0


def _start(stretch: Range) -> int:
    return stretch[0]
