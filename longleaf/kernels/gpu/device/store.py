"""Stores keys and values of new tokens in their slots, unchanged or rounded to 8 bits.

`longleaf.kernels.int8` defines the 8-bit format. Shape letters: K key heads, T tokens of a tile, S slots of a tile, D
dim, V value dim.
"""

import triton
import triton.language as tl


@triton.jit
def store_tokens(
    slots,
    k,
    v,
    pool_keys,
    pool_values,
    num_tokens,
    k_stride_h,
    k_stride_t,
    v_stride_h,
    v_stride_t,
    keys_stride_h,
    keys_stride_s,
    values_stride_h,
    values_stride_s,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """`k` [K, T, D] and, unless they lie in the keys, `v` [K, T, V] into the pools [K, S, D] and [K, S, V] at `slots`
    [T]. One program per tile of tokens and key head."""
    head = tl.program_id(1).to(tl.int64)
    token_T = tl.program_id(0) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    is_token_T = token_T < num_tokens
    slot_T = tl.load(slots + token_T, mask=is_token_T, other=0)
    token_T = token_T.to(tl.int64)
    dim_D = tl.arange(0, DIM_PAD)
    is_key_TD = is_token_T[:, None] & (dim_D < DIM)[None, :]
    from_T, to_T = (
        k + head * k_stride_h + token_T * k_stride_t,
        pool_keys + head * keys_stride_h + slot_T * keys_stride_s,
    )
    keys_TD = tl.load(from_T[:, None] + dim_D[None, :], mask=is_key_TD)
    tl.store(to_T[:, None] + dim_D[None, :], keys_TD, mask=is_key_TD)
    if HAS_VALUES:
        value_V = tl.arange(0, VALUE_PAD)
        is_value_TV = is_token_T[:, None] & (value_V < VALUE_DIM)[None, :]
        from_T = v + head * v_stride_h + token_T * v_stride_t
        to_T = pool_values + head * values_stride_h + slot_T * values_stride_s
        values_TV = tl.load(from_T[:, None] + value_V[None, :], mask=is_value_TV)
        tl.store(to_T[:, None] + value_V[None, :], values_TV, mask=is_value_TV)


@triton.jit
def store_int8(
    slots,
    k,
    v,
    keys,
    values,
    exponents,
    scales,
    num_tokens,
    num_slots,
    k_stride_h,
    k_stride_t,
    v_stride_h,
    v_stride_t,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_SLOTS: tl.constexpr,
    TILE_SCAN: tl.constexpr,
):
    """`k` and `v` [K, T, D] rounded into `keys` and `values` [K, S, D], `exponents` [K, B, D] and `scales` [K, S].

    One program per token and key head. The program of the first token of a block processes the block: it raises the
    exponents as needed, rescales the existing keys, and writes the new tokens.
    """
    token, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    block = tl.load(slots + token) // BLOCK
    before = tl.load(slots + token - 1, mask=token > 0, other=0) // BLOCK
    if (token == 0) | (before != block):  # skips the search for most tokens of a prompt
        first, last, is_new = _tokens_of(slots, block, num_tokens, BLOCK, TILE_SCAN)
        if first == token:
            k += head * k_stride_h
            v += head * v_stride_h
            keys += head * num_slots * DIM
            values += head * num_slots * DIM
            scales += head * num_slots
            dim_D = tl.arange(0, DIM_PAD)
            is_dim_D = dim_D < DIM
            needed_D = tl.full([DIM_PAD], -120, tl.int32)
            for start in range(first, last + 1, TILE_TOKENS):
                token_T, _, is_mine_T = _tile(slots, block, start, last, BLOCK, TILE_TOKENS)
                k_TD, _ = _finite_keys(k + token_T * k_stride_t, is_mine_T, dim_D, is_dim_D)
                needed_D = tl.maximum(needed_D, tl.max(_exponent(k_TD), 0))
            exponent_D = exponents + (head * (num_slots // BLOCK) + block) * DIM + dim_D
            before_D = tl.load(exponent_D, mask=is_dim_D, other=-120).to(tl.int32)
            before_D = tl.where(is_new != 0, -120, before_D)
            after_D = tl.maximum(before_D, needed_D)
            tl.store(exponent_D, after_D.to(tl.int8), mask=is_dim_D)
            if (tl.max(after_D - before_D) > 0) & (is_new == 0):
                # beyond 7 bits only the sign is left, and shifting by the width of a number is undefined
                shift_D = tl.minimum(after_D - before_D, 7)
                for start in range(0, BLOCK, TILE_SLOTS):
                    place_S = start + tl.arange(0, TILE_SLOTS)
                    is_key_SD = (place_S < BLOCK)[:, None] & is_dim_D[None, :]
                    key_SD = keys + (block * BLOCK + place_S)[:, None] * DIM + dim_D[None, :]
                    shifted_SD = tl.load(key_SD, mask=is_key_SD, other=0).to(tl.int32) >> shift_D[None, :]
                    tl.store(key_SD, shifted_SD.to(tl.int8), mask=is_key_SD)
                tl.debug_barrier()  # other threads of this program overwrite some of these with new tokens
            shrink_D = _power(-after_D)
            for start in range(first, last + 1, TILE_TOKENS):
                token_T, slot_T, is_mine_T = _tile(slots, block, start, last, BLOCK, TILE_TOKENS)
                is_mine_TD = is_mine_T[:, None] & is_dim_D[None, :]
                place_TD = slot_T[:, None] * DIM + dim_D[None, :]
                k_TD, is_finite_T = _finite_keys(k + token_T * k_stride_t, is_mine_T, dim_D, is_dim_D)
                k_TD = tl.minimum(tl.maximum(tl.floor(k_TD * shrink_D[None, :]), -128.0), 127.0)
                tl.store(keys + place_TD, k_TD.to(tl.int8), mask=is_mine_TD)
                v_TD = tl.load(v + token_T[:, None] * v_stride_t + dim_D[None, :], mask=is_mine_TD, other=0.0)
                v_TD, scale_T = _rounded_values(v_TD.to(tl.float32), is_finite_T)
                tl.store(values + place_TD, v_TD.to(tl.int8), mask=is_mine_TD)
                tl.store(scales + slot_T, scale_T, mask=is_mine_T)


@triton.jit
def _tokens_of(slots, block, num_tokens, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """The first and the last token in a block, and whether one of them resets the block."""
    first, last, is_new = num_tokens, 0, 0
    for start in range(0, num_tokens, TILE):
        token_T = start + tl.arange(0, TILE)
        slot_T = tl.load(slots + token_T, mask=token_T < num_tokens, other=0)
        is_mine_T = (token_T < num_tokens) & (slot_T // BLOCK == block)
        first = tl.minimum(first, tl.min(tl.where(is_mine_T, token_T, num_tokens)))
        last = tl.maximum(last, tl.max(tl.where(is_mine_T, token_T, 0)))
        is_new = tl.maximum(is_new, tl.max((is_mine_T & (slot_T % BLOCK == 0)).to(tl.int32)))
    return first, last, is_new


@triton.jit
def _tile(slots, block, start, last, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Tokens from `start` on, their slots, and which of them go into a block."""
    token_T = start + tl.arange(0, TILE)
    slot_T = tl.load(slots + token_T, mask=token_T <= last, other=0)
    return token_T.to(tl.int64), slot_T, (token_T <= last) & (slot_T // BLOCK == block)


@triton.jit
def _finite_keys(from_T, is_mine_T, dim_D, is_dim_D):
    """Keys of the given tokens, float32, with 0 for non-finite numbers, and a mask of tokens with finite keys."""
    k_TD = tl.load(from_T[:, None] + dim_D[None, :], mask=is_mine_T[:, None] & is_dim_D[None, :], other=0.0)
    k_TD = k_TD.to(tl.float32)
    is_finite_TD = tl.abs(k_TD) < float("inf")
    return tl.where(is_finite_TD, k_TD, 0.0), tl.min(is_finite_TD.to(tl.int32), 1) == 1


@triton.jit
def _rounded_values(v_TD, is_finite_T):
    """Values in 8 bits and their scales, which are NaN for tokens with a non-finite key or value."""
    is_number_T = tl.min((v_TD == v_TD).to(tl.int32), 1) == 1
    scale_T = tl.maximum(tl.div_rn(tl.max(tl.abs(v_TD), 1), tl.full([v_TD.shape[0]], 127.0, tl.float32)), 2.0**-126)
    scale_T = tl.where(is_number_T & is_finite_T, scale_T, float("nan"))
    v_TD = tl.div_rn(v_TD, tl.broadcast_to(scale_T[:, None], v_TD.shape))
    v_TD = tl.where(v_TD == v_TD, v_TD, 0.0)
    # rounds to the nearest integer, ties to even: at 1.5 * 2^23 the spacing of float32 is 1
    return (v_TD + 12582912.0) - 12582912.0, scale_T


@triton.jit
def _exponent(x):
    """The smallest exponent at which a number fits into 8 bits, within [-120, 120]."""
    exponent = ((x.to(tl.int32, bitcast=True) >> 23) & 255) - 126 - 7
    return tl.minimum(tl.maximum(exponent, -120), 120)


@triton.jit
def _power(exponent):
    """2^e, float32."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)
