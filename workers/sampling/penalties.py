"""Adjusts logits before a token is sampled: bias and penalties."""

from collections.abc import Iterable

import torch
from torch import Tensor

from longleaf.rank_protocol.step import PenaltyHistory, SamplingTerms
from longleaf.sampling import SamplingParams


class PenaltyCounts:
    """The token counts of a sequence for penalties, over a vocabulary of V tokens, on the CPU."""

    def __init__(self, seen: PenaltyHistory, vocabulary_size: int) -> None:
        self.seen_ids = _ids(seen.token_ids)
        """Ids in context, prompt or answer, each once. Ids without a logit are skipped: an embedding may have more rows
        than the head.
        """
        self.seen_ids = self.seen_ids[self.seen_ids < vocabulary_size].unique()
        self._is_seen_V = torch.zeros(vocabulary_size, dtype=torch.bool)
        self._is_seen_V[self.seen_ids] = True
        self.answer_ids, counts = _ids(seen.generated).unique(return_counts=True)
        """Ids of tokens in the answer, each once, and their counts."""
        self._counts_V = torch.zeros(vocabulary_size, dtype=torch.float64)
        self._counts_V[self.answer_ids] = counts.double()
        self._mark_seen(self.answer_ids)

    @property
    def counts(self) -> Tensor:
        """The count of each of `answer_ids` in the answer, float64."""
        return self._counts_V[self.answer_ids]

    def add(self, token_id: int) -> None:
        """Adds a generated token."""
        ids = _ids([token_id])
        self._mark_seen(ids)
        if self._counts_V[token_id] == 0:
            self.answer_ids = torch.cat((self.answer_ids, ids))
        self._counts_V[token_id] += 1

    def _mark_seen(self, ids: Tensor) -> None:
        new = ids[~self._is_seen_V[ids]]
        if len(new):
            self._is_seen_V[new] = True
            self.seen_ids = torch.cat((self.seen_ids, new))


class Penalties:
    """Bias and penalties of one sequence."""

    def __init__(self, terms: SamplingTerms, vocabulary_size: int) -> None:
        self._sampling: SamplingParams = terms.sampling
        bias = {i: b for i, b in terms.sampling.logit_bias.items() if i < vocabulary_size}
        self._biased_ids = _ids(bias.keys())
        self._biases = torch.tensor([*bias.values()], dtype=torch.float64)
        self._history = PenaltyCounts(terms.seen, vocabulary_size) if terms.seen is not None else None

    def add(self, token_id: int) -> None:
        """Adds a generated token."""
        if self._history is not None:
            self._history.add(token_id)

    def adjust(self, logits_V: Tensor) -> None:
        """Changes logits [V], float64, in place, only where a bias or a penalty applies.

        The bias is that of transformers' SequenceBiasLogitsProcessor for single ids, the repetition penalty that of its
        RepetitionPenaltyLogitsProcessor; presence and frequency penalties are those of the OpenAI API.
        """
        if len(self._biased_ids):
            logits_V.index_add_(0, self._biased_ids, self._biases)
        if self._history is None:
            return
        sampling = self._sampling
        if sampling.repetition_penalty != 1.0:
            ids = self._history.seen_ids
            found = logits_V[ids]
            factor = sampling.repetition_penalty
            logits_V[ids] = torch.where(found < 0, found * factor, found / factor)
        if sampling.presence_penalty or sampling.frequency_penalty:
            ids, counts = self._history.answer_ids, self._history.counts
            logits_V[ids] = logits_V[ids] - sampling.presence_penalty - counts * sampling.frequency_penalty


def _ids(token_ids: Iterable[int]) -> Tensor:
    return torch.tensor([*token_ids], dtype=torch.long)
