"""The lost ranges of a segment, and the blocks reserved for them. Integers only."""

from bisect import bisect_right
from collections.abc import Iterable

from coordinator.kv_cache.block_placer import BlockCount, Reservation
from longleaf.runs import Range, ceil_div


class LostRanges:
    """Positions of a segment whose keys no rank holds, until they are restored or recomputed.

    Ranges begin where a run began, and are filled in whole blocks from there on.
    """

    def __init__(self, ranges: Iterable[Range], before: "LostRanges | None" = None) -> None:
        """Replaces the lost ranges `before`, if there are any."""
        self.ranges = tuple(ranges)
        """All ranges that were lost, [start, end), in order."""
        self.left = list(self.ranges)
        """Ranges that are still lost."""
        self.windows_from = 0
        """With replicated windows, the first position of the windows that the segment holds after recovery."""
        self.window_blocks = 0
        """Maximum number of blocks of these windows."""
        self.reservation: Reservation | None = None
        """Blocks reserved for the ranges in `left`, once they are available."""
        self.front: int | None = None
        """With replicated windows, the position on the segment's path from which it is recomputed; the windows before
        it are held."""
        self.may_return = before.may_return if before else True
        """Whether restoring from storage may be tried: it has not failed before."""
        self.has_failed = False
        """It could not be planned, and is not tried again."""
        self.suspicion = before.suspicion if before else 0
        """Fault score of its tokens. It is reset once they are recomputed past `suspect_end`."""
        self.suspect_end = before.suspect_end if before else 0
        """End of the suspected range."""

    @property
    def first(self) -> int:
        """The first lost position."""
        return self.left[0][0]

    @property
    def num_tokens(self) -> int:
        return sum(end - start for start, end in self.left)

    def num_blocks(self, block_size: int) -> BlockCount:
        """Blocks needed for all that is still lost."""
        return BlockCount(sum(ceil_div(end - start, block_size) for start, end in self.left), self.window_blocks)

    def num_before(self, end: int) -> int:
        """Number of lost tokens before `end`."""
        return sum(max(0, min(high, end) - low) for low, high in self.left)

    def fill(self, start: int, end: int) -> None:
        """Marks positions [start, end) as recovered. They must lie in one lost range."""
        index = bisect_right(self.left, start, key=_start) - 1
        low, high = self.left[index]
        assert 0 <= index
        assert low <= start < end <= high
        self.left[index : index + 1] = [(a, b) for a, b in ((low, start), (end, high)) if a < b]
        if self.left and self.first >= self.suspect_end:
            self.suspicion = 0


def _start(stretch: Range) -> int:
    return stretch[0]
