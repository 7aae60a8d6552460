"""Work item tables in memory of fixed address, so that captured launches can process different work in each replay.

The tables contain everything that depends on the step; launch parameters (sizes of partials, tiles, grids) are the same
for all steps with the same number of tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longleaf.attention.block_attribution import BlockSums
from longleaf.attention.masks import Reads
from longleaf.kernels.backend import Numbers
from longleaf.kernels.gpu.work_items import (
    HEADER,
    ITEM,
    MIN_TABLE,
    MIN_TILE_ROWS,
    STRETCH,
    TOKEN,
    Shape,
    power_of_two,
    tile_of,
    work_of,
)
from longleaf.runs import ceil_div

STRETCHES = 4096
"""Capacity in stretches of keys, in addition to a few per token: a context of 524,288 tokens in blocks of 128, none of
which are adjacent."""
STRETCHES_PER_TOKEN, CHAINS_PER_TOKEN = 16, 4


class AttributedRanges(NamedTuple):
    """Attribution parameters of each stretch."""

    sums: BlockSums
    numbers: Tensor
    """On the device, see `longleaf.kernels.gpu.block_sums`."""


class DeviceWork(NamedTuple):
    """The work items of a step on the device, see `longleaf.kernels.gpu.work_items`."""

    table: Tensor
    num_part_rows: int
    tile_rows: int
    attribution: AttributedRanges | None = None
    """None without attribution."""


class WorkKey(NamedTuple):
    """Cache key of work items."""

    device: torch.device
    num_programs: int
    shape: Shape


class TableCapacity(NamedTuple):
    """Capacity of the table for layers of one shape."""

    key: WorkKey
    start: int
    """Offset of its numbers in the common buffer."""
    num_numbers: int
    num_part_rows: int
    tile_rows: int

    @property
    def end(self) -> int:
        return self.start + self.num_numbers


class DeviceLaunchTables:
    """The tables of layers with the same attention pattern, one for each shape, in memory of fixed address, from which
    launches read the reads of a step. Sizes are int64 counts. Tiles have the rows of a single token
    or, if rows share reads (`is_shared`), those of all tokens."""

    def __init__(self, keys: Sequence[WorkKey], *, is_shared: bool) -> None:
        self._rooms: list[TableCapacity] = []
        for key in keys:
            self._rooms.append(room(key, self.num_numbers, is_shared=is_shared))

    @property
    def num_numbers(self) -> int:
        """Size of all tables."""
        return self._rooms[-1].end if self._rooms else 0

    @property
    def most_rows(self) -> int:
        """Maximum number of rows that share reads of keys; further rows read the keys again."""
        return min((room.tile_rows // room.key.shape.group for room in self._rooms), default=0)

    def bind(self, reads: Reads, device_N: Tensor) -> None:
        """Binds layers that read `reads`, which is empty, to the work in `device_N` on the device."""
        for key, start, num_numbers, num_part_rows, tile_rows in self._rooms:
            reads.cache[key] = DeviceWork(device_N[start : start + num_numbers], num_part_rows, tile_rows)

    def fill(self, reads: Reads, host_N: Numbers) -> int | None:
        """Writes the reads of a step to host memory, for copying to the device, and returns the count of numbers. None
        if there is not enough space."""
        num_used = 0
        for room in self._rooms:
            work = work_of(reads, room.key.shape, room.key.num_programs, room.tile_rows)
            if len(work.numbers) > room.num_numbers or work.num_part_rows > room.num_part_rows:
                return None
            num_used = room.start + len(work.numbers)
            host_N[room.start : num_used] = work.numbers
        return num_used


def room(key: WorkKey, start: int, *, is_shared: bool) -> TableCapacity:
    """Capacity for the usual steps of this number of tokens, with a margin."""
    num_tokens, group, num_kv_heads = key.shape[:3]
    tile_rows = tile_of(num_tokens * group, key.shape) if is_shared else MIN_TILE_ROWS
    shared = ceil_div(key.num_programs, num_kv_heads)
    alone = CHAINS_PER_TOKEN * num_tokens
    num_items = shared + alone * ceil_div(group, tile_rows)
    num_stretches = STRETCHES + STRETCHES_PER_TOKEN * num_tokens
    num_shifts = num_tokens * (shared + CHAINS_PER_TOKEN)
    num_numbers = HEADER + ITEM * num_items + STRETCH * num_stretches + TOKEN * num_tokens + num_shifts
    num_part_rows = shared * tile_rows + alone * group
    return TableCapacity(
        key, start, power_of_two(num_numbers, MIN_TABLE), power_of_two(num_part_rows, MIN_TILE_ROWS), tile_rows
    )
