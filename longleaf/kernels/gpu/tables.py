"""Tables of work items in memory of fixed address, so that launches that were captured once do other work each time.

What depends on a step is in the tables; what launches depend on (sizes of partials, tiles, grids) is the same for all
steps of so many tokens.
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
"""Stretches of keys that there is room for, beside a few for each token: a context of 524,288 tokens in blocks of 128,
none of which are neighbours."""
STRETCHES_PER_TOKEN, CHAINS_PER_TOKEN = 16, 4


class AttributedRanges(NamedTuple):
    """What is told of the reads of each stretch."""

    sums: BlockSums
    numbers: Tensor
    """On the device, see `longleaf.kernels.gpu.block_sums`."""


class DeviceWork(NamedTuple):
    """The work items of a step on the device, see `longleaf.kernels.gpu.work_items`."""

    table: Tensor
    num_part_rows: int
    tile_rows: int
    told: AttributedRanges | None = None
    """None where nothing is told."""


class WorkKey(NamedTuple):
    """What work items are made for."""

    device: torch.device
    num_programs: int
    shape: Shape


class TableCapacity(NamedTuple):
    """What there is room for in the table of layers of one shape."""

    key: WorkKey
    start: int
    """Of its numbers among those of all tables."""
    num_numbers: int
    num_part_rows: int
    tile_rows: int

    @property
    def end(self) -> int:
        return self.start + self.num_numbers


class DeviceLaunchTables:
    """The tables of layers that see alike, one for each shape among them. Tiles are those of single tokens, or, where
    rows read together (`is_shared`), those of all of them."""

    def __init__(self, keys: Sequence[WorkKey], *, is_shared: bool) -> None:
        self._rooms: list[TableCapacity] = []
        for key in keys:
            self._rooms.append(room(key, self.num_numbers, is_shared=is_shared))

    @property
    def num_numbers(self) -> int:
        """Numbers of all tables."""
        return self._rooms[-1].end if self._rooms else 0

    @property
    def most_rows(self) -> int:
        """See `longleaf.kernels.backend.LaunchTables`."""
        return min((room.tile_rows // room.key.shape.group for room in self._rooms), default=0)

    def bind(self, reads: Reads, there_N: Tensor) -> None:
        """See `longleaf.kernels.backend.LaunchTables`."""
        for key, start, num_numbers, num_part_rows, tile_rows in self._rooms:
            reads.kept[key] = DeviceWork(there_N[start : start + num_numbers], num_part_rows, tile_rows)

    def fill(self, reads: Reads, here_N: Numbers) -> int | None:
        """See `longleaf.kernels.backend.LaunchTables`."""
        num_used = 0
        for room in self._rooms:
            work = work_of(reads, room.key.shape, room.key.num_programs, room.tile_rows)
            if len(work.numbers) > room.num_numbers or work.num_part_rows > room.num_part_rows:
                return None
            num_used = room.start + len(work.numbers)
            here_N[room.start : num_used] = work.numbers
        return num_used


def room(key: WorkKey, start: int, *, is_shared: bool) -> TableCapacity:
    """Room for what steps of so many tokens usually ask, with some to spare."""
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
