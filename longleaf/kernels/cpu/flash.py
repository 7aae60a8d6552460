"""Torch's CPU flash kernel: for many rows, and for all rows if no compiler is available."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from longleaf.attention.masks import Read, band, cut
from longleaf.attention.partial import Partial
from longleaf.kernels.backend import lies_in
from longleaf.kernels.dense import DenseBackend
from longleaf.kernels.reads import attend, sanitise

WIDE_BYTES = 16 << 20
"""Limit of 16-bit keys and values that are converted to float32 at once."""
MAX_MASKS = 48
"""Masks that are cached for other layers and later steps, each of at most half a MiB."""


class TorchFlashBackend(DenseBackend):
    """Torch's flash kernel, with `dense` for soft caps and for separately stored values of another dim.

    The kernel requires values as wide as keys. For values that are part of the keys, the whole keys are passed as
    values: with a latent of 512 and a rotary key of 64 that is one eighth more work on values, and faster than `dense`.
    """

    name = "torch"

    def __init__(self) -> None:
        self._flash = partial(cpu_flash, mask_of=lru_cache(MAX_MASKS)(band))

    def attend(
        self,
        q_THD: Tensor,
        k_KSD: Tensor,
        v_KSV: Tensor,
        reads: Sequence[Read],
        scale: float,
        softcap: float | None = None,
    ) -> Partial:
        if lies_in(v_KSV, k_KSD):
            whole = self.attend(q_THD, k_KSD, k_KSD, reads, scale, softcap)
            return Partial(whole.out_THD[..., : v_KSV.shape[2]], whole.lse_TH)
        if softcap is not None or v_KSV.shape != k_KSD.shape:
            return super().attend(q_THD, k_KSD, v_KSV, reads, scale, softcap)
        return attend(q_THD, k_KSD, v_KSV, self._cut(reads, k_KSD), scale, self._flash)

    @staticmethod
    def _cut(reads: Sequence[Read], k_KSD: Tensor) -> list[Read]:
        """Splits reads into parts with small masks and at most WIDE_BYTES of converted keys."""
        is_wide = k_KSD.dtype == torch.float32
        num_bytes = 2 * k_KSD.shape[0] * k_KSD.shape[2] * torch.float32.itemsize
        most_keys = max(1, k_KSD.shape[1] if is_wide else WIDE_BYTES // num_bytes)
        return [part for read in reads for part in cut(read, most_keys)]


def cpu_flash(
    q_KTGD: Tensor,
    k_KSD: Tensor,
    v_KSV: Tensor,
    read: Read,
    scale: float,
    softcap: float | None = None,  # noqa: ARG001 as every kernel of a read
    *,
    mask_of: Callable[[int, int, int, int | None], Tensor] = band,
) -> tuple[Tensor, Tensor]:
    """One read on torch's CPU flash kernel, which returns (out, lse) but supports neither a soft cap nor another value
    dim; such reads need `dense`.

    The kernel returns the type of the queries, which would round partials before merging, so keys and values are
    converted to float32. Full reads pack the group into the query axis, so that keys are read once for all heads of a
    group. Masked reads put the group into the batch with keys expanded by stride, because the kernel's causal flag
    needs square shapes.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    kv_heads, num_rows, group, dim = q_KTGD.shape
    k_KSD, v_KSV = k_KSD.float(), v_KSV.float()
    if read.offset is None:
        packed = q_KTGD.reshape(1, kv_heads, num_rows * group, dim)
        out, lse = flash(packed, k_KSD[None], v_KSV[None], scale=scale)
        out, lse = out.view(kv_heads, num_rows, group, dim), lse.view(kv_heads, num_rows, group)
        return _propagate_nonfinite(q_KTGD, k_KSD, out, lse)
    q_GKTD = q_KTGD.permute(2, 0, 1, 3)
    k_GKSD, v_GKSD = (t[None].expand(group, -1, -1, -1) for t in (k_KSD, v_KSV))
    if read.is_causal:
        out, lse = flash(q_GKTD, k_GKSD, v_GKSD, is_causal=True, scale=scale)
    else:
        mask = mask_of(num_rows, k_KSD.shape[1], read.offset, read.window)
        out, lse = flash(q_GKTD, k_GKSD, v_GKSD, attn_mask=mask, scale=scale)
    return _propagate_nonfinite(q_KTGD, k_KSD, *sanitise(out.permute(1, 2, 0, 3), lse.permute(1, 2, 0)))


def _propagate_nonfinite(q_KTGD: Tensor, k_KSD: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Propagates non-finite queries and keys as NaN. Torch's kernel gives weight 0 to a key of score -inf, and out 0 to
    a row whose scores are all NaN, if they are fewer than its vector lanes."""
    is_sound = _is_finite(q_KTGD, (3,)) & _is_finite(k_KSD, (1, 2))[:, None, None]
    if is_sound.all():
        return out, lse
    return out.masked_fill(~is_sound.unsqueeze(-1), math.nan), lse.masked_fill(~is_sound, math.nan)


def _is_finite(numbers: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Whether all numbers along some dims are finite, without a temporary tensor."""
    return numbers.amax(dims).isfinite() & numbers.amin(dims).isfinite()
