"""Block attribution on GPUs: integer tables for the device that define the reported blocks and their columns.

Shape letters: A attributed rows, N columns, R runs, L entries that count.
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
"""Numbers per column."""


class ColumnEntries(NamedTuple):
    """The entries that count into each column, on the device."""

    entries_L: Tensor
    """[L, 4] int64, grouped by column: the row, the start of its entries (see `AttributedRead`), the number of this
    one, and the number of all."""
    bags_AN: Tensor
    """[A * N, BAG] int64, for each column: start and end of its entries; start and end of the rows whose sinks count
    into it, if any; the number of attributed rows."""


def attribution_numbers(sums: BlockSums, reads: Sequence[Read], of_stretches: Sequence[int], group: int) -> list[int]:
    """Five numbers per stretch, from the read numbers of the stretches: `entry`, rows [first, end) of a key head that
    are reported, the edge, and entries per row. Slot s counts into the entry at `entry` + row * entries per row + s //
    BLOCK, and from the edge on into the next one."""
    rows: list[tuple[int, ...]] = []
    for each, read in zip(sums.reads, reads, strict=True):
        first, end = each.first_row * group, each.end_row * group
        entry = each.start * group - first * each.num_entries - read.slot_start // BLOCK
        rows.append((entry, first, end, each.edge, each.num_entries))
    return [number for read in of_stretches for number in rows[read]]


def attribution_arguments(
    work: DeviceWork, parts: Partial, group: int, *, is_attributed: bool
) -> tuple[Tensor, Tensor, int]:
    """Attribution arguments of the attention kernels: the numbers per stretch, the output for entries, and the stride
    between key heads. Without attribution these are placeholders that kernels do not read."""
    if not is_attributed or work.attribution is None:
        return work.table, parts.lse_TH, 0
    reported_KE2 = work.attribution.sums.room(parts.lse_TH.shape[1], group, work.table.device)
    return work.attribution.numbers, reported_KE2, reported_KE2.stride(0)


def bags_of(columns: AttributionColumns, num_columns: int, sink_column: int, device: torch.device) -> ColumnEntries:
    """Computed once for all layers of a step, with one asynchronous copy."""
    if device not in columns.cache:
        entries_L, bounds_AN = _entries(columns, num_columns)
        bags_AN = torch.zeros(len(columns.rows), num_columns, BAG, dtype=torch.long)
        bags_AN.view(-1, BAG)[:, :2] = torch.stack((bounds_AN[:-1], bounds_AN[1:]), dim=1)
        bags_AN[:, sink_column, 2:4] = columns.rows[:, :2]
        bags_AN[:, :, 4] = (columns.rows[:, 1] - columns.rows[:, 0])[:, None]
        flat = torch.cat((entries_L.flatten(), bags_AN.flatten()))
        there = (flat.pin_memory() if device.type == "cuda" else flat).to(device, non_blocking=True)
        columns.cache[device] = ColumnEntries(there[: entries_L.numel()], there[entries_L.numel() :])
    return columns.cache[device]


def _entries(columns: AttributionColumns, num_columns: int) -> tuple[Tensor, Tensor]:
    """Entries, sorted by attributed row and column, and the bounds of each column's."""
    rows_R, starts_R, per_row_R, firsts_R, ends_R, columns_R, before_R, per_column_R = columns.runs.T
    _, _, first_runs_A, end_runs_A = columns.rows.T
    counts_R = ends_R - firsts_R
    runs_L = torch.repeat_interleave(counts_R)
    turns_L = torch.arange(len(runs_L)) - (counts_R.cumsum(0) - counts_R)[runs_L]
    attributed_R = torch.repeat_interleave(end_runs_A - first_runs_A)
    places_L = columns_R[runs_L] + (before_R[runs_L] + turns_L) // per_column_R[runs_L]
    places_L += attributed_R[runs_L] * num_columns
    found_L = (rows_R[runs_L], starts_R[runs_L], firsts_R[runs_L] + turns_L, per_row_R[runs_L])
    counts_AN = torch.bincount(places_L, minlength=len(columns.rows) * num_columns)
    bounds_AN = torch.cat((counts_AN.new_zeros(1), counts_AN.cumsum(0)))
    return torch.stack(found_L, dim=1)[places_L.argsort(stable=True)], bounds_AN
