"""Attention in float64 with a dense mask: slow, plain, and the oracle of every kernel."""

import torch
from torch import Tensor
from torch.nn import functional as F

from longleaf.attention.partial import Partial


def attend(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    mask_TS: Tensor,
    scale: float,
    *,
    softcap: float | None = None,
    sink_H: Tensor | None = None,
) -> Partial:
    """Attention of T queries over S keys with K key heads (K divides H), computed in float64.

    `mask_TS` is boolean, True where the query sees the key. A query that sees nothing gives the identity. Scores s
    become softcap * tanh(s / softcap) before the mask. `sink_H` is one more score per head, of a key without a value.
    """
    group = q_THD.shape[1] // k_SKD.shape[1]
    q, k, v = (t.double() for t in (q_THD, k_SKD.repeat_interleave(group, 1), v_SKD.repeat_interleave(group, 1)))
    scores_THS = torch.einsum("thd,shd->ths", q, k) * scale
    if softcap is not None:
        scores_THS = softcap * torch.tanh(scores_THS / softcap)
    scores_THS = scores_THS.masked_fill(~mask_TS[:, None, :], float("-inf"))
    if sink_H is not None:
        scores_THS = torch.cat([scores_THS, sink_H.double()[None, :, None].expand(len(q), -1, 1)], dim=-1)
        v = F.pad(v, (0, 0, 0, 0, 0, 1))
    if scores_THS.shape[2] == 0:
        return Partial.identity(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    lse_TH = torch.logsumexp(scores_THS, dim=-1)
    shift_TH = lse_TH.masked_fill(lse_TH == float("-inf"), 0.0)
    weight_THS = torch.exp(scores_THS - shift_TH[..., None])
    return Partial(torch.einsum("ths,shd->thd", weight_THS, v), lse_TH)
