"""What kernels of GPUs are to tell of blocks of keys, and where that counts, as tables of integers for the device.

Shape letters: A tellers, N columns, R runs, L entries that count.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longleaf.attention.block_attribution import BLOCK, AttributionColumns, BlockSums
from longleaf.attention.masks import Read
from longleaf.attention.partial import Partial
from longleaf.kernels.gpu.tables import DeviceWork

BAG = 5
"""Numbers of a column."""


class ColumnEntries(NamedTuple):
    """Which entries count into which columns, on the device."""

    entries_L: Tensor
    """[L, 4] int64, those of a column side by side: the row, where its entries start (see `AttributedRead`), the number
    of this one, and that of all."""
    bags_AN: Tensor
    """[A * N, BAG] int64, of each column: the first entry and the end of the entries; the first row and the end of the
    rows whose sinks count into it, if they count; rows of the teller."""


def told_numbers(told: BlockSums, reads: Sequence[Read], of_stretches: Sequence[int], group: int) -> list[int]:
    """Five numbers for each stretch, of whose reads the numbers are given: `entry`, rows [first, end) of a key head
    that are told of, the edge, and entries per row. Slot s counts into the entry at `entry` + row * entries per row +
    s // BLOCK, and from the edge on into the next one."""
    rows: list[tuple[int, ...]] = []
    for each, read in zip(told.reads, reads, strict=True):
        first, end = each.first_row * group, each.end_row * group
        entry = each.start * group - first * each.num_entries - read.slot_start // BLOCK
        rows.append((entry, first, end, each.edge, each.num_entries))
    return [number for read in of_stretches for number in rows[read]]


def told_arguments(work: DeviceWork, parts: Partial, group: int, *, tells: bool) -> tuple[Tensor, Tensor, int]:
    """What kernels of attention are given to tell: what is told of each stretch, where entries go, and the stride
    between key heads. What stands for these where nothing is told is not looked at."""
    if not tells or work.told is None:
        return work.table, parts.lse_TH, 0
    reported_KE2 = work.told.sums.room(parts.lse_TH.shape[1], group, work.table.device)
    return work.told.numbers, reported_KE2, reported_KE2.stride(0)


def bags_of(columns: AttributionColumns, num_columns: int, sink_column: int, device: torch.device) -> ColumnEntries:
    """Made once for all layers of a step, in one copy that nobody waits for."""
    if device not in columns.kept:
        entries_L, bounds_AN = _entries(columns, num_columns)
        bags_AN = torch.zeros(len(columns.tellers), num_columns, BAG, dtype=torch.long)
        bags_AN.view(-1, BAG)[:, :2] = torch.stack((bounds_AN[:-1], bounds_AN[1:]), dim=1)
        bags_AN[:, sink_column, 2:4] = columns.tellers[:, :2]
        bags_AN[:, :, 4] = (columns.tellers[:, 1] - columns.tellers[:, 0])[:, None]
        flat = torch.cat((entries_L.flatten(), bags_AN.flatten()))
        there = (flat.pin_memory() if device.type == "cuda" else flat).to(device, non_blocking=True)
        columns.kept[device] = ColumnEntries(there[: entries_L.numel()], there[entries_L.numel() :])
    return columns.kept[device]


def _entries(columns: AttributionColumns, num_columns: int) -> tuple[Tensor, Tensor]:
    """Entries, by teller and column, and the bounds of each column's."""
    rows_R, starts_R, per_row_R, firsts_R, ends_R, columns_R, before_R, per_column_R = columns.runs.T
    _, _, first_runs_A, end_runs_A = columns.tellers.T
    counts_R = ends_R - firsts_R
    runs_L = torch.repeat_interleave(counts_R)
    turns_L = torch.arange(len(runs_L)) - (counts_R.cumsum(0) - counts_R)[runs_L]
    tellers_R = torch.repeat_interleave(end_runs_A - first_runs_A)
    places_L = columns_R[runs_L] + (before_R[runs_L] + turns_L) // per_column_R[runs_L]
    places_L += tellers_R[runs_L] * num_columns
    found_L = (rows_R[runs_L], starts_R[runs_L], firsts_R[runs_L] + turns_L, per_row_R[runs_L])
    counts_AN = torch.bincount(places_L, minlength=len(columns.tellers) * num_columns)
    bounds_AN = torch.cat((counts_AN.new_zeros(1), counts_AN.cumsum(0)))
    return torch.stack(found_L, dim=1)[places_L.argsort(stable=True)], bounds_AN
