"""A reference for flash kernels over sequences of several lengths: the same results on any device, without a kernel."""

import torch

from longleaf.kernels.gpu.varlen import TYPES, FlashSource, Launch


class PretendedFlash:
    """Follows the rules of flash-attn 2 in `longleaf.kernels.gpu.varlen`, including its refusals, and records its
    launches. Rows that belong to no sequence are not written: they are NaN."""

    def __init__(self):
        self.launches: list[Launch] = []

    @property
    def source(self):
        return FlashSource(self)

    @property
    def regular_source(self):
        """The same as kernels for which shapes must be regular."""
        return FlashSource(self, 128, needs_regular_shapes=True)

    def __call__(self, q_THD, k_SKD, v_SKD, launch, scale):
        check(q_THD, k_SKD, v_SKD, launch)
        self.launches.append(launch)
        out = torch.empty_like(q_THD).fill_(torch.nan)
        lse = torch.full((q_THD.shape[1], q_THD.shape[0]), torch.nan)
        bounds, starts, lengths = (tensor.tolist() for tensor in launch[:3])
        for i, length in enumerate(lengths):
            rows = slice(bounds[i], min(bounds[i + 1], bounds[i] + launch.max_rows))  # so large is the grid
            keys = slice(starts[i], starts[i] + length)
            out[rows], lse[:, rows] = attended(q_THD[rows], k_SKD[keys], v_SKD[keys], scale, launch.is_causal)
        return out, lse


def check(q_THD, k_SKD, v_SKD, launch):
    dim, num_sequences = q_THD.shape[2], len(launch.lengths)
    assert q_THD.dtype in TYPES
    assert q_THD.dtype == k_SKD.dtype == v_SKD.dtype
    assert dim % 8 == 0
    assert dim <= 256
    assert v_SKD.shape == k_SKD.shape
    assert q_THD.shape[1] % k_SKD.shape[1] == 0
    for tensor in (q_THD, k_SKD, v_SKD):
        assert tensor.stride(2) == 1
        assert tensor.data_ptr() % 16 == 0
        assert all(stride % 8 == 0 for stride in tensor.stride()[:2])
    for tensor, size in zip(launch[:3], (num_sequences + 1, num_sequences + 1, num_sequences), strict=True):
        assert tensor.shape == (size,)
        assert tensor.is_contiguous()
        assert (tensor.dtype, tensor.device) == (torch.int32, q_THD.device)
    assert launch.bounds[0] == 0
    assert launch.bounds[-1] == len(q_THD)
    assert (launch.bounds.diff() > 0).all()
    assert launch.lengths.max() <= launch.max_keys
    assert (launch.starts[:-1] + launch.lengths <= len(k_SKD)).all()


def attended(q_RHD, k_SKD, v_SKD, scale, is_causal):
    """Output and lse [H, R] of a sequence: a key of score -inf has no weight; the lse of an empty or NaN row is
    +inf."""
    (num_rows, num_heads, _), num_keys = q_RHD.shape, len(k_SKD)
    if not num_keys:
        return torch.zeros_like(q_RHD), torch.full((num_heads, num_rows), torch.inf)
    group = num_heads // k_SKD.shape[1]
    k_SHD, v_SHD = (tensor.float().repeat_interleave(group, 1) for tensor in (k_SKD, v_SKD))
    scores_HRS = torch.einsum("rhd,shd->hrs", q_RHD.float(), k_SHD) * scale
    if is_causal:
        seen_RS = torch.ones(num_rows, num_keys, dtype=torch.bool).tril_(num_keys - num_rows)
        scores_HRS.masked_fill_(~seen_RS, -torch.inf)
    peak_HR1 = scores_HRS.nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf).amax(dim=2, keepdim=True)
    weights_HRS = (scores_HRS - peak_HR1.masked_fill(peak_HR1 == -torch.inf, 0.0)).exp()
    mass_HR = weights_HRS.sum(dim=2)
    is_lost_HR = (mass_HR == 0) | mass_HR.isnan()
    out_RHD = torch.einsum("hrs,shd->rhd", weights_HRS.to(q_RHD.dtype).float(), v_SHD)
    out_RHD = out_RHD / mass_HR.masked_fill(is_lost_HR, 1.0).T.unsqueeze(-1)
    lse_HR = (peak_HR1.squeeze(2) + mass_HR.log()).masked_fill(is_lost_HR, torch.inf)
    return out_RHD.to(q_RHD.dtype), lse_HR
