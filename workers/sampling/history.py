"""The state of sequences for logit bias and penalties: device tensors of fixed shape, with one place per sequence."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from longleaf.rank_protocol.step import PenaltyHistory, SamplingTerms
from longleaf.sampling import MAX_BIASES
from workers.host_copies import to_device

PADDING_ROW = 0
"""The place of rows without bias and penalties. Writes to it have no effect."""


class TokenHistories:
    """The state of P places, in memory at fixed addresses: for each of V tokens, whether it was seen and how often the
    answer has it; and B biases.
    """

    def __init__(self, vocabulary_size: int, num_sequences: int, device: str) -> None:
        self._vocabulary_size = vocabulary_size
        self._device = device
        num_places = num_sequences + 1
        self._free = list(range(num_sequences, PADDING_ROW, -1))
        self.is_seen_PV = torch.zeros(num_places, vocabulary_size, dtype=torch.bool, device=device)
        self.counts_PV = torch.zeros(num_places, vocabulary_size, dtype=torch.int32, device=device)
        self.bias_ids_PB = torch.zeros(num_places, MAX_BIASES, dtype=torch.long, device=device)
        """Padded with id 0, with bias 0."""
        self.biases_PB = torch.zeros(num_places, MAX_BIASES, dtype=torch.float64, device=device)

    def begin(self, terms: SamplingTerms) -> int:
        """Assigns a place to a sequence; `end` returns it. Ids without a logit are skipped: an embedding may have more
        rows than the head.
        """
        if terms.seen is None and not terms.sampling.logit_bias:
            return PADDING_ROW
        place, seen, size = self._free.pop(), terms.seen or PenaltyHistory((), ()), self._vocabulary_size
        counts = Counter(seen.generated)
        ids = [i for i in {*seen.token_ids, *counts} if i < size]
        bias = {i: bias for i, bias in terms.sampling.logit_bias.items() if i < size}
        self.is_seen_PV[place].zero_().index_fill_(0, self._there(ids), True)
        self.counts_PV[place].zero_().index_copy_(0, self._there(counts), self._there(counts.values(), torch.int32))
        self.bias_ids_PB[place].zero_()[: len(bias)] = self._there(bias)
        self.biases_PB[place].zero_()[: len(bias)] = self._there(bias.values(), torch.float64)
        return place

    def end(self, place: int) -> None:
        """Frees a place."""
        if place != PADDING_ROW:
            self._free.append(place)

    def add(self, places_R: Tensor, ids_R: Tensor) -> None:
        """Adds a generated token to each sequence."""
        at_R = places_R * self._vocabulary_size + ids_R
        self.is_seen_PV.view(-1).index_fill_(0, at_R, True)
        self.counts_PV.view(-1).index_add_(0, at_R, torch.ones_like(at_R, dtype=torch.int32))

    def _there(self, numbers: Iterable[float], dtype: torch.dtype = torch.long) -> Tensor:
        return to_device(torch.tensor([*numbers], dtype=dtype), self._device)
