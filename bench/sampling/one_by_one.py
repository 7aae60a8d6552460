"""Reference sampler: one row after the other, by transformers' processors over the whole vocabulary.

`bench.sampling` compares its time with that of the sampler for all rows together, and tests compare the tokens.
"""

from collections.abc import Sequence

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

from longleaf.rank_protocol.step import PenaltyHistory, Row
from longleaf.sampling import Logprobs, SamplingParams, Token, TokenLogprob


class History:
    """Penalty state of a sequence over a vocabulary of V tokens."""

    def __init__(self, seen: PenaltyHistory, vocabulary_size: int) -> None:
        self.is_seen_V = torch.zeros(vocabulary_size, dtype=torch.bool)
        self.counts_V = torch.zeros(vocabulary_size, dtype=torch.float64)
        self.is_seen_V[[i for i in seen.token_ids if i < vocabulary_size]] = True
        for token_id in seen.generated:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        self.is_seen_V[token_id] = True
        self.counts_V[token_id] += 1


class Sampler:
    """Chooses the tokens of sequences; their terms arrive with the first row."""

    def __init__(self) -> None:
        self._terms: dict[int, tuple[SamplingParams, History | None]] = {}

    def choose(self, rows: Sequence[Row], logits_RV: Tensor) -> list[Token]:
        """The next token of each row."""
        chosen: list[int] = logits_RV.argmax(dim=-1).tolist()
        row_logprobs: list[Logprobs | None] = [None] * len(rows)
        for i, row in enumerate(rows):
            if row.terms is not None:
                seen = row.terms.seen
                history = None if seen is None else History(seen, logits_RV.shape[-1])
                self._terms[row.sequence] = row.terms.sampling, history
            sampling, history = self._terms[row.sequence]
            if not sampling.is_argmax:
                chosen[i] = sample(logits_RV[i], sampling, row.token_index, history)
                if history is not None:
                    history.add(chosen[i])
            if sampling.num_logprobs is not None:
                row_logprobs[i] = logprobs(logits_RV[i], chosen[i], sampling.num_logprobs)
        return list(map(Token, chosen, row_logprobs))


def sample(logits_V: Tensor, sampling: SamplingParams, token_index: int, history: History | None = None) -> int:
    """The next token id from the logits [V] of one position."""
    if sampling.is_greedy:
        return int(adjusted(logits_V, sampling, history).argmax())
    probabilities_V = distribution(logits_V, sampling, history)
    cumulative_V = probabilities_V.cumsum(0)
    uniform = np.random.Generator(np.random.Philox(key=sampling.seed, counter=token_index)).random()
    chosen = int(torch.searchsorted(cumulative_V, float(uniform) * float(cumulative_V[-1]), right=True))
    return min(chosen, int(probabilities_V.nonzero()[-1]))


def adjusted(logits_V: Tensor, sampling: SamplingParams, history: History | None = None) -> Tensor:
    """Logits [V], float64, after bias and penalties."""
    scores_V = logits_V.double()
    bias = {i: b for i, b in sampling.logit_bias.items() if i < len(scores_V)}
    ids = torch.tensor([*bias.keys()], dtype=torch.long)
    scores_V = scores_V.index_add(0, ids, torch.tensor([*bias.values()], dtype=torch.float64))
    if history is None:
        return scores_V
    if sampling.repetition_penalty != 1.0:
        seen_1N = history.is_seen_V.nonzero().T
        penalty = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
        scores_V = penalty(seen_1N, scores_V[None])[0]  # pyright: ignore[reportArgumentType]
    presence_V = (history.counts_V > 0) * sampling.presence_penalty
    return scores_V - presence_V - history.counts_V * sampling.frequency_penalty


def distribution(logits_V: Tensor, sampling: SamplingParams, history: History | None = None) -> Tensor:
    """Probabilities [V], float64."""
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
    logprobs_V = torch.log_softmax(logits_V.double(), dim=-1)
    values, ids = logprobs_V.topk(min(num_top, len(logprobs_V)))
    top = (TokenLogprob(i, value) for i, value in zip(ids.tolist(), values.tolist(), strict=True))
    return Logprobs(float(logprobs_V[token_id]), tuple(top))
