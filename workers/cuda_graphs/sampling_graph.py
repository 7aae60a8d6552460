"""Samples the next tokens of a step on a device, from logits and parameters at fixed addresses."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longleaf.kernels.backend import Numbers
from longleaf.rank_protocol.step import Row
from longleaf.sampling import MAX_LOGPROBS
from workers.cuda_graphs.bucket import Fields
from workers.cuda_graphs.graphs import Work
from workers.host_copies import AsyncHostCopy, pinned
from workers.sampling.acceptance import DraftRows
from workers.sampling.device_sampler import (
    NUM_PARAMETERS,
    Batch,
    DeviceChoice,
    DeviceSampler,
    ids_of,
    padding_row,
    parameters_of,
    token_indices,
)
from workers.sampling.fixed_shape import Needs
from workers.step.last_tokens import DeviceIds

BroadcastFn = Callable[[Tensor], Tensor]
"""Broadcasts the ids [T] of rank 0 to all ranks. The input of the other ranks is ignored."""


class TokenBuffer:
    """Reported numbers of the tokens of at most R rows, on the device and in two host buffers: see `StepMemory`."""

    def __init__(self, num_rows: int, num_columns: int, dtype: torch.dtype, device: str) -> None:
        self.there_RN = torch.zeros(num_rows, num_columns, dtype=dtype, device=device)
        self.hosts_RN = [pinned(num_rows, num_columns, dtype=dtype, device=device) for _ in range(2)]


class TokenBroadcast:
    """Broadcasts the sampled ids to all ranks, which store the last id of each sequence."""

    def __init__(self, num_rows: int, last_ids: DeviceIds, broadcast: BroadcastFn, device: str) -> None:
        self.ids_R = torch.zeros(num_rows, dtype=torch.long, device=device)
        """On rank 0, the sampled ids."""
        self._buffer = TokenBuffer(num_rows, 1, torch.long, device)
        self._last_ids = last_ids
        self._broadcast = broadcast

    def work(self, device_N: Tensor, fields: Fields) -> Work:
        places_T, numbers_T = device_N[fields.places], device_N[fields.draft_numbers]
        ids_T, reported_T = self.ids_R[: len(places_T)], self._buffer.there_RN[: len(places_T), 0]

        def tell() -> None:
            reported_T.copy_(self._broadcast(ids_T))
            self._last_ids.put(places_T, numbers_T, chosen_N=reported_T)

        return tell

    def read(self, num_positions: int, turn: int) -> AsyncHostCopy:
        """Starts to copy the reported ids of `num_positions` positions to host buffer `turn`, one of two."""
        return AsyncHostCopy(
            *(tensor[:num_positions, 0] for tensor in (self._buffer.there_RN, self._buffer.hosts_RN[turn]))
        )


class GraphSampler:
    """Samples on rank 0, with the operations of one of a fixed set of kinds."""

    def __init__(self, sampler: DeviceSampler, logits_RV: Tensor, ids_R: Tensor) -> None:
        """`logits_RV` and `ids_R` have as many rows as the largest bucket."""
        self._sampler = sampler
        self._ids_R = ids_R
        self.logits_RV = logits_RV
        (num_rows, size), device = logits_RV.shape, str(logits_RV.device)
        self._others_F = padding_row(size)
        self._ids = TokenBuffer(num_rows, 1, torch.long, device)
        self._logprobs = TokenBuffer(num_rows, 2 + 2 * min(MAX_LOGPROBS, size), torch.float64, device)

    def work(self, device_N: Tensor, fields: Fields, kind: Needs) -> Work:
        num_rows = fields.places.stop - fields.places.start
        numbers_FT = device_N[fields.parameters].view(NUM_PARAMETERS, num_rows)
        drafts = DraftRows(device_N[fields.drafts], device_N[fields.draft_numbers])
        reported_TN, logits_TV = self._tokens(kind).there_RN[:num_rows], self.logits_RV[:num_rows]

        def choose() -> None:
            found_TN = reported_TN.copy_(self._sampler.choose(logits_TV, parameters_of(numbers_FT), kind, drafts))
            self._ids_R[:num_rows].copy_(ids_of(found_TN))

        return choose

    def fill(self, host_N: Numbers, fields: Fields, rows: Sequence[Row]) -> Batch | None:
        """Writes the parameters of rows and their drafts to host memory. Returns None if there are no rows."""
        numbers_FT = host_N[fields.parameters].reshape(NUM_PARAMETERS, -1)
        indices = token_indices(rows)
        numbers_FT[:, len(indices) :] = self._others_F[:, None]
        if not rows:
            return None
        batch = self._sampler.batch(rows, self.logits_RV.shape[1])
        numbers_FT[:, : len(indices)] = batch.numbers(indices)
        return batch

    def choice(self, rows: Sequence[Row], batch: Batch, kind: Needs, turn: int) -> DeviceChoice:
        """Starts to copy the sampled tokens to host buffer `turn`, one of two."""
        tokens, num_positions = self._tokens(kind), len(batch.samplers)
        reported_RN, host_RN = tokens.there_RN[:num_positions], tokens.hosts_RN[turn][:num_positions]
        return DeviceChoice(rows, batch.samplers, reported_RN, self._sampler.broken, host_RN)

    def constrained_choice(self, rows: Sequence[Row]) -> DeviceChoice | None:
        """Samples the tokens of rows without a graph, if any of them has a grammar, whose masks are computed on the
        host; else returns None. Waits for the tokens of the previous step.
        """
        if not self._sampler.begin_constraints(rows):
            return None
        num_positions = sum(1 + len(row.draft_ids) for row in rows)
        choice = self._sampler.start_constrained(rows, self.logits_RV[:num_positions])
        self._ids_R[:num_positions].copy_(choice.ids())
        return choice

    def _tokens(self, kind: Needs) -> TokenBuffer:
        return self._ids if kind.num_top < 0 else self._logprobs
