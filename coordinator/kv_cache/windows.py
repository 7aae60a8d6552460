"""The window pool: the last keys of each segment, in the same blocks on every rank. Integers only."""

from coordinator.kv_cache.block_allocator import BlockAllocator
from longleaf.positions import EVERY_RANK, WindowSpec
from longleaf.runs import Run, ceil_div, until


class WindowBlockPool(BlockAllocator):
    """Blocks for layers that see only the last keys. The runs of a segment lose blocks at the front as they grow at the
    end.

    The pool is empty and unused where `windows` is None.
    """

    def __init__(self, windows: WindowSpec | None, block_size: int) -> None:
        super().__init__(windows.num_blocks if windows else 0)
        self._windows = windows
        self._block_size = block_size

    @property
    def seen_blocks(self) -> int:
        """Blocks of all that one token sees, if it was computed in one chunk; short chunks take a block each."""
        return self._windows.seen_blocks(self._block_size) if self._windows else 0

    def chunk_blocks(self, num_tokens: int) -> int:
        """Maximum number of blocks of a segment while it grows by `num_tokens` in chunks."""
        if not self._windows or not num_tokens:
            return 0
        return min(ceil_div(num_tokens, self._block_size) + 1, self._windows.chunk_blocks(self._block_size))

    def row_blocks(self, num_tokens: int, num_at_once: int) -> int:
        """Maximum number of blocks of a segment while it grows by `num_tokens` in rows of up to `num_at_once`."""
        if not self._windows:
            return 0
        return min(ceil_div(num_tokens, self._block_size), self._windows.row_blocks(num_at_once, self._block_size))

    def trim(self, runs: tuple[Run, ...], position: int) -> tuple[Run, ...]:
        """`runs` without the leading blocks that a token at `position` does not see; these are freed."""
        retained, freed = self.split(runs, position)
        self.free(freed)
        return retained

    def split(self, runs: tuple[Run, ...], position: int) -> tuple[tuple[Run, ...], list[int]]:
        """`runs` without the leading blocks that a token at `position` does not see, and the ids of these blocks."""
        if not self._windows:
            return (), []
        first, retained, unseen = self._windows.first(position), list[Run](), list[int]()
        for run in runs:
            count = len(run.blocks) if run.end <= first else max(0, first - run.start) // self._block_size
            unseen += run.blocks[:count]
            if count < len(run.blocks):
                retained.append(Run(run.rank, run.start + count * self._block_size, run.end, run.blocks[count:]))
        return tuple(retained), unseen

    def cut(self, runs: tuple[Run, ...], end: int) -> tuple[Run, ...]:
        """`runs` up to position `end`; blocks that hold no position before it are freed."""
        retained = list[Run]()
        for run in runs:
            left = until(run, end, self._block_size)
            self.free(run.blocks[len(left.blocks) :])
            if left.blocks:
                retained.append(left)
        return tuple(retained)

    def grow(self, runs: tuple[Run, ...], start: int, end: int) -> tuple[Run, ...]:
        """`runs` plus positions [start, end), added to the last run if it ends at `start`. Raises ResourceExhausted."""
        if start == end:
            return runs
        others, last = _last(runs, start)
        count = self.num_more(runs, start, end)
        return (*others, Run(EVERY_RANK, last.start, end, (*last.blocks, *self.allocate(count))))

    def num_more(self, runs: tuple[Run, ...], start: int, end: int) -> int:
        """Number of blocks that `grow` allocates."""
        if start == end:
            return 0
        _, last = _last(runs, start)
        return ceil_div(end - last.start, self._block_size) - len(last.blocks)


def _last(runs: tuple[Run, ...], start: int) -> tuple[tuple[Run, ...], Run]:
    """The runs before the one that grows at position `start`, and that run: the last one, or a new empty one."""
    if runs and runs[-1].end == start:
        return runs[:-1], runs[-1]
    return runs, Run(EVERY_RANK, start, start, ())
