"""The definition of sampling, for one row; `draws.py` computes it for many rows at once."""

import torch
from torch import Tensor
from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper

from longleaf.sampling import SamplingParams


def distribution(scores_V: Tensor, sampling: SamplingParams) -> Tensor:
    """Probabilities [V], float64, from logits [V], float64, after bias and penalties: transformers' temperature, top-k,
    top-p and min-p.
    """
    processors = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k:
        processors.append(TopKLogitsWarper(min(sampling.top_k, scores_V.shape[0])))
    if sampling.top_p < 1.0:
        processors.append(lambda _, scores_1V: top_p(scores_1V[0], sampling.top_p)[None])
    if sampling.min_p > 0.0:
        processors.append(MinPLogitsWarper(sampling.min_p))
    no_ids = torch.LongTensor(1, 0)
    return torch.softmax(processors(no_ids, scores_V[None])[0], dim=-1)  # pyright: ignore[reportArgumentType]


def top_p(scores_V: Tensor, share: float) -> Tensor:
    """The scores [V] of the smallest set of the likeliest tokens that has at least this share of the probability; -inf
    elsewhere.

    Same as transformers' TopPLogitsWarper, except that among equally likely tokens those of smaller ids are dropped
    first: in transformers this depends on the processor, whose instruction set affects torch's sort.
    """
    order_V = scores_V.sort(stable=True).indices
    is_dropped_V = torch.softmax(scores_V[order_V], dim=-1).cumsum(0) <= 1 - share
    is_dropped_V[-1] = False
    return scores_V.index_fill(0, order_V[is_dropped_V], -torch.inf)


def draw(scores_V: Tensor, sampling: SamplingParams, uniform: float) -> int:
    """The token whose interval of the cumulative probabilities, in the order of ids, contains `uniform` in [0, 1)."""
    probabilities_V = distribution(scores_V, sampling)
    cumulative_V = probabilities_V.cumsum(0)
    chosen = int(torch.searchsorted(cumulative_V, uniform * float(cumulative_V[-1]), right=True))
    return min(chosen, int(probabilities_V.nonzero()[-1]))
