"""Natural-log probabilities of tokens, from the unmodified logits of the model."""

from collections.abc import Sequence

import torch
from torch import Tensor

from longleaf.sampling import Logprobs, TokenLogprob
from workers.host_copies import numbers_on
from workers.sampling import draws

MAX_LOGITS = 1 << 22
"""Logits that are processed together, unless a single row has more."""


def logprobs(logits_RV: Tensor, token_ids: Sequence[int], num_top: int) -> list[Logprobs]:
    """The natural-log probabilities of each row's token, from the logits [V], and of the `num_top` likeliest tokens."""
    ids_RN, logprobs_RN = top_logprobs(logits_RV, torch.tensor(token_ids, device=logits_RV.device)[:, None], num_top)
    return list(map(to_messages, ids_RN.tolist(), logprobs_RN.tolist()))


def to_messages(ids_N: Sequence[int], logprobs_N: Sequence[float]) -> Logprobs:
    """The reported logprobs of a token: the first value is its own, the others are those of the likeliest tokens
    `ids_N`.
    """
    first, *values = logprobs_N
    return Logprobs(first, tuple(map(TokenLogprob, ids_N, values)))


def top_logprobs(logits_RV: Tensor, chosen_R1: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """The ids [R, N] of the `num_top` likeliest tokens of each row, or of all V, by the logits [V]; and the natural-log
    probabilities [R, 1 + N], float64, of the chosen token and the likeliest ones.
    """
    logits_RV = logits_RV.double()
    # the logprob of the likeliest token, which is minus the logarithm of the sum: faster in torch than log_softmax
    logprob_R1 = torch.softmax(logits_RV, dim=-1).amax(dim=-1, keepdim=True).log()
    ids_RN = draws.highest(logits_RV, min(num_top, logits_RV.shape[-1]))[1]
    below_RN = logits_RV.gather(1, torch.cat((chosen_R1, ids_RN), dim=1)) - logits_RV.amax(dim=-1, keepdim=True)
    return ids_RN, below_RN + logprob_R1


def logprobs_of(logits_SV: Tensor, token_ids: Sequence[int]) -> Tensor:
    """The natural-log probability of one token per row, [S], float32; NaN where a logit is NaN."""
    ids_S1 = numbers_on(str(logits_SV.device), token_ids)[:, None]
    step = max(1, MAX_LOGITS // logits_SV.shape[-1])
    parts = zip(logits_SV.split(step), ids_S1.split(step), strict=True)
    return torch.cat([torch.log_softmax(rows_RV.float(), dim=-1).gather(1, ids_R1)[:, 0] for rows_RV, ids_R1 in parts])
