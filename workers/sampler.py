"""Chooses tokens from logits. Random numbers depend on (seed, token index) alone, never on the batch."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from longleaf.sampling import Logprobs, Sampling, TokenLogprob
from longleaf.step import Row, Seen, Terms


class History:
    """What penalties must know of a sequence over a vocabulary of V tokens, on the CPU."""

    def __init__(self, seen: Seen, vocabulary_size: int) -> None:
        self.is_seen_V = torch.zeros(vocabulary_size, dtype=torch.bool)
        """Whether a token is in context, prompt or answer."""
        self.counts_V = torch.zeros(vocabulary_size, dtype=torch.float64)
        """How often a token is in the answer."""
        self.is_seen_V[_below(seen.token_ids, vocabulary_size)] = True
        for token_id in seen.generated:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """Notes a generated token."""
        self.is_seen_V[token_id] = True
        self.counts_V[token_id] += 1


class Chooser:
    """Chooses the tokens of one sequence, by its terms."""

    def __init__(self, terms: Terms, vocabulary_size: int) -> None:
        self.sampling = terms.sampling
        self._history = History(terms.seen, vocabulary_size) if terms.seen is not None else None

    def choose(self, logits_V: Tensor, token_index: int) -> int:
        """The next token id from the logits [V] of one position."""
        token_id = sample(logits_V, self.sampling, token_index, self._history)
        if self._history is not None:
            self._history.add(token_id)
        return token_id


class Sampler:
    """Chooses the tokens of all sequences. Remembers the terms of each, which its first row tells."""

    def __init__(self) -> None:
        self._choosers: dict[int, Chooser] = {}

    def choose(self, rows: Sequence[Row], logits_RV: Tensor) -> tuple[list[int], dict[int, Logprobs]]:
        """The next token id of each row, from its logits [V], and by sequence the logprobs that are asked for."""
        chosen: list[int] = logits_RV.argmax(dim=-1).tolist()
        told: dict[int, Logprobs] = {}
        for i, row in enumerate(rows):
            chooser = self._chooser(row, logits_RV.shape[-1])
            if not chooser.sampling.is_argmax:
                chosen[i] = chooser.choose(logits_RV[i], row.token_index)
            if (num_top := chooser.sampling.num_logprobs) is not None:
                told[row.sequence] = logprobs(logits_RV[i], chosen[i], num_top)
        return chosen, told

    def _chooser(self, row: Row, vocabulary_size: int) -> Chooser:
        """That of the row's sequence, begun anew where the row tells its terms."""
        if row.terms is not None:
            self._choosers[row.sequence] = Chooser(row.terms, vocabulary_size)
        return self._choosers[row.sequence]

    def forget(self, sequences: Iterable[int]) -> None:
        """Drops what was told of sequences that have ended."""
        for sequence in sequences:
            self._choosers.pop(sequence, None)


def sample(logits_V: Tensor, sampling: Sampling, token_index: int, history: History | None = None) -> int:
    """The next token id from the logits [V] of one position."""
    if sampling.is_greedy:
        return int(adjusted(logits_V, sampling, history).argmax())
    probabilities_V = distribution(logits_V, sampling, history)
    cumulative_V = probabilities_V.cumsum(0)
    drawn = uniform(sampling.seed, token_index) * float(cumulative_V[-1])
    chosen = int(torch.searchsorted(cumulative_V, drawn, right=True))
    return min(chosen, int(probabilities_V.nonzero()[-1]))


def adjusted(logits_V: Tensor, sampling: Sampling, history: History | None = None) -> Tensor:
    """Logits [V], float64 on the CPU, after bias and penalties.

    The bias is what transformers' SequenceBiasLogitsProcessor does to single ids; the repetition penalty is
    transformers' own; presence and frequency penalties are those of the OpenAI API.
    """
    scores_V = logits_V.detach().cpu().double()
    bias = {i: b for i, b in sampling.logit_bias.items() if i < len(scores_V)}
    scores_V = scores_V.index_add(0, _ids(bias.keys()), torch.tensor([*bias.values()], dtype=torch.float64))
    if history is None:
        return scores_V
    if sampling.repetition_penalty != 1.0:
        seen_1N = history.is_seen_V.nonzero().T
        penalty = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
        scores_V = penalty(seen_1N, scores_V[None])[0]  # pyright: ignore[reportArgumentType]
    presence_V = (history.counts_V > 0) * sampling.presence_penalty
    return scores_V - presence_V - history.counts_V * sampling.frequency_penalty


def distribution(logits_V: Tensor, sampling: Sampling, history: History | None = None) -> Tensor:
    """Probabilities [V], float64: bias and penalties, then transformers' own temperature, top-k, top-p and min-p."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k:
        processors.append(TopKLogitsWarper(min(sampling.top_k, logits_V.shape[0])))
    if sampling.top_p < 1.0:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        processors.append(MinPLogitsWarper(sampling.min_p))
    no_ids = torch.LongTensor(1, 0)
    scores_V = processors(no_ids, adjusted(logits_V, sampling, history)[None])[0]  # pyright: ignore[reportArgumentType]
    return torch.softmax(scores_V, dim=-1)


def logprobs(logits_V: Tensor, token_id: int, num_top: int) -> Logprobs:
    """How likely `token_id` was by the logits [V] as the model gave them, and the `num_top` likeliest tokens."""
    logprobs_V = torch.log_softmax(logits_V.double(), dim=-1).cpu()
    values, ids = logprobs_V.topk(min(num_top, len(logprobs_V)))
    top = (TokenLogprob(i, value) for i, value in zip(ids.tolist(), values.tolist(), strict=True))
    return Logprobs(float(logprobs_V[token_id]), tuple(top))


def uniform(seed: int, token_index: int) -> float:
    """A number in [0, 1) from a counter-based generator: key `seed`, counter `token_index`."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=token_index)).random())


def _ids(token_ids: Iterable[int]) -> Tensor:
    return torch.tensor([*token_ids], dtype=torch.long)


def _below(token_ids: Iterable[int], vocabulary_size: int) -> Tensor:
    """The ids that have a logit: an embedding may have more rows than the head."""
    ids = _ids(token_ids)
    return ids[ids < vocabulary_size]
