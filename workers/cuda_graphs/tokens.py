"""Keeps the keys and values that a captured step stores until the next step: after refused drafts, the rest may have to
be stored again.
"""

import torch
from torch import Tensor

from workers.step.draft_rollback import StoredKv


class FixedTokens:
    """Keys and values of steps of up to as many rows as the first recorded one."""

    def __init__(self) -> None:
        self._there: dict[int, tuple[Tensor, Tensor]] = {}
        """By layer, [K, T, D] and [K, T, V]."""
        self._stored: dict[int, dict[int, StoredKv]] = {}
        """By the rows of a bucket, then by layer."""

    def record(self, layer: int, stored: StoredKv) -> None:
        """A RecordKv. Steps with the same number of rows read their slots from the same address."""
        slots_T, *parts = stored
        if layer not in self._there:
            k, v = (torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in parts)
            self._there[layer] = k, v
        k_KTD, v_KTV = (part[:, : len(slots_T)] for part in self._there[layer])
        for there, part in zip((k_KTD, v_KTV), parts, strict=True):
            there.copy_(part)
        self._stored.setdefault(len(slots_T), {})[layer] = StoredKv(slots_T, k_KTD, v_KTV)

    def stored_by_layer(self, num_rows: int) -> dict[int, StoredKv]:
        """The keys and values that the last step of a bucket with this many rows stored, by layer."""
        return self._stored[num_rows]
