"""Recurrent states in a step: which rows belong to a sequence, and in which slots its states are.

The state before a position is the one after the position before it, as a window of one earlier position would be. So
states are found in the block table like replicated windows: in runs of EVERY_RANK, with blocks of one position. A step
reads the state before the first row of a sequence, and stores the states after those of its rows for which the block
table has a slot. All ranks compute all rows of a mixer, so their states are equal.

In decode all rows are on every rank. In prefill each rank has a piece of the chunk: the rows of all pieces are
gathered, and each rank keeps the results for its piece.

Shape letters: T rows of this rank, R rows of the step, B sequences, F features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from longleaf.comm import Comm
from longleaf.kernels.cpu.recurrent import NO_SLOT, RecurrentPart
from longleaf.positions import EVERY_RANK
from longleaf.rank_protocol.step import Prefill, Row
from longleaf.runs import Run
from workers.host_copies import numbers_on
from workers.kv_cache.block_table import BlockTable, slots_of
from workers.kv_cache.states import StatePool
from workers.model.mixers import CompiledMixer, SequenceMixer, SequenceParts, StateCache


class SequenceRows(NamedTuple):
    """Adjacent rows of one sequence in a step."""

    start: int
    end: int
    source: int | None
    """Slot of the state before the first row; None: the sequence begins with it."""
    stores: tuple[tuple[int, int], ...]
    """Numbers of rows, and the slot of the state after so many of them, in order."""


@dataclass(frozen=True, slots=True)
class StateRows:
    """The rows of a step by sequence."""

    sequences: Sequence[SequenceRows]
    pieces: Sequence[Run] = ()
    """In prefill, the pieces of the ranks, in order of position; the rows of the step are theirs."""


class StateBuilder:
    """Finds the rows and the slots of the states of each step."""

    def __init__(self, block_table: BlockTable) -> None:
        self._block_table = block_table

    def chunk(self, work: Prefill) -> StateRows:
        """The rows of a chunk. Raises ValueError if its pieces are not adjacent, or no rank has the state before it."""
        if any(one.end != other.start for one, other in zip(work.pieces[:-1], work.pieces[1:], strict=True)):
            raise ValueError("pieces of a chunk must follow one another in a model with recurrent states")
        start, end = work.pieces[0].start, work.pieces[-1].end
        return StateRows([self._sequence(work.path, start, end, 0)], work.pieces)

    def rows(self, rows: Sequence[Row]) -> StateRows:
        """The rows of a decode step, in this order. Raises ValueError as `chunk`."""
        found, first = list[SequenceRows](), 0
        for row in rows:
            found.append(self._sequence(row.path, row.start, row.start + row.num_tokens, first))
            first += row.num_tokens
        return StateRows(found)

    def _sequence(self, path: Sequence[int], start: int, end: int, first_row: int) -> SequenceRows:
        """Positions [start, end) of a path, as rows from `first_row` on."""
        table = self._block_table
        source = None
        if start:
            before = slots_of(table.extents(path, start - 1, start, EVERY_RANK))
            if len(before) != 1:
                raise ValueError(f"no recurrent state is held at position {start:,} of segment {path[-1]}")
            [source] = before
        stores = [
            (position + 1 - start, extent.slot + position - extent.start)
            for extent in table.resident_extents(path[-1], start, end, EVERY_RANK)
            for position in range(extent.start, extent.end)
        ]
        return SequenceRows(first_row, first_row + end - start, source, tuple(stores))


class StateStep:
    """Computes the rows of a step in mixers."""

    def __init__(self, rows: StateRows, pool: StatePool, device: str, comm: Comm | None = None) -> None:
        """`comm`: the ranks that have the pieces of a chunk; None at world size 1, and for rows of every rank."""
        self._pool = pool
        self._sequences = rows.sequences
        self._pieces = rows.pieces
        self._comm = comm
        stepwise = [one for one in rows.sequences if one.source is not None and len(one.stores) == one.end - one.start]
        self._columns = [
            _column(device, stepwise, number) for number in range(max(map(_num_rows, stepwise), default=0))
        ]
        """The first rows of sequences that store the state after each of their rows, then their second rows, which
        follow those states, and so on: an answer's last token and its drafts."""
        self._others = [
            (
                one,
                None if one.source is None else numbers_on(device, [one.source]),
                [(count, numbers_on(device, [slot])) for count, slot in one.stores],
            )
            for one in rows.sequences
            if one not in stepwise
        ]

    @cached_property
    def _compiled_parts(self) -> SequenceParts:
        """The rows between stored states. Each part continues from the state that the one before it stored."""
        parts = list[RecurrentPart]()
        for one in self._sequences:
            start, source = one.start, NO_SLOT if one.source is None else one.source
            for count, slot in one.stores:
                parts.append(RecurrentPart(start, one.start + count, source, slot))
                start, source = one.start + count, slot
            if start < one.end:
                parts.append(RecurrentPart(start, one.end, source, NO_SLOT))
        return SequenceParts.of(parts)

    def mix(self, mixer: SequenceMixer, hidden_TF: Tensor) -> Tensor:
        """The results [T, F] of a mixer for the rows of this rank. Stores the states of the step. In prefill a
        collective.
        """
        if mixer.compiled is not None and hidden_TF.dtype == mixer.compiled.dtype:
            return self._mix_compiled(mixer.compiled, mixer.layer, hidden_TF)
        if not self._pieces:
            return self._compute(mixer, hidden_TF)
        own_TF, own = torch.zeros_like(hidden_TF), self._own_rows()
        own_TF[: own.stop - own.start] = self._compute(mixer, self._gather(hidden_TF))[own]
        return own_TF

    def _mix_compiled(self, compiled: CompiledMixer, layer: int, hidden_TF: Tensor) -> Tensor:
        """As `mix`. A rank projects the rows of its piece, and gathers the projections of the others. Between machines,
        where that would take longer than to project all rows, the rows are gathered first. States are equal on all
        ranks in both cases.
        """
        pool, comm = self._pool.parts(layer), self._comm
        if not self._pieces:
            gates, inputs = compiled.project(hidden_TF)
            return compiled.finish(compiled.advance(inputs, pool, self._compiled_parts), gates)
        own, own_TF = self._own_rows(), torch.zeros_like(hidden_TF)
        num_own = own.stop - own.start
        if comm is None or comm.transport != "gloo":
            gates, inputs = compiled.project(hidden_TF)
            gates, inputs = gates[:num_own], self._gather_all(inputs)
        else:
            gates, inputs = compiled.project(self._gather(hidden_TF))
            gates = gates[own]
        found_RHV = compiled.advance(inputs, pool, self._compiled_parts)
        if num_own:
            own_TF[:num_own] = compiled.finish(found_RHV[own], gates)
        return own_TF

    def _own_rows(self) -> slice:
        """The rows of the step that are this rank's piece."""
        rank, first = 0 if self._comm is None else self._comm.rank, 0
        for piece in self._pieces:
            if piece.rank == rank:
                return slice(first, first + len(piece))
            first += len(piece)
        return slice(0, 0)

    def _gather(self, rows_TF: Tensor) -> Tensor:
        """The rows of all pieces, [R, F], from those of this rank."""
        if self._comm is None:
            return rows_TF[: len(self._pieces[0])]
        gathered_NTF = self._comm.all_gather(rows_TF.contiguous())
        return torch.cat([gathered_NTF[piece.rank, : len(piece)] for piece in self._pieces])

    def _gather_all(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """As `_gather`, for several tensors at once."""
        if self._comm is None:
            return [self._gather(each) for each in inputs]
        packed_RF = self._gather(torch.cat([each.flatten(1) for each in inputs], dim=1))
        parts = packed_RF.split([each[0].numel() for each in inputs], dim=1)
        return [part.unflatten(1, each.shape[1:]) for part, each in zip(parts, inputs, strict=True)]

    def _compute(self, mixer: SequenceMixer, rows_RF: Tensor) -> Tensor:
        """The results of all rows. Each column of rows is computed together, a row of each sequence."""
        results_RF = torch.empty_like(rows_RF)
        for rows_B, sources_B, targets_B in self._columns:
            cache = StateCache(self._pool.load(mixer.layer, sources_B))
            rows_B1F = rows_RF.index_select(0, rows_B)[:, None]
            results_RF.index_copy_(0, rows_B, mixer.compute(rows_B1F, cache)[:, 0])
            self._pool.store(mixer.layer, targets_B, cache.parts)
        for one, source, stores in self._others:
            cache = StateCache(None if source is None else self._pool.load(mixer.layer, source))
            start = one.start
            for count, slot in stores:
                end = one.start + count
                results_RF[start:end] = mixer.compute(rows_RF[None, start:end], cache)[0]
                self._pool.store(mixer.layer, slot, cache.parts)
                start = end
            if start < one.end:
                results_RF[start : one.end] = mixer.compute(rows_RF[None, start : one.end], cache)[0]
        return results_RF


def _num_rows(one: SequenceRows) -> int:
    return one.end - one.start


def _column(device: str, sequences: Sequence[SequenceRows], number: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rows with this number in each of the sequences that have so many, and the slots before and after them."""
    found = [one for one in sequences if number < _num_rows(one)]
    slots = [(one.source or 0, *(slot for _, slot in one.stores)) for one in found]
    return (
        numbers_on(device, [one.start + number for one in found]),
        numbers_on(device, [each[number] for each in slots]),
        numbers_on(device, [each[number + 1] for each in slots]),
    )
