"""What captured steps store, until the next step: where drafts are refused, the rest may have to be stored again."""

import torch
from torch import Tensor

from workers.step.draft_rollback import StoredKv


class FixedTokens:
    """Keys and values of steps of up to as many rows as the first one that is noted. Implements Keeper."""

    def __init__(self) -> None:
        self._there: dict[int, tuple[Tensor, Tensor]] = {}
        """By layer, [K, T, D] and [K, T, V]."""
        self._stored: dict[int, dict[int, StoredKv]] = {}
        """By rows of a bucket, and layer."""

    def note(self, layer: int, stored: StoredKv) -> None:
        """See `Keeper`. A step of as many rows stores into slots that are told at the same address."""
        slots_T, *parts = stored
        if layer not in self._there:
            k, v = (torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in parts)
            self._there[layer] = k, v
        k_KTD, v_KTV = (part[:, : len(slots_T)] for part in self._there[layer])
        for there, part in zip((k_KTD, v_KTV), parts, strict=True):
            there.copy_(part)
        self._stored.setdefault(len(slots_T), {})[layer] = StoredKv(slots_T, k_KTD, v_KTV)

    def of(self, num_rows: int) -> dict[int, StoredKv]:
        """By layer, what the last step of a bucket of so many rows has stored."""
        return self._stored[num_rows]
