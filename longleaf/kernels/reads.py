"""Local attention kernels: queries over one rank's keys, as a list of reads, to one partial.

`kernel_for` gives the one of a device type. A kernel receives queries `q_THD`, the layer's pool `k_KSD`, `v_KSV` (K key
heads, S slots, D dim, V value dim; T rows, H = K * G query heads, G queries per key head), the reads, the scale and the
soft cap, and returns a float32 Partial of V columns with natural-log lse. With a cap, scores s become
cap * tanh(s / cap), as in Gemma 2 (arXiv 2408.00118). The grouped queries of a key head are packed into the query axis:
keys are never repeated. Values may lie in the keys (`lies_in`).

What is not finite shows, however it is masked or weighed: a row that is NaN or infinite, or reads a key or a value that
is, gets NaN (of a value, perhaps infinity). So may rows of the same read that do not see that key.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Protocol

import torch
from torch import Tensor

from longleaf.attention.masks import Read, band, cut, hidden
from longleaf.attention.partial import Partial, merge
from longleaf.kernels.cpu.decode import NativeDecode

ReadKernel = Callable[[Tensor, Tensor, Tensor, Read, float, float | None], tuple[Tensor, Tensor]]

EMPTY_LSE = -1e30
"""A logsumexp below this comes from a row that saw masked keys only."""
TILE_KEYS = 1024
TILE_SCORES = 1 << 22
"""Scores that the dense kernel writes out at once: 16 MiB."""
WIDE_BYTES = 16 << 20
"""Keys and values of 16 bits that are brought to float32 at once."""
MAX_MASKS = 48
"""Masks that are kept, for the other layers and the steps that follow: each is half a MiB at most."""


class Kernel(Protocol):
    """The local attention of a device."""

    def __call__(
        self,
        q_THD: Tensor,
        k_KSD: Tensor,
        v_KSV: Tensor,
        reads: Sequence[Read],
        scale: float,
        softcap: float | None = None,
        /,
    ) -> Partial: ...


def attend(
    q_THD: Tensor,
    k_KSD: Tensor,
    v_KSV: Tensor,
    reads: Sequence[Read],
    scale: float,
    kernel: ReadKernel,
    softcap: float | None = None,
) -> Partial:
    """Runs `kernel` on each read and merges the results row by row. Rows without a read give the identity."""
    check_shapes(q_THD, k_KSD, v_KSV)
    (num_rows, num_heads, dim), num_kv_heads, value_dim = q_THD.shape, k_KSD.shape[0], v_KSV.shape[2]
    group = num_heads // num_kv_heads
    q_KTGD = q_THD.float().view(num_rows, num_kv_heads, group, dim).transpose(0, 1).contiguous()
    # heads of one key head lie together, so a merge over [K, T, G] is one over [tokens, heads] with other names
    total = None
    for read in reads:
        if read.row_start >= read.row_end or read.slot_start >= read.slot_end:
            continue  # torch's kernel divides by the number of keys: an empty call ends the process
        keys, values = (t[:, read.slot_start : read.slot_end] for t in (k_KSD, v_KSV))
        part = Partial(*kernel(q_KTGD[:, read.row_start : read.row_end], keys, values, read, scale, softcap))
        total = _add(total, part, read, num_rows)
    if total is None:
        return Partial.identity(num_rows, num_heads, value_dim, device=str(q_THD.device))
    out_THD = total.out_THD.transpose(0, 1).reshape(num_rows, num_heads, value_dim)
    return Partial(out_THD, total.lse_TH.transpose(0, 1).reshape(num_rows, num_heads))


def check_shapes(q_THD: Tensor, k_KSD: Tensor, v_KSV: Tensor) -> None:
    """Raises ValueError: kernels read wherever the sizes tell them to."""
    (_, num_heads, dim), num_kv_heads = q_THD.shape, k_KSD.shape[0]
    if num_heads % num_kv_heads or k_KSD.shape[2] != dim or v_KSV.shape[:2] != k_KSD.shape[:2]:
        q, k, v = (tuple(t.shape) for t in (q_THD, k_KSD, v_KSV))
        raise ValueError(f"queries {q}, keys {k} and values {v} do not fit")


def lies_in(v_KSV: Tensor, k_KSD: Tensor) -> bool:
    """Whether the values are the first dims of the keys, in the same memory, as in latent attention."""
    is_narrower = v_KSV.shape[2] < k_KSD.shape[2] and v_KSV.shape[:2] == k_KSD.shape[:2]
    return is_narrower and v_KSV.data_ptr() == k_KSD.data_ptr() and v_KSV.stride() == k_KSD.stride()


def _add(total: Partial | None, part: Partial, read: Read, num_rows: int) -> Partial:
    """Joins the partial of a read's rows, [K, rows, G], into that of all rows, [K, T, G]."""
    is_whole = read.row_end - read.row_start == num_rows
    if is_whole:
        return part if total is None else merge(total, part)
    if total is None:
        kv_heads, _, group, dim = part.out_THD.shape
        out = part.out_THD.new_zeros(kv_heads, num_rows, group, dim)
        total = Partial(out, out.new_full((kv_heads, num_rows, group), float("-inf")))
    rows = slice(read.row_start, read.row_end)
    joined = merge(Partial(total.out_THD[:, rows], total.lse_TH[:, rows]), part)
    total.out_THD[:, rows] = joined.out_THD
    total.lse_TH[:, rows] = joined.lse_TH
    return total


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
    """One read on torch's own CPU flash kernel, which returns (out, lse) but knows neither a cap nor a value dim: reads
    with those are for `dense`.

    It answers in the type of the queries, which would round partials before they are merged: so keys and values are
    brought to float32. Full reads pack the group into the query axis, so that keys are read once for all heads of a
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
        return _betray(q_KTGD, k_KSD, out, lse)
    q_GKTD = q_KTGD.permute(2, 0, 1, 3)
    k_GKSD, v_GKSD = (t[None].expand(group, -1, -1, -1) for t in (k_KSD, v_KSV))
    if read.is_causal:
        out, lse = flash(q_GKTD, k_GKSD, v_GKSD, is_causal=True, scale=scale)
    else:
        mask = mask_of(num_rows, k_KSD.shape[1], read.offset, read.window)
        out, lse = flash(q_GKTD, k_GKSD, v_GKSD, attn_mask=mask, scale=scale)
    return _betray(q_KTGD, k_KSD, *_sanitise(out.permute(1, 2, 0, 3), lse.permute(1, 2, 0)))


def _betray(q_KTGD: Tensor, k_KSD: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Makes NaN of what comes of queries and keys that are not finite. Torch's kernel gives weight 0 to a key of score
    -inf, and out 0 to a row of which all scores are NaN, if they are fewer than its vectors have lanes."""
    is_sound = _is_finite(q_KTGD, (3,)) & _is_finite(k_KSD, (1, 2))[:, None, None]
    if is_sound.all():
        return out, lse
    return out.masked_fill(~is_sound.unsqueeze(-1), math.nan), lse.masked_fill(~is_sound, math.nan)


