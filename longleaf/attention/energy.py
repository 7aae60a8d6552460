"""The energy whose gradient is attention: F(zeta) = log sum_a exp(q . k_a + zeta . v_a).

Source: Tree Attention (arXiv 2408.04093, section 4). dF/dzeta at zeta = 0 is the attention output, and F(0) is its
logsumexp. Differentiated by autograd, so it shares no code with the kernels and serves the tests as an oracle.
"""

import torch
from torch import Tensor

from longleaf.attention.partial import Partial


def energy(q_HD: Tensor, k_SHD: Tensor, v_SHD: Tensor, zeta_HD: Tensor, scale: float) -> Tensor:
    """F per head [H], natural log, for one query over S >= 1 keys; one key head per query head."""
    scores_SH = torch.einsum("hd,shd->sh", q_HD, k_SHD) * scale + torch.einsum("hd,shd->sh", zeta_HD, v_SHD)
    return torch.logsumexp(scores_SH, dim=0)


def attend(q_HD: Tensor, k_SHD: Tensor, v_SHD: Tensor, scale: float) -> Partial:
    """Attention of one query as the gradient of the energy, in float64: out [1, H, D], lse [1, H]."""
    q, k, v = q_HD.double(), k_SHD.double(), v_SHD.double()
    zeta = torch.zeros(v.shape[1:], dtype=torch.float64, requires_grad=True)
    energy_H = energy(q, k, v, zeta, scale)
    (out_HD,) = torch.autograd.grad(energy_H.sum(), zeta)
    return Partial(out_HD[None], energy_H.detach()[None])
