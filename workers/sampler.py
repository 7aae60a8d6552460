"""Chooses tokens from logits. Random numbers depend on (seed, token index) alone, never on the batch."""

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from longleaf.sampling import Sampling


def sample(logits_V: Tensor, sampling: Sampling, token_index: int) -> int:
    """The next token id from the logits [V] of one position."""
    if sampling.is_greedy:
        return int(logits_V.argmax())
    probabilities_V = distribution(logits_V, sampling)
    cumulative_V = probabilities_V.cumsum(0)
    drawn = uniform(sampling.seed, token_index) * float(cumulative_V[-1])
    chosen = int(torch.searchsorted(cumulative_V, drawn, right=True))
    return min(chosen, int(probabilities_V.nonzero()[-1]))


def distribution(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [V], float64, after transformers' own temperature, top-k and top-p processors, in that order."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k:
        processors.append(TopKLogitsWarper(min(sampling.top_k, logits_V.shape[0])))
    if sampling.top_p < 1.0:
        processors.append(TopPLogitsWarper(sampling.top_p))
    no_ids = torch.LongTensor(1, 0)
    scores_V = processors(no_ids, logits_V[None].double().cpu())[0]  # pyright: ignore[reportArgumentType]
    return torch.softmax(scores_V, dim=-1)


def uniform(seed: int, token_index: int) -> float:
    """A number in [0, 1) from a counter-based generator: key `seed`, counter `token_index`."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=token_index)).random())