def _is_finite(numbers: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Whether all numbers along some dims are finite; no number is written out for it."""
    return numbers.amax(dims).isfinite() & numbers.amin(dims).isfinite()


def dense(
    q_KTGD: Tensor, k_KSD: Tensor, v_KSV: Tensor, read: Read, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """One read with the scores written out, float32, on any device: correct everywhere, fast nowhere.

    Written out tile by tile, so that memory grows neither with the rows nor with the keys.
    """
    (kv_heads, num_rows, group, _), (_, num_keys, value_dim) = q_KTGD.shape, v_KSV.shape
    height = max(1, TILE_SCORES // (kv_heads * group * min(num_keys, TILE_KEYS)))
    out = q_KTGD.new_zeros(kv_heads, num_rows, group, value_dim)
    lse = out.new_full((kv_heads, num_rows, group), float("-inf"))
    for first in range(0, num_rows, height):
        rows = slice(first, min(first + height, num_rows))
        low, high = _seen(read, rows, num_keys)
        for start in range(low, high, TILE_KEYS):
            keys = slice(start, min(start + TILE_KEYS, high))
            part = _dense_tile(q_KTGD[:, rows], k_KSD[:, keys], v_KSV[:, keys], _tile(read, rows, keys), scale, softcap)
            joined = merge(Partial(out[:, rows], lse[:, rows]), part)
            out[:, rows], lse[:, rows] = joined.out_THD, joined.lse_TH
    return out, lse


def _seen(read: Read, rows: slice, num_keys: int) -> tuple[int, int]:
    """Range of the keys of a read that any of some rows sees."""
    if read.offset is None:
        return 0, num_keys
    low = 0 if read.window is None else max(0, read.offset + rows.start - read.window + 1)
    return low, min(num_keys, read.offset + rows.stop)


def _tile(read: Read, rows: slice, keys: slice) -> Read:
    """The part of a read that some of its rows and keys make up."""
    offset = None if read.offset is None else read.offset + rows.start - keys.start
    return Read(rows.start, rows.stop, keys.start, keys.stop, offset, read.window)


def _dense_tile(
    q_KTGD: Tensor, k_KSD: Tensor, v_KSV: Tensor, read: Read, scale: float, softcap: float | None
) -> Partial:
    scores = torch.einsum("ktgd,ksd->ktgs", q_KTGD, k_KSD.float()) * scale
    witness = scores.sum(dim=-1)  # no finite number if one of the scores is none: -inf alone would be a weight of 0
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if read.offset is not None:
        hidden_QS = hidden(q_KTGD.shape[1], k_KSD.shape[1], read.offset, read.window, str(scores.device))
        scores.masked_fill_(hidden_QS[None, :, None, :], torch.finfo(torch.float32).min)
    lse = torch.logsumexp(scores, dim=-1) + (witness - witness)
    out = torch.einsum("ktgs,ksv->ktgv", scores.sub_(lse[..., None]).exp_(), v_KSV.float())
    return Partial(*_sanitise(out, lse))


def _sanitise(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Turns rows that saw nothing into the identity, whatever the kernel made of them."""
    is_empty = lse < EMPTY_LSE
    return out.masked_fill(is_empty.unsqueeze(-1), 0.0), lse.masked_fill(is_empty, float("-inf"))


class CpuKernel:
    """The kernel of CPU ranks: a compiled one for few rows, torch's flash kernel for everything else.

    Both are made for values as wide as keys. For values that lie in the keys they take the whole keys: with a latent of
    512 and a rotary key of 64 that is an eighth more work on values, and less time than `dense` needs.
    """

    def __init__(self, native: NativeDecode | None) -> None:
        self._native = native
        self._flash = partial(cpu_flash, mask_of=lru_cache(MAX_MASKS)(band))

    def __call__(
        self,
        q_THD: Tensor,
        k_KSD: Tensor,
        v_KSV: Tensor,
        reads: Sequence[Read],
        scale: float,
        softcap: float | None = None,
        /,
    ) -> Partial:
        if lies_in(v_KSV, k_KSD):
            whole = self(q_THD, k_KSD, k_KSD, reads, scale, softcap)
            return Partial(whole.out_THD[..., : v_KSV.shape[2]], whole.lse_TH)
        if self._native is not None and self._native.can_run(q_THD, k_KSD, v_KSV):
            check_shapes(q_THD, k_KSD, v_KSV)
            return self._native(q_THD, k_KSD, v_KSV, reads, scale, softcap)
        if softcap is not None or v_KSV.shape != k_KSD.shape:
            return attend(q_THD, k_KSD, v_KSV, reads, scale, dense, softcap)
        return attend(q_THD, k_KSD, v_KSV, self._cut(reads, k_KSD), scale, self._flash)

    @staticmethod
    def _cut(reads: Sequence[Read], k_KSD: Tensor) -> list[Read]:
        """The reads in parts whose masks are small, and of whose keys no more than WIDE_BYTES are to be made."""
        is_wide = k_KSD.dtype == torch.float32
        num_bytes = 2 * k_KSD.shape[0] * k_KSD.shape[2] * torch.float32.itemsize
        most_keys = max(1, k_KSD.shape[1] if is_wide else WIDE_BYTES // num_bytes)
        return [part for read in reads for part in cut(read, most_keys)]


def kernel_for(device_type: str) -> Kernel:
    """The kernel of a device type (`cpu`, `cuda`). On CPUs the decode kernel is compiled at the first start."""
    if device_type == "cpu":
        return CpuKernel(NativeDecode.load())
    return by_reads(dense)


def by_reads(read_kernel: ReadKernel) -> Kernel:
    """The kernel that runs `read_kernel` on each read."""

    def kernel(
        q_THD: Tensor, k_KSD: Tensor, v_KSV: Tensor, reads: Sequence[Read], scale: float, softcap: float | None = None
    ) -> Partial:
        return attend(q_THD, k_KSD, v_KSV, reads, scale, read_kernel, softcap)

    return kernel
