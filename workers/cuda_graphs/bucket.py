"""Decode steps of up to a fixed number of rows, with inputs at fixed addresses: the numbers of a step are copied to the
device at once, always to the same address.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from longleaf.attention.masks import Reads
from longleaf.kernels.backend import CapturableBackend, LaunchTables, Numbers
from longleaf.positions import OWN_ROPE, AttentionSpan, Rope
from workers.host_copies import pinned
from workers.sampling.acceptance import NO_DRAFT
from workers.sampling.device_sampler import NUM_PARAMETERS
from workers.step.draft_rollback import StoredKvRecorder
from workers.step.inputs import InputBuilder, Inputs, RowNumbers
from workers.step.last_tokens import PADDING_ROW
from workers.step.layers import RowLayer

ALIGNED = 16
"""Alignment of fields, in numbers (128 bytes): Triton compiles a separate kernel for unaligned addresses."""
DOUBLE = Rope(is_double=True)
Forward = Callable[[Inputs[RowLayer], StoredKvRecorder | None], Tensor | None]
"""Runs the model on the device; on rank 0 it returns the logits [R, V] of the sampled rows."""


def laid_out(sizes: Sequence[int]) -> list[slice]:
    """The slices of consecutive aligned fields of these sizes."""
    places: list[slice] = []
    end = 0
    for size in sizes:
        start = end + -end % ALIGNED
        end = start + size
        places.append(slice(start, end))
    return places


class StepMemory:
    """N int64 numbers on a device, and two buffers on the host: one is filled while the other is being copied."""

    def __init__(self, num_numbers: int, device: str) -> None:
        self.device_N = torch.zeros(num_numbers, dtype=torch.long, device=device)
        self._hosts = [pinned(num_numbers, dtype=torch.long, device=device) for _ in range(2)]
        self.turn = 0
        """The index of the host buffer that is filled next."""

    def host(self) -> Numbers:
        """The host buffer to fill. The copy before the last, which used the same buffer, must have finished."""
        return self._hosts[self.turn].numpy()

    def send(self, num_numbers: int) -> None:
        """Starts the copy of the first numbers of the filled buffer, after earlier work of the stream."""
        host: Tensor = self._hosts[self.turn]
        self.device_N[:num_numbers].copy_(host[:num_numbers], non_blocking=True)
        self.turn = 1 - self.turn


class Fields(NamedTuple):
    """The layout of the numbers of a step of T rows. Each field has T numbers, except `parameters`, which has T numbers
    per kind, and `tables`.
    """

    token_ids: slice
    positions: slice
    slots: slice
    window_slots: slice
    sample_rows: slice
    is_double: slice
    """1 where a row is rotated in float64."""
    places: slice
    """Places of the last ids of the sampled sequences, in the order of `sample_rows`."""
    drafts: slice
    draft_numbers: slice
    """See `DraftRows`, in the same order."""
    parameters: slice
    tables: slice


def fields_of(num_rows: int, num_table_numbers: int = 0) -> Fields:
    return Fields(*laid_out([num_rows] * 9 + [NUM_PARAMETERS * num_rows, num_table_numbers]))


class Sampled(NamedTuple):
    """The sampled positions, in the order of the plan: see `Fields`."""

    places: Sequence[int]
    drafts: Sequence[int]
    draft_numbers: Sequence[int]


class GraphVariant(NamedTuple):
    """The tables of a bucket. One variant is for steps whose rows share many reads, another for the other steps."""

    tables: dict[AttentionSpan, LaunchTables]
    reads: dict[AttentionSpan, Reads]
    """Bound to the tables."""

    @property
    def most_rows(self) -> int:
        return min(tables.most_rows for tables in self.tables.values())

    @property
    def num_numbers(self) -> int:
        return sum(tables.num_numbers for tables in self.tables.values())


class BatchBucket:
    """Steps of up to T rows, all of which may be sampled. Missing rows are padded with rows that read nothing and whose
    keys go to the trash slots.
    """

    def __init__(self, num_rows: int, builder: InputBuilder, *, may_be_double: bool) -> None:
        """Rows are rotated in the model's precision, and in float64 if `may_be_double`."""
        self.num_rows = num_rows
        self._builder = builder
        self._trash = builder.pool.trash_slot, builder.pool.window_trash_slot
        self._device = builder.pool.device
        self._ropes = {OWN_ROPE, DOUBLE} if may_be_double else {OWN_ROPE}
        self.variants: list[GraphVariant] = []
        self.fields = fields_of(num_rows)

    def warm_up(self, backend: CapturableBackend, forward: Forward) -> Tensor | None:
        """Runs the model with rows that read nothing, to find the tables that its layers need. Returns the result of
        `forward`.
        """
        reads = {reach: Reads() for reach in self._builder.reaches}
        device_N = torch.zeros(self.fields.tables.start, dtype=torch.long, device=self._device)
        for field, slot in zip((self.fields.slots, self.fields.window_slots), self._trash, strict=True):
            device_N[field].fill_(slot)
        logits_TV = forward(with_token_ids(self.inputs(device_N, reads), device_N[self.fields.token_ids]), None)
        for is_shared in (False, True):
            tables = {reach: backend.tables(seen, is_shared=is_shared) for reach, seen in reads.items()}
            variant = GraphVariant(tables, {reach: Reads() for reach in reads})
            if not self.variants or variant.most_rows > self.variants[0].most_rows:
                self.variants.append(variant)
        self.fields = fields_of(self.num_rows, max(variant.num_numbers for variant in self.variants))
        return logits_TV

    def bind(self, device_N: Tensor) -> list[Inputs[RowLayer]]:
        """The inputs of each variant. They refer to the numbers in `device_N`."""
        made: list[Inputs[RowLayer]] = []
        for variant in self.variants:
            start = self.fields.tables.start
            for reach, tables in variant.tables.items():
                tables.bind(variant.reads[reach], device_N[start : start + tables.num_numbers])
                start += tables.num_numbers
            made.append(self.inputs(device_N, variant.reads))
        return made

    def inputs(self, device_N: Tensor, reads: dict[AttentionSpan, Reads]) -> Inputs[RowLayer]:
        """Inputs that refer to the numbers in `device_N`, except for the reads."""
        fields = self.fields
        is_double_T = device_N[fields.is_double]
        return Inputs(
            token_ids_T=device_N[fields.token_ids],
            positions_T=device_N[fields.positions],
            layers=self._builder.row_layers(reads, device_N[fields.slots], device_N[fields.window_slots]),
            sample_rows_R=device_N[fields.sample_rows],
            ropes={OWN_ROPE: None} | ({DOUBLE: is_double_T} if DOUBLE in self._ropes else {}),
        )

    @property
    def nothing(self) -> RowNumbers:
        """The numbers of a step without rows."""
        return RowNumbers((), (), (), (), (), (), {reach: Reads() for reach in self.variants[0].tables}, 0)

    def can_take(self, rows: RowNumbers) -> bool:
        """Whether a step fits; the same on all ranks."""
        return len(rows) <= self.num_rows and self._ropes.issuperset(rows.ropes)

    def fill(self, host_N: Numbers, rows: RowNumbers, sampled: Sampled) -> tuple[int | None, int]:
        """Writes the numbers of a step that fits (`can_take`) to host memory. Returns the index of the variant and the
        number of numbers to copy. The index is None if the reads from this rank's pool do not fit into its tables; all
        other ranks choose the same variant.
        """
        fields, window_slots = self.fields, rows.window_slots
        is_double = [rope.is_double for rope in rows.ropes]
        of_rows = (rows.token_ids, rows.positions, rows.slots, window_slots, rows.sample_rows, is_double, *sampled)
        others = (0, 0, *self._trash, 0, 0, PADDING_ROW, NO_DRAFT, 0)
        for field, values, other in zip(fields, of_rows, others, strict=False):
            numbers_T = host_N[field]
            numbers_T[: len(values)] = values
            numbers_T[len(values) :] = other
        index = 0 if rows.most_together <= self.variants[0].most_rows else len(self.variants) - 1
        start = num_used = fields.tables.start
        for reach, tables in self.variants[index].tables.items():
            end = start + tables.num_numbers
            if (num_filled := tables.fill(rows.reads[reach], host_N[start:end])) is None:
                return None, fields.tables.start
            start, num_used = end, start + num_filled
        return index, num_used


def with_token_ids(inputs: Inputs[RowLayer], token_ids_T: Tensor) -> Inputs[RowLayer]:
    """The inputs with these token ids, and with the rope numbers converted to boolean masks."""
    ropes = {rope: None if mask is None else mask != 0 for rope, mask in inputs.ropes.items()}
    return replace(inputs, token_ids_T=token_ids_T, ropes=ropes)
