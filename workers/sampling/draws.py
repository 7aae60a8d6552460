"""Samples the tokens of many rows at once on a CPU, each as `distribution.py` defines it, or not at all.

Both compute in float64 from the same scores, but in a different order, so that sums differ in their last bits. That
matters if a sum is within rounding error of a limit: the top-p threshold, or the drawn number. Such a row is
left to the definition; all others get the token that the definition gives. Only the few candidate tokens at the top-p
threshold are sorted: scores are assigned to levels, and the level in which the share is reached is found from the
probability of each level.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from longleaf.sampling import SamplingParams

BLOCK = 64
LEVELS = 4096
SPAN = 40.0
"""Scores lower than the best by at least this much, e^-40 times as likely, are in the lowest level."""
EPSILON = torch.finfo(torch.float64).eps
NEAR = 16 * EPSILON
"""Relative tolerance of a share compared with the definition's."""


def draw(logits_RV: Tensor, samplings: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[int | None]:
    """The token of each row, from its logits [V], float64, after bias and penalties, and a number in [0, 1); None where
    rounding might decide, or where the probabilities are not finite. All rows have the same top-k. The logits are
    overwritten.
    """
    top_k, margin = samplings[0].top_k, rounding(logits_RV.shape[-1])
    temperatures_R1 = logits_RV.new_tensor([[sampling.temperature] for sampling in samplings])
    scores_RN, ids_RN = logits_RV, None
    if top_k:
        scores_RN, ids_RN = highest(logits_RV, min(top_k + top_k // 4 + 16, logits_RV.shape[-1]))
    if any(sampling.temperature != 1.0 for sampling in samplings):
        scores_RN /= temperatures_R1
    is_sure_R = torch.ones(len(samplings), dtype=torch.bool, device=logits_RV.device)
    if ids_RN is not None:
        is_sure_R &= cut_top_k(scores_RN, top_k, logits_RV.shape[-1])
        ids_RN, order_RN = ids_RN.sort()
        scores_RN = scores_RN.gather(1, order_RN)
    shares_RN = torch.softmax(scores_RN, dim=-1)
    is_sure_R &= shares_RN[:, 0].isfinite()  # if one is not finite, none is
    for i, sampling in enumerate(samplings):
        if sampling.top_p < 1.0 and is_sure_R[i]:
            is_sure_R[i] = cut_top_p(shares_RN[i], scores_RN[i], sampling.top_p, margin)
    if any(sampling.min_p for sampling in samplings):
        is_sure_R &= cut_min_p(shares_RN, logits_RV.new_tensor([[sampling.min_p] for sampling in samplings]))
    found_R1, is_clear_R = invert(shares_RN, logits_RV.new_tensor([[uniform] for uniform in uniforms]), margin)
    if ids_RN is not None:
        found_R1 = ids_RN.gather(1, found_R1)
    drawn = zip(found_R1[:, 0].tolist(), (is_sure_R & is_clear_R).tolist(), strict=True)
    return [token_id if is_certain else None for token_id, is_certain in drawn]


def highest(logits_RV: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The highest logits [R, N] of each row, in descending order, and their ids. Like topk, in a third of the time: the
    N blocks with the highest maxima contain all of them.
    """
    num_blocks = logits_RV.shape[-1] // BLOCK
    if num >= num_blocks:
        return logits_RV.topk(num)
    end, device = num_blocks * BLOCK, logits_RV.device
    maxima_RN = logits_RV[:, :end].unflatten(-1, (num_blocks, BLOCK)).amax(dim=-1)
    ids_RNB = BLOCK * maxima_RN.topk(num).indices[..., None] + torch.arange(BLOCK, device=device)
    rest_RN = torch.arange(end, logits_RV.shape[-1], device=device).expand(len(logits_RV), -1)
    ids_RN = torch.cat((ids_RNB.flatten(1), rest_RN), dim=1)
    found_RN, order_RN = logits_RV.gather(1, ids_RN).topk(num)
    return found_RN, ids_RN.gather(1, order_RN)


def rounding(num_tokens: int) -> float:
    """Upper bound of the difference between a sum of `num_tokens` shares and the definition's sum: shares are quotients
    of a sum, and are added up again, on both sides.
    """
    return 8 * num_tokens * EPSILON


def cut_top_k(scores_RN: Tensor, top_k: int, num_tokens: int) -> Tensor:
    """Sets the scores that top-k drops to -inf, among the N best of `num_tokens` scores in descending order. Returns,
    per row, whether the N scores include all ties with the last kept one.
    """
    last_R1 = scores_RN[:, min(top_k, num_tokens) - 1, None].clone()
    # where the last kept one is -inf, all others have a probability and are among the N
    is_sure_R = (
        (scores_RN[:, -1:] < last_R1)[:, 0] | (last_R1 == -torch.inf)[:, 0] | (scores_RN.shape[-1] == num_tokens)
    )
    scores_RN.masked_fill_(scores_RN < last_R1, -torch.inf)
    return is_sure_R


def cut_top_p(shares_V: Tensor, scores_V: Tensor, top_p: float, margin: float) -> bool:
    """Sets the shares [V] that top-p drops to zero. Whether the selection is certain.

    If few tokens are likely, the others are skipped: tokens whose V-fold share is still less than the share that must
    be dropped.
    """
    least = max((1.0 - top_p) / 2 - margin, 0.0) / len(shares_V)
    if (shares_V[::BLOCK] > least).sum() > len(shares_V) / BLOCK / 4:
        return cut_levels(shares_V, scores_V, top_p, margin)
    ids = places(shares_V, operator.gt, least)
    likely = shares_V[ids]
    is_sure = cut_levels(likely, scores_V[ids], top_p, margin)
    shares_V.zero_()[ids] = likely
    return is_sure


def cut_levels(shares_N: Tensor, scores_N: Tensor, top_p: float, margin: float) -> bool:
    """Like `cut_top_p`, for the N candidate tokens."""
    levels_N = levels(scores_N)
    reached_L = shares_N.new_zeros(LEVELS).scatter_add_(0, levels_N, shares_N).cumsum(0).numpy()
    level = min(int(np.searchsorted(reached_L, top_p)), LEVELS - 1)
    ids = places(levels_N, operator.eq, level)
    if not len(ids):  # the rounded sum of all shares is less than top-p
        return False
    order = np.argsort(scores_N[ids].numpy(), kind="stable")[::-1]  # among equal ones, larger ids first
    shares = shares_N[ids].numpy()[order]
    # and the limit before the first of them, if there is a level above
    limits = np.concatenate((reached_L[level - 1 : level], shares)).cumsum()
    reached = limits[-len(ids) :]
    num_retained = min(1 + int((reached < top_p).sum()), len(ids))
    functional.threshold(shares_N, float(shares[num_retained - 1]) * (1 - NEAR), 0.0, inplace=True)
    shares_N[ids[torch.from_numpy(order[num_retained:].copy())]] = 0.0
    difference = float(shares_N.sum()) - reached[num_retained - 1]
    return bool(abs(limits - top_p).min() > margin and abs(difference) < margin)


def levels(scores_N: Tensor) -> Tensor:
    """Assigns scores [N] to levels, the best to level 0. Equal scores get the same level; lower scores never get a
    lower number.
    """
    below_N = (scores_N.amax() - scores_N).float()
    per_score = (LEVELS - 1) / below_N.amax().clamp_(1e-30, SPAN)
    return below_N.mul_(per_score).clamp_(max=LEVELS - 1).long()


def places(values_N: Tensor, compare: Callable[[Any, float], Any], limit: float) -> Tensor:
    """The indices where a comparison is true. Numpy takes a fraction of torch's time."""
    return torch.from_numpy(np.flatnonzero(compare(values_N.numpy(), limit)))


def cut_min_p(shares_RV: Tensor, min_p_R1: Tensor) -> Tensor:
    """Sets the shares [V] that min-p drops to zero. Returns, per row, whether the selection is certain."""
    least_R1 = min_p_R1 * shares_RV.amax(dim=-1, keepdim=True)
    is_kept_RV = torch.empty_like(shares_RV)  # the same dtype makes the comparison faster in torch
    num_kept_R = torch.ge(shares_RV, least_R1 * (1 + NEAR), out=is_kept_RV).sum(dim=-1)
    is_sure_R = torch.ge(shares_RV, least_R1 * (1 - NEAR), out=is_kept_RV).sum(dim=-1) == num_kept_R
    shares_RV *= is_kept_RV
    return is_sure_R


def invert(shares_RV: Tensor, uniforms_R1: Tensor, margin: float) -> tuple[Tensor, Tensor]:
    """The token [R, 1] whose interval of the cumulative shares contains each number, and per row whether that is
    certain. The shares are overwritten.
    """
    cumulative_RV = shares_RV.cumsum_(dim=-1)
    drawn_R1 = uniforms_R1 * cumulative_RV[:, -1:]
    found_R1 = torch.searchsorted(cumulative_RV, drawn_R1, right=True).clamp_(max=shares_RV.shape[-1] - 1)
    end_R1 = cumulative_RV.gather(1, found_R1)
    begin_R1 = torch.where(found_R1 > 0, cumulative_RV.gather(1, (found_R1 - 1).clamp(min=0)), -1.0)
    return found_R1, (torch.minimum(end_R1 - drawn_R1, drawn_R1 - begin_R1) > 2 * margin)[:, 0]
