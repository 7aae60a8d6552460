"""Attention in float64 with a dense mask: slow, plain, and the oracle of every kernel."""

import torch
from torch import Tensor

from longleaf.attention.partial import Partial


def attend(q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, mask_TS: Tensor, scale: float) -> Partial:
    """Attention of T queries over S keys with K key heads (K divides H), computed in float64.

    `mask_TS` is boolean, True where the query sees the key. A query that sees nothing gives the identity.
    """
    group = q_THD.shape[1] // k_SKD.shape[1]
    q, k, v = (t.double() for t in (q_THD, k_SKD.repeat_interleave(group, 1), v_SKD.repeat_interleave(group, 1)))
    scores_THS = torch.einsum("thd,shd->ths", q, k) * scale
    scores_THS = scores_THS.masked_fill(~mask_TS[:, None, :], float("-inf"))
    if k.shape[0] == 0:
        return Partial.identity(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    lse_TH = torch.logsumexp(scores_THS, dim=-1)
    shift_TH = lse_TH.masked_fill(lse_TH == float("-inf"), 0.0)
    weight_THS = torch.exp(scores_THS - shift_TH[..., None])
    return Partial(torch.einsum("ths,shd->thd", weight_THS, v), lse_TH)
