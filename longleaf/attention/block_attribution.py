"""Block attribution: the attention share of each block of keys per row, as a second output of kernels.

The logsumexp over some keys minus that over all keys is the logarithm of the attention share of these keys. The merge
of partials uses the same identity in reverse. A kernel that processes keys block by block computes the sum of each
block anyway, and stores it. The sums are converted to shares after the merge, when the logsumexp over all keys is
known.

Shape letters: K key heads, G queries per key head, E entries.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longleaf.runs import ceil_div

BLOCK = 32
"""Number of slots of a block. Blocks start at multiples of BLOCK. Must match decode.c."""
NO_EDGE = 1 << 40
"""Beyond all slots."""


class AttributedRead(NamedTuple):
    """Attribution parameters of a read, in the order of decode.c's struct."""

    start: int
    """Index of its first entry for one query per key head."""
    first_row: int
    end_row: int
    """Rows [first_row, end_row) are reported."""
    edge: int
    """Slots from `edge` on are counted separately, so the block that contains `edge` has two entries."""
    num_entries: int
    """Per row."""

    @property
    def end(self) -> int:
        return self.start + (self.end_row - self.first_row) * self.num_entries


def attributed_read(slots: tuple[int, int], start: int, rows: tuple[int, int], edge: int = NO_EDGE) -> AttributedRead:
    """Parameters for slots [first, end), with entries from `start` on for rows [first, end)."""
    low, high = slots
    is_inside = low < edge < high
    num_entries = ceil_div(high, BLOCK) - low // BLOCK + is_inside
    return AttributedRead(start, *rows, edge if is_inside else NO_EDGE, num_entries)


def table(rows: Sequence[tuple[int, ...]], width: int) -> Tensor:
    """An int64 tensor of rows, for compiled code. Runs in every step; NumPy is faster here than torch.tensor."""
    numbers: NDArray[np.int64] = np.array(rows, dtype=np.int64).reshape(-1, width)
    return torch.from_numpy(numbers)  # pyright: ignore[reportUnknownMemberType]


@dataclass(frozen=True, eq=False)
class AttributionColumns:
    """Mapping of entries to columns: int64 tables on the CPU, in the order of the structs of block_attribution.c.

    The rows of an attributed sequence are averaged. A run consists of the entries [first, end) of a row of a
    read. They are added to the columns from `column` on, with `per_column` entries per column; `before` entries of the
    first column precede the run.
    """

    runs: Tensor
    """[N, 8]: the row, the start of its entries (see `AttributedRead`) and their number, first, end, column, before,
    per_column."""
    rows: Tensor
    """[A, 4]: start and end of the rows, start and end of the runs."""

    @cached_property
    def cache(self) -> dict[Hashable, Any]:
        """Data that a backend derived from these tables and caches for the following layers, by cache key."""
        return {}


class BlockSums:
    """Attribution parameters of a step's reads, and the kernels' report for one layer."""

    def __init__(self, reads: Sequence[AttributedRead], num_entries: int = 0) -> None:
        """`reads` has one item for each read of the step, in the same order. The output has room for at least
        `num_entries` entries, of which the kernels write those of the reads."""
        self.reads = reads
        self.table = table(reads, len(AttributedRead._fields))
        self._size = max((num_entries, *(read.end for read in reads)))
        self._room_KE2 = torch.empty(0, 0, 2)
        self._is_attributed = False

    def room(self, num_kv_heads: int, group: int, device: torch.device | None = None) -> Tensor:
        """Output buffer of a kernel for one layer, [K, E * G, 2], float32, on the CPU or another device. Per entry: the
        running maximum of the row's scores up to this block, and the sum of exp(score - maximum) over the block. The
        entries of a row in a read are adjacent. The next query of the same key head follows them, then the next row.
        Sums are initialised to 0, because kernels skip keys that a row cannot see."""
        shape = (num_kv_heads, self._size * group, 2)
        if self._room_KE2.shape != shape:
            self._room_KE2 = torch.zeros(shape, device=device)
        self._is_attributed = True
        return self._room_KE2

    def take(self) -> Tensor | None:
        """The report of the last layer; None if its kernel does not support attribution. The next layer overwrites
        it."""
        is_reported, self._is_attributed = self._is_attributed, False
        return self._room_KE2 if is_reported else None
