"""Reads with attribution of blocks of keys, and their expected sums in float64."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from longleaf.attention.block_attribution import BLOCK, NO_EDGE, AttributedRead, BlockSums, attributed_read
from longleaf.attention.masks import Read
from longleaf.attention.partial import Partial


def drawn_reads(data: Any, num_rows: int) -> tuple[list[Read], list[AttributedRead], int]:
    """Reads of consecutive slots, their attributed ranges, and the number of slots."""
    reads, reported, slot, start = list[Read](), list[AttributedRead](), data.draw(st.integers(0, 40)), 0
    for _ in range(data.draw(st.integers(1, 4))):
        rows = sorted(data.draw(st.lists(st.integers(0, num_rows), min_size=2, max_size=2, unique=True)))
        end = slot + data.draw(st.one_of(st.integers(1, 140), st.integers(500, 700)))
        offset = data.draw(st.one_of(st.none(), st.integers(-20, 150)))
        some = sorted(data.draw(st.lists(st.integers(*rows), min_size=2, max_size=2)))
        edge = data.draw(st.one_of(st.just(NO_EDGE), st.integers(slot, end)))
        reported.append(attributed_read((slot, end), start, (some[0], some[1]), edge))
        reads.append(Read(rows[0], rows[1], slot, end, offset))
        start, slot = reported[-1].end, end + data.draw(st.integers(0, 40))
    return reads, reported, slot


class Dense:
    """Attention in float64, a row and a head at a time: queries [T, H, D] and keys [K, S, D]."""

    def __init__(self, q_THD: Tensor, k_KSD: Tensor, scale: float, cap: float | None) -> None:
        self._q_THD, self._k_KSD = q_THD.double(), k_KSD.double()
        self._scale, self._cap = scale, cap
        self.group = q_THD.shape[1] // len(k_KSD)
        self.num_heads = q_THD.shape[1]

    def shares(self, read: Read, row: int, head: int, lse: float) -> Tensor:
        """The share of each key of a read."""
        keys_SD = self._k_KSD[head // self.group, read.slot_start : read.slot_end]
        scores_S = keys_SD @ self._q_THD[row, head] * self._scale
        if self._cap is not None:
            scores_S = self._cap * torch.tanh(scores_S / self._cap)
        distance = (10**6 if read.offset is None else read.offset) + row - read.row_start
        return torch.where(torch.arange(len(scores_S)) <= distance, (scores_S - lse).exp(), 0.0)


def check_sums(dense: Dense, reads: Sequence[Read], sums: BlockSums, reported_KE2: Tensor, partial: Partial) -> None:
    """That entries have the shares of dense attention, where rows see anything."""
    for read, each in zip(reads, sums.reads, strict=True):
        for row in range(each.first_row, each.end_row):
            for head in range(dense.num_heads):
                lse = float(partial.lse_TH[row, head])
                if lse > float("-inf"):
                    found = _entries(reported_KE2, each, row, head, dense.group, lse)
                    _check_row(read, each, dense.shares(read, row, head, lse), found)


def _check_row(read: Read, each: AttributedRead, wanted_S: Tensor, found_E: Tensor) -> None:
    cuts = _bounds(read, each)
    assert len(cuts) == each.num_entries
    for (low, high), share in zip(cuts, found_E.tolist(), strict=True):
        if low < high:
            right = float(wanted_S[low - read.slot_start : high - read.slot_start].sum())
            assert share == pytest.approx(right, abs=3e-5)


def _bounds(read: Read, attributed: AttributedRead) -> list[tuple[int, int]]:
    """Slots [low, high) of each entry of a row."""
    edge = {attributed.edge} if attributed.edge != NO_EDGE else set[int]()
    first = read.slot_start // BLOCK * BLOCK + BLOCK
    cuts = sorted({read.slot_start, read.slot_end, *edge, *range(first, read.slot_end, BLOCK)})
    found = list(zip(cuts, cuts[1:], strict=False))
    if edge and attributed.edge % BLOCK == 0:  # no block is cut: the numbers behind the edge leave one out
        found.insert(
            next(i for i, (low, _) in enumerate(found) if low == attributed.edge), (attributed.edge, attributed.edge)
        )
    return found


def _entries(reported_KE2: Tensor, each: AttributedRead, row: int, head: int, group: int, lse: float) -> Tensor:
    """The shares of the entries of a row and head, float64."""
    k, g = divmod(head, group)
    place = (each.start + (row - each.first_row) * each.num_entries) * group + g * each.num_entries
    peaks_E, sums_E = reported_KE2[k, place : place + each.num_entries].double().T
    return torch.where(sums_E == 0, 0.0, sums_E * (peaks_E - lse).exp())
