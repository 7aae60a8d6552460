"""What each block of keys gave to a row: a second output of kernels, beside their partials.

A partial's logsumexp over some keys, less that of all keys, is the logarithm of their share of attention: the identity
that merges partials, read backwards. A kernel that goes through keys block by block has these sums at hand; here they
are written down. Shares are made of them where the logsumexp of all keys is known, after the merge.

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
"""Slots of a block; blocks begin at multiples of it. As in decode.c."""
NO_EDGE = 1 << 40
"""Beyond all slots."""


class AttributedRead(NamedTuple):
    """What is told of a read, in the order of decode.c's struct."""

    start: int
    """Its first entry, if key heads had one query each."""
    first_row: int
    end_row: int
    """Rows [first_row, end_row) are told of; empty: nothing is."""
    edge: int
    """Slots from it on count apart: the block inside which it lies has two entries."""
    num_entries: int
    """Per row."""

    @property
    def end(self) -> int:
        return self.start + (self.end_row - self.first_row) * self.num_entries


def told_read(slots: tuple[int, int], start: int, rows: tuple[int, int], edge: int = NO_EDGE) -> AttributedRead:
    """Of slots [first, end), entries from `start` on for rows [first, end)."""
    low, high = slots
    is_inside = low < edge < high
    num_entries = ceil_div(high, BLOCK) - low // BLOCK + is_inside
    return AttributedRead(start, *rows, edge if is_inside else NO_EDGE, num_entries)


def table(rows: Sequence[tuple[int, ...]], width: int) -> Tensor:
    """Rows of numbers, int64, for compiled code: made in every step, and sooner this way than by torch."""
    numbers: NDArray[np.int64] = np.array(rows, dtype=np.int64).reshape(-1, width)
    return torch.from_numpy(numbers)  # pyright: ignore[reportUnknownMemberType]


@dataclass(frozen=True, eq=False)
class AttributionColumns:
    """Where entries count: tables of int64, on the CPU, in the order of the structs of block_attribution.c.

    The rows of a teller are told together, in the mean. A run is entries [first, end) of a row of a read; they count
    into columns from `column` on, `per_column` of them each, and `before` of the first one's lie before them.
    """

    runs: Tensor
    """[N, 8]: the row, where its entries start (see `AttributedRead`) and their number, first, end, column, before,
    per_column."""
    tellers: Tensor
    """[A, 4]: the first row and the end of the rows, the first run and the end of the runs."""

    @cached_property
    def kept(self) -> dict[Hashable, Any]:
        """What a backend has made of these tables and keeps for the layers that follow, by what it was made for."""
        return {}


class BlockSums:
    """What kernels are to tell of a step's reads, and what they have told of one layer."""

    def __init__(self, reads: Sequence[AttributedRead]) -> None:
        """One for each read of the step, in their order."""
        self.reads = reads
        self.table = table(reads, len(AttributedRead._fields))
        self._size = max((read.end for read in reads), default=0)
        self._room_KE2 = torch.empty(0, 0, 2)
        self._is_told = False

    def room(self, num_kv_heads: int, group: int, device: torch.device | None = None) -> Tensor:
        """Where a kernel leaves what it tells of a layer, [K, E * G, 2], float32, on the CPU or another device: of an
        entry the highest score that the row has seen until then, and the sum of exp(score - that) over the block. A
        row has all its entries of a read side by side; then comes its next head of the same key head, then the next
        row. Sums are 0 where a kernel, which goes through no keys that a row cannot see, writes nothing."""
        shape = (num_kv_heads, self._size * group, 2)
        if self._room_KE2.shape != shape:
            self._room_KE2 = torch.zeros(shape, device=device)
        self._is_told = True
        return self._room_KE2

    def take(self) -> Tensor | None:
        """What was told of the last layer; None where its kernel does not tell. It is overwritten by the next one."""
        is_reported, self._is_told = self._is_told, False
        return self._room_KE2 if is_reported else None
