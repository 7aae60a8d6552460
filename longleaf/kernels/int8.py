"""Keys and values of a layer in 8 bits, and attention over them.

Keys have a scale per channel and block of slots, since a few channels are far larger than the others and stay so from
token to token; values have one per token. A block fills token by token, so its scales may grow: they are powers of two
and keys are rounded down, and then to round what was rounded before is the same as to round once. What a block holds
depends on the tokens in it alone, not on the order or the company in which they came. A key n of a channel with the
exponent e stands for (n + 1/2) 2^e, the middle of what is rounded to it, so it is off by at most 2^(e - 1); bfloat16
holds it exactly. A value n of a token with the scale s stands for n s, and is off by at most s / 2. 8 bits cannot say
that a key or a value is no finite number, so the scale does: the token's values are then NaN to whoever sees them.

Shape letters: K key heads, S slots, B blocks, D dim, T tokens, U blocks that are written to, G those that must grow.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longleaf.attention.masks import Read
from longleaf.attention.partial import Partial, merge
from longleaf.kernels.cpu.decode import NativeDecode
from longleaf.kernels.reads import Kernel

LOWEST, HIGHEST = -120, 120
"""Exponents: 2^e is a normal float32."""
BITS = 7
TILE_KEYS = 8192
"""Keys that are brought to float32 at once."""


class QuantizedLayer:
    """Keys and values of one layer. `slots` at the multiples of `block_size` begin a block anew when they are written.

    `keys_KSD` and `values_KSD` int8, `exponents_KBD` int8, `scales_KS` float32.
    """

    def __init__(
        self,
        num_kv_heads: int,
        num_blocks: int,
        block_size: int,
        dim: int,
        device: str = "cpu",
        native: NativeDecode | None = None,
    ) -> None:
        shape = (num_kv_heads, num_blocks * block_size, dim)
        self.block_size = block_size
        self.keys_KSD = torch.empty(shape, dtype=torch.int8, device=device)
        self.values_KSD = torch.empty(shape, dtype=torch.int8, device=device)
        self.exponents_KBD = torch.empty(num_kv_heads, num_blocks, dim, dtype=torch.int8, device=device)
        self.scales_KS = torch.empty(shape[:2], dtype=torch.float32, device=device)
        self._native = native

    @staticmethod
    def bytes_per_block(num_kv_heads: int, block_size: int, dim: int) -> int:
        """Bytes that a block takes: keys, values, exponents and scales."""
        return num_kv_heads * (block_size * (2 * dim + torch.float32.itemsize) + dim)

    def write(self, slots_T: Tensor, k_KTD: Tensor, v_KTD: Tensor) -> None:
        """Rounds the keys and values of T tokens into their slots."""
        scales_KT = (v_KTD.abs().amax(dim=-1).float() / 127).clamp(min=torch.finfo(torch.float32).tiny)
        largest_KT = k_KTD.abs().amax(dim=-1).float()
        scales_KT += largest_KT - largest_KT  # 0, unless a key is not finite: then NaN
        k_KTD = k_KTD.nan_to_num(0, posinf=0, neginf=0)
        values_KTD = (v_KTD.float() / scales_KT.unsqueeze(-1)).round_().clamp_(-127, 127).nan_to_num_(0)
        self.values_KSD.index_copy_(1, slots_T, values_KTD.to(torch.int8))
        self.scales_KS.index_copy_(1, slots_T, scales_KT)
        blocks_T = slots_T // self.block_size
        blocks_U = torch.bincount(blocks_T).nonzero().flatten()
        index_T = torch.searchsorted(blocks_U, blocks_T)
        exponents_KUD = self._grow(blocks_U, index_T, slots_T, _exponents(k_KTD))
        keys_KTD = (k_KTD * powers(-exponents_KUD)[:, index_T]).floor_().clamp_(-128, 127)
        self.keys_KSD.index_copy_(1, slots_T, keys_KTD.to(torch.int8))

    def _grow(self, blocks_U: Tensor, index_T: Tensor, slots_T: Tensor, needed_KTD: Tensor) -> Tensor:
        """Makes the exponents of some blocks large enough for their new tokens, and gives them, [K, U, D]."""
        is_new_U = torch.isin(blocks_U * self.block_size, slots_T)
        before_KUD = self.exponents_KBD[:, blocks_U].masked_fill_(is_new_U[:, None], LOWEST)
        after_KUD = before_KUD.scatter_reduce(1, index_T[:, None].expand_as(needed_KTD), needed_KTD, "amax")
        self.exponents_KBD.index_copy_(1, blocks_U, after_KUD)
        blocks_KBSD = self.keys_KSD.view(len(self.keys_KSD), -1, self.block_size, self.keys_KSD.shape[2])
        grown = ((after_KUD > before_KUD).any(dim=2).any(dim=0) & ~is_new_U).nonzero().flatten()
        # beyond 7 bits nothing but the sign is left, and to shift by the width of a number is undefined
        shifts_KGD = (after_KUD.short() - before_KUD)[:, grown].clamp_(max=BITS).to(torch.int8)
        blocks_KBSD[:, blocks_U[grown]] >>= shifts_KGD[:, :, None]
        return after_KUD

    def read(self, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of some slots, [K, T, D] each, in a floating type."""
        blocks_T = slots // self.block_size
        k_KTD = self.keys_KSD[:, slots].float().add_(0.5).mul_(powers(self.exponents_KBD[:, blocks_T]))
        v_KTD = self.values_KSD[:, slots] * self.scales_KS[:, slots, None]
        return k_KTD.to(dtype), v_KTD.to(dtype)

    def attend(
        self, kernel: Kernel, q_THD: Tensor, reads: Sequence[Read], scale: float, softcap: float | None
    ) -> Partial:
        """The partial over all reads: of few rows by the compiled kernel, else by `kernel`, which is for floating keys;
        they are brought to it tile by tile."""
        stored = (self.keys_KSD, self.values_KSD, self.exponents_KBD, self.scales_KS)
        if self._native is not None and self._native.can_run_int8(q_THD, stored):
            return self._native.over_int8(q_THD, stored, self.block_size, reads, scale, softcap)
        total = Partial.identity(*q_THD.shape, device=str(q_THD.device))
        for read in tiles(reads):
            rows = slice(read.row_start, read.row_end)
            keys, values = self.read(torch.arange(read.slot_start, read.slot_end, device=q_THD.device), torch.float32)
            local = read._replace(row_start=0, row_end=rows.stop - rows.start, slot_start=0, slot_end=keys.shape[1])
            part = kernel(q_THD[rows], keys, values, [local], scale, softcap)
            joined = merge(total.rows(rows.start, rows.stop), part)
            total.out_THD[rows], total.lse_TH[rows] = joined.out_THD, joined.lse_TH
        return total


def powers(exponents: Tensor) -> Tensor:
    """2^e in float32, to the bit."""
    return ((exponents.int() + 127) << 23).view(torch.float32)


def _exponents(k_KTD: Tensor) -> Tensor:
    """The smallest exponent at which each key fits into 8 bits."""
    exponents_KTD = torch.frexp(k_KTD.float()).exponent - BITS
    return exponents_KTD.masked_fill_(k_KTD == 0, LOWEST).clamp_(LOWEST, HIGHEST).to(torch.int8)


def tiles(reads: Sequence[Read]) -> Iterator[Read]:
    """The reads that are not empty, those that all rows see whole cut into tiles; masked ones are short."""
    for read in reads:
        if read.row_start >= read.row_end:
            continue
        step = TILE_KEYS if read.offset is None else max(1, read.slot_end - read.slot_start)
        for start in range(read.slot_start, read.slot_end, step):
            yield read._replace(slot_start=start, slot_end=min(start + step, read.slot_end))
