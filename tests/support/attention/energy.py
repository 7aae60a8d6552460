"""The energy whose gradient is attention: F(zeta) = log sum_a exp(q . k_a + zeta . v_a).

Source: Tree Attention (arXiv 2408.04093, section 4). dF/dzeta at zeta = 0 is the attention output, and F(0) is its
logsumexp. Differentiated by autograd, so it shares no code with the kernels and serves as a test oracle.

Shape letters: T queries, H = K * G query heads, K key heads, G queries per key head, S keys, D dim. Keys and values may
differ in dim.
"""

import torch
from torch import Tensor

from longleaf.attention.partial import Partial


def energy(q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, mask_TS: Tensor, zeta_THD: Tensor, scale: float) -> Tensor:
    """F of every query and head [T, H], natural log; -inf for a query that sees no key.

    `mask_TS` is boolean, True where the query sees the key; `zeta_THD` is the source, in the space of the values.
    """
    num_kv_heads = k_SKD.shape[1]
    group = q_THD.shape[1] // num_kv_heads
    q_TKGD, zeta_TKGD = (t.reshape(len(t), num_kv_heads, group, t.shape[2]) for t in (q_THD, zeta_THD))
    exponent_STKG = torch.einsum("tkgd,skd->stkg", q_TKGD, k_SKD) * scale
    exponent_STKG = exponent_STKG + torch.einsum("tkgd,skd->stkg", zeta_TKGD, v_SKD)
    hidden_STKG = ~mask_TS.T[:, :, None, None]
    return torch.logsumexp(exponent_STKG.masked_fill(hidden_STKG, float("-inf")), dim=0).flatten(1)


def attend(q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, mask_TS: Tensor, scale: float) -> Partial:
    """Attention of T queries over S keys as the gradient of the energy, in float64.

    A query that sees no key gives the identity.
    """
    q, k, v = q_THD.double(), k_SKD.double(), v_SKD.double()
    zeta = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64, requires_grad=True)
    energy_TH = energy(q, k, v, mask_TS, zeta, scale)
    # one scalar sums all queries and heads, because each zeta affects only its own term
    (out_THD,) = torch.autograd.grad(energy_TH.sum(), zeta)
    is_blind_T = ~mask_TS.any(dim=1)  # its energy is -inf for any zeta, for which autograd returns NaN
    return Partial(out_THD.masked_fill(is_blind_T[:, None, None], 0.0), energy_TH.detach())
