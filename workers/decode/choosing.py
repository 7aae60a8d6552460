"""How the next tokens of a step's rows are chosen on a device, from logits and parameters of fixed address."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longleaf.channel.step import Row
from longleaf.kernels.backend import Numbers
from longleaf.sampling import MAX_LOGPROBS
from workers.decode.bucket import Fields
from workers.decode.graphs import Work
from workers.sampling.device_sampler import (
    NUM_PARAMETERS,
    Batch,
    DeviceChoice,
    DeviceSampler,
    ids_of,
    nobodys,
    parameters_of,
)
from workers.sampling.fixed_shape import KINDS, Needs, kind_of
from workers.step.last_ids import DeviceIds
from workers.transfers import pinned

Tell = Callable[[Tensor], Tensor]
"""Tells all ranks the ids [T] of rank 0; those that others give are not looked at."""


class Told:
    """What is told of the tokens of R rows at most, on the device and twice on the host: see `StepMemory`."""

    def __init__(self, num_rows: int, num_columns: int, dtype: torch.dtype, device: str) -> None:
        self.there_RN = torch.zeros(num_rows, num_columns, dtype=dtype, device=device)
        self.hosts_RN = [pinned(num_rows, num_columns, dtype=dtype, device=device) for _ in range(2)]


class Listening:
    """On the other ranks: rank 0 tells the ids."""

    kinds: Sequence[Needs | None] = (None,)

    def __init__(self, last_ids: DeviceIds, tell: Tell) -> None:
        self._last_ids = last_ids
        self._tell = tell

    def work(self, there_N: Tensor, fields: Fields, kind: Needs | None) -> Work:
        def listen() -> None:
            places_T = there_N[fields.places]
            self._last_ids.put(places_T, self._tell(torch.zeros_like(places_T)))

        return listen


class Choosing:
    """On rank 0: the sampler chooses by kinds of needs, each with operations of its own."""

    kinds: Sequence[Needs | None] = KINDS

    def __init__(
        self,
        sampler: DeviceSampler,
        last_ids: DeviceIds,
        tell: Tell,
        logits_RV: Tensor,
    ) -> None:
        """`logits_RV` are of as many rows as the largest bucket has."""
        self._sampler = sampler
        self._last_ids = last_ids
        self._tell = tell
        self.logits_RV = logits_RV
        (num_rows, size), device = logits_RV.shape, str(logits_RV.device)
        self._others_F = nobodys(size)
        self._ids = Told(num_rows, 1, torch.long, device)
        self._logprobs = Told(num_rows, 2 + 2 * min(MAX_LOGPROBS, size), torch.float64, device)

    def work(self, there_N: Tensor, fields: Fields, kind: Needs | None) -> Work:
        assert kind is not None
        num_rows = fields.places.stop - fields.places.start
        numbers_FT = there_N[fields.parameters].view(NUM_PARAMETERS, num_rows)
        told_TN, logits_TV = self._told(kind).there_RN[:num_rows], self.logits_RV[:num_rows]

        def choose() -> None:
            found_TN = told_TN.copy_(self._sampler.choose(logits_TV, parameters_of(numbers_FT), kind))
            self._last_ids.put(there_N[fields.places], self._tell(ids_of(found_TN)))

        return choose

    def fill(self, here_N: Numbers, fields: Fields, rows: Sequence[Row]) -> tuple[Batch, Needs] | tuple[None, None]:
        """Puts the parameters of rows into memory of the host, and those of nobody behind them; which of `kinds` the
        rows take, if there are any."""
        numbers_FT = here_N[fields.parameters].reshape(NUM_PARAMETERS, -1)
        numbers_FT[:, len(rows) :] = self._others_F[:, None]
        if not rows:
            return None, None
        batch = self._sampler.batch(rows, self.logits_RV.shape[1])
        numbers_FT[:, : len(rows)] = batch.numbers([row.token_index for row in rows])
        return batch, kind_of(batch.needs)

    def choice(self, rows: Sequence[Row], batch: Batch, kind: Needs, turn: int) -> DeviceChoice:
        """Tokens that were chosen, on their way to one of two places on the host."""
        told = self._told(kind)
        told_RN, host_RN = told.there_RN[: len(rows)], told.hosts_RN[turn][: len(rows)]
        return DeviceChoice(rows, batch.choosers, told_RN, self._sampler.broken, host_RN)

    def _told(self, kind: Needs) -> Told:
        return self._ids if kind.num_top < 0 else self._logprobs
