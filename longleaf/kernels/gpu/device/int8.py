"""Attention over keys and values in 8 bits, otherwise as `longleaf.kernels.gpu.device.decode`.

What the numbers stand for is said in `longleaf.kernels.int8`. Keys are not rounded again: 8 bits times a power of two
are exact in bfloat16 and float32. float16 does not hold all these powers, so the largest of a tile goes into the
scores; what is 2^-14 of the largest loses digits. The scales of values go into the weights, and these are then rounded.
Shape letters as there, and B blocks.
"""

import triton
import triton.language as tl

from longleaf.kernels.gpu.device.online import finish, masked, product, visible, weigh


@triton.jit
def attend_items_int8(
    table,
    q,
    keys,
    values,
    exponents,
    scales,
    out,
    lse,
    scale,
    cap,
    group,
    num_kv_heads,
    num_slots,
    q_stride_t,
    q_stride_h,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    TYPE: tl.constexpr,
    WEIGHT_TYPE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Writes `out` [P, K, D] and `lse` [P, K] of P part rows, float32, from `q` [T, H, D], `keys` and `values`
    [K, S, D], `exponents` [K, B, D] and `scales` [K, S]. Products with keys are of type TYPE, those with values of
    WEIGHT_TYPE.

    Where BLOCK is a multiple of TILE_KEYS all keys of a tile have the same exponents: tiles begin at multiples of
    TILE_KEYS.
    """
    HEADER: tl.constexpr = 4
    IS_IN_BLOCK: tl.constexpr = BLOCK % TILE_KEYS == 0
    dim_D = tl.arange(0, DIM_PAD)
    is_dim_D = dim_D < DIM
    num_blocks = num_slots // BLOCK
    stretches = table + tl.load(table + 1)
    for work in range(tl.program_id(0), tl.load(table) * num_kv_heads, tl.num_programs(0)):
        head = (work % num_kv_heads).to(tl.int64)
        item = table + HEADER + work // num_kv_heads * 5
        row_start, row_end = tl.load(item), tl.load(item + 1)
        row_R = row_start + tl.arange(0, TILE_ROWS)
        is_row_R = row_R < row_end
        token_R = row_R // group
        first, last = row_start // group, (row_end - 1) // group
        query_R = q + token_R * q_stride_t + (head * group + row_R % group) * q_stride_h
        q_RD = tl.load(query_R[:, None] + dim_D[None, :], mask=is_row_R[:, None] & is_dim_D[None, :], other=0.0)
        peak_R = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        mass_R = tl.zeros([TILE_ROWS], tl.float32)
        acc_RD = tl.zeros([TILE_ROWS, DIM_PAD], tl.float32)
        for i in range(tl.load(item + 2), tl.load(item + 3)):
            ahead, window = tl.load(stretches + i * 4 + 2), tl.load(stretches + i * 4 + 3)
            low = tl.maximum(tl.load(stretches + i * 4), ahead + first - window + 1)
            high = tl.minimum(tl.load(stretches + i * 4 + 1), ahead + last + 1)
            for start in range(low // TILE_KEYS * TILE_KEYS, high, TILE_KEYS):
                slot_S = start + tl.arange(0, TILE_KEYS).to(tl.int64)
                is_key_S = (slot_S >= low) & (slot_S < high)
                is_key_SD = is_key_S[:, None] & is_dim_D[None, :]
                place_SD = (head * num_slots + slot_S)[:, None] * DIM + dim_D[None, :]
                if IS_IN_BLOCK:
                    block_D = exponents + (head * num_blocks + start // BLOCK) * DIM + dim_D
                    exponent_SD = tl.load(block_D, mask=is_dim_D, other=-120).to(tl.int32)[None, :]
                else:
                    block_SD = (head * num_blocks + slot_S // BLOCK)[:, None] * DIM + dim_D[None, :]
                    exponent_SD = tl.load(exponents + block_SD, mask=is_key_SD, other=-120).to(tl.int32)
                if TYPE == tl.float16:
                    top = tl.max(tl.max(exponent_SD, 1), 0)
                    exponent_SD = tl.maximum(exponent_SD - top, -120)
                half_SD = _power(exponent_SD - 1)
                k_SD = tl.load(keys + place_SD, mask=is_key_SD, other=0).to(tl.float32) * (2 * half_SD) + half_SD
                score_RS = product(q_RD, tl.trans(k_SD.to(TYPE)), UPCAST)
                if TYPE == tl.float16:
                    score_RS *= _power(top)
                is_seen_RS = is_key_S[None, :] & visible(token_R, first, start, high, ahead, window, TILE_KEYS)
                score_RS = masked(score_RS * scale, is_seen_RS, cap, HAS_CAP)
                weight_RS, fade_R, peak_R, mass_R = weigh(score_RS, peak_R, mass_R)
                scale_S = tl.load(scales + head * num_slots + slot_S, mask=is_key_S, other=0.0)
                v_SD = tl.load(values + place_SD, mask=is_key_SD, other=0).to(tl.float32).to(WEIGHT_TYPE)
                part_RD = product((weight_RS * scale_S[None, :]).to(WEIGHT_TYPE), v_SD, UPCAST)
                acc_RD = acc_RD * fade_R[:, None] + part_RD
        out_RD, lse_R = finish(acc_RD, peak_R, mass_R)
        place_R = (tl.load(item + 4) + row_R) * num_kv_heads + head
        is_out_RD = is_row_R[:, None] & is_dim_D[None, :]
        tl.store(out + place_R[:, None] * DIM + dim_D[None, :], out_RD, mask=is_out_RD)
        tl.store(lse + place_R, lse_R, mask=is_row_R)


@triton.jit
def _power(exponent):
    """2^e, float32."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)
