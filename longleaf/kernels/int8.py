"""Keys and values of a layer in 8 bits: the number format, and its conversions in torch operations.

Keys have a scale per channel and block of slots, since a few channels are far larger than the others and stay so from
token to token; values have one per token. A block fills token by token, so its scales may grow: they are powers of two
and keys are rounded down, so repeated rounding equals rounding once. The contents of a block depend only on its tokens,
not on the order or the batches in which they were written. A key n of a channel with the exponent e represents (n +
1/2) 2^e, the middle of its rounding interval, with an error of at most 2^(e - 1); bfloat16 represents it exactly. A
value n of a token with the scale s represents n s, with an error of at most s / 2. 8 bits cannot represent a non-finite
key or value, so the scale does: the token's values then read as NaN.

Shape letters: K key heads, S slots, B blocks, D dim, T tokens, U written blocks, G blocks whose exponents grow.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longleaf.attention.masks import Read
from longleaf.kernels.backend import Int8Layer

LOWEST, HIGHEST = -120, 120
"""Limits of exponents: 2^e is a normal float32."""
BITS = 7
TILE_KEYS = 8192
"""Keys converted to float32 at once."""


def empty(num_kv_heads: int, num_blocks: int, block_size: int, dim: int, device: str = "cpu") -> Int8Layer:
    """An empty layer."""
    num_slots = num_blocks * block_size
    keys, values = (torch.empty(num_kv_heads, num_slots, dim, dtype=torch.int8, device=device) for _ in range(2))
    exponents = torch.empty(num_kv_heads, num_blocks, dim, dtype=torch.int8, device=device)
    scales = torch.empty(num_kv_heads, num_slots, dtype=torch.float32, device=device)
    return Int8Layer(keys, values, exponents, scales, block_size)


def bytes_per_block(num_kv_heads: int, block_size: int, dim: int) -> int:
    """Bytes of a block: keys, values, exponents and scales."""
    return num_kv_heads * (block_size * (2 * dim + torch.float32.itemsize) + dim)


def write(layer: Int8Layer, slots_T: Tensor, k_KTD: Tensor, v_KTD: Tensor) -> None:
    """Quantizes the keys and values of T tokens into their slots. Slots at multiples of the block size reset their
    block."""
    scales_KT = (v_KTD.abs().amax(dim=-1).float() / 127).clamp(min=torch.finfo(torch.float32).tiny)
    largest_KT = k_KTD.abs().amax(dim=-1).float()
    scales_KT += largest_KT - largest_KT  # 0, unless a key is not finite: then NaN
    k_KTD = k_KTD.nan_to_num(0, posinf=0, neginf=0)
    values_KTD = (v_KTD.float() / scales_KT.unsqueeze(-1)).round_().clamp_(-127, 127).nan_to_num_(0)
    layer.values_KSD.index_copy_(1, slots_T, values_KTD.to(torch.int8))
    layer.scales_KS.index_copy_(1, slots_T, scales_KT)
    blocks_T = slots_T // layer.block_size
    blocks_U = torch.bincount(blocks_T).nonzero().flatten()
    index_T = torch.searchsorted(blocks_U, blocks_T)
    exponents_KUD = _grow(layer, blocks_U, index_T, slots_T, _exponents(k_KTD))
    keys_KTD = (k_KTD * powers(-exponents_KUD)[:, index_T]).floor_().clamp_(-128, 127)
    layer.keys_KSD.index_copy_(1, slots_T, keys_KTD.to(torch.int8))


def _grow(layer: Int8Layer, blocks_U: Tensor, index_T: Tensor, slots_T: Tensor, needed_KTD: Tensor) -> Tensor:
    """Raises the exponents of some blocks as needed for their new tokens, and returns them, [K, U, D]."""
    is_new_U = torch.isin(blocks_U * layer.block_size, slots_T)
    before_KUD = layer.exponents_KBD[:, blocks_U].masked_fill_(is_new_U[:, None], LOWEST)
    after_KUD = before_KUD.scatter_reduce(1, index_T[:, None].expand_as(needed_KTD), needed_KTD, "amax")
    layer.exponents_KBD.index_copy_(1, blocks_U, after_KUD)
    blocks_KBSD = layer.keys_KSD.view(len(layer.keys_KSD), -1, layer.block_size, layer.keys_KSD.shape[2])
    grown = ((after_KUD > before_KUD).any(dim=2).any(dim=0) & ~is_new_U).nonzero().flatten()
    # beyond 7 bits only the sign is left, and shifting by the width of a number is undefined
    shifts_KGD = (after_KUD.short() - before_KUD)[:, grown].clamp_(max=BITS).to(torch.int8)
    blocks_KBSD[:, blocks_U[grown]] >>= shifts_KGD[:, :, None]
    return after_KUD


def read(layer: Int8Layer, slots_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of some slots, [K, T, D] each, in a floating-point type."""
    blocks_T = slots_T // layer.block_size
    k_KTD = layer.keys_KSD[:, slots_T].float().add_(0.5).mul_(powers(layer.exponents_KBD[:, blocks_T]))
    v_KTD = layer.values_KSD[:, slots_T] * layer.scales_KS[:, slots_T, None]
    return k_KTD.to(dtype), v_KTD.to(dtype)


def keys_between(layer: Int8Layer, start: int, end: int) -> Tensor:
    """Keys [K, S, D] in slots [start, end), float32."""
    first, last = start // layer.block_size, (end - 1) // layer.block_size
    powers_KBD = powers(layer.exponents_KBD[:, first : last + 1])
    before = start - first * layer.block_size
    powers_KSD = powers_KBD.repeat_interleave(layer.block_size, dim=1)[:, before : before + end - start]
    return layer.keys_KSD[:, start:end].float().add_(0.5).mul_(powers_KSD)


def powers(exponents: Tensor) -> Tensor:
    """2^e in float32, exact."""
    return ((exponents.int() + 127) << 23).view(torch.float32)


def _exponents(k_KTD: Tensor) -> Tensor:
    """The smallest exponent at which each key fits into 8 bits."""
    exponents_KTD = torch.frexp(k_KTD.float()).exponent - BITS
    return exponents_KTD.masked_fill_(k_KTD == 0, LOWEST).clamp_(LOWEST, HIGHEST).to(torch.int8)


def tiles(reads: Sequence[Read]) -> Iterator[Read]:
    """The non-empty reads, with unmasked ones split into tiles; masked ones are short."""
    for read in reads:
        if read.row_start >= read.row_end:
            continue
        step = TILE_KEYS if read.offset is None else max(1, read.slot_end - read.slot_start)
        for start in range(read.slot_start, read.slot_end, step):
            yield read._replace(slot_start=start, slot_end=min(start + step, read.slot_end))
