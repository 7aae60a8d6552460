"""Reference kernels for any device, in torch operations."""

from collections.abc import Sequence

import torch
from torch import Tensor

from longleaf.attention.masks import Read, hidden
from longleaf.attention.packed import pack, unpack
from longleaf.attention.partial import Partial, merge, merge_all
from longleaf.kernels import int8
from longleaf.kernels.backend import Int8Layer
from longleaf.kernels.reads import attend, sanitise

TILE_KEYS = 1024
TILE_SCORES = 1 << 22
"""Scores computed at once: 16 MiB."""


class DenseBackend:
    """A correct but slow backend for all devices, and the fallback of other backends for missing kernels.

    Only quantization to 8 bits reads device memory, because the host decides which blocks need a larger exponent.
    """

    name = "dense"
    pack = staticmethod(pack)

    def attend(
        self,
        q_THD: Tensor,
        k_KSD: Tensor,
        v_KSV: Tensor,
        reads: Sequence[Read],
        scale: float,
        softcap: float | None = None,
    ) -> Partial:
        return attend(q_THD, k_KSD, v_KSV, reads, scale, dense, softcap)

    def attend_int8(
        self, q_THD: Tensor, layer: Int8Layer, reads: Sequence[Read], scale: float, softcap: float | None = None
    ) -> Partial:
        """Converts keys and values to float32 tile by tile, for `attend`."""
        total = Partial.identity(*q_THD.shape, device=str(q_THD.device))
        for read in int8.tiles(reads):
            rows = slice(read.row_start, read.row_end)
            slots = torch.arange(read.slot_start, read.slot_end, device=q_THD.device)
            keys, values = int8.read(layer, slots, torch.float32)
            local = read._replace(row_start=0, row_end=rows.stop - rows.start, slot_start=0, slot_end=keys.shape[1])
            part = self.attend(q_THD[rows], keys, values, [local], scale, softcap)
            joined = merge(total.rows(rows.start, rows.stop), part)
            total.out_THD[rows], total.lse_TH[rows] = joined.out_THD, joined.lse_TH
        return total

    def store(self, pool: Sequence[Tensor], slots_T: Tensor, tokens: Sequence[Tensor]) -> None:
        for pool_KSD, tokens_KTD in zip(pool, tokens, strict=False):
            pool_KSD.index_copy_(1, slots_T, tokens_KTD)

    def store_int8(self, layer: Int8Layer, slots_T: Tensor, k_KTD: Tensor, v_KTD: Tensor) -> None:
        int8.write(layer, slots_T, k_KTD, v_KTD)

    def fold(self, packed_NTHC: Tensor) -> Partial:
        stacked = unpack(packed_NTHC)
        return merge_all(stacked.out_THD, stacked.lse_TH)


def dense(
    q_KTGD: Tensor, k_KSD: Tensor, v_KSV: Tensor, read: Read, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """One read with explicit scores, float32, on any device.

    Computed tile by tile, so memory is independent of the number of rows and keys.
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
    """Range of the keys of a read that any of the rows sees."""
    if read.offset is None:
        return 0, num_keys
    low = 0 if read.window is None else max(0, read.offset + rows.start - read.window + 1)
    return low, min(num_keys, read.offset + rows.stop)


def _tile(read: Read, rows: slice, keys: slice) -> Read:
    """The part of a read for a range of rows and keys."""
    offset = None if read.offset is None else read.offset + rows.start - keys.start
    return Read(rows.start, rows.stop, keys.start, keys.stop, offset, read.window)


def _dense_tile(
    q_KTGD: Tensor, k_KSD: Tensor, v_KSV: Tensor, read: Read, scale: float, softcap: float | None
) -> Partial:
    scores = torch.einsum("ktgd,ksd->ktgs", q_KTGD, k_KSD.float()) * scale
    score_sum = scores.sum(dim=-1)  # not finite if any score is not: a score of -inf would otherwise only get weight 0
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if read.offset is not None:
        hidden_QS = hidden(q_KTGD.shape[1], k_KSD.shape[1], read.offset, read.window, str(scores.device))
        scores.masked_fill_(hidden_QS[None, :, None, :], torch.finfo(torch.float32).min)
    lse = torch.logsumexp(scores, dim=-1) + (score_sum - score_sum)
    out = torch.einsum("ktgs,ksv->ktgv", scores.sub_(lse[..., None]).exp_(), v_KSV.float())
    return Partial(*sanitise(out, lse))
