"""Attention of few rows in float32 without matrix products, which have 16 rows where one token has a group of heads.

Each place of a tile of keys has its own online softmax: a peak, a mass and a sum of values. No sum over
keys is needed before the last tile, so that threads exchange only the sums over dims. Otherwise as
`longleaf.kernels.gpu.device.decode`; shape letters as there.
"""

import triton
import triton.language as tl

from longleaf.kernels.gpu.device.online import masked


@triton.jit
def attend_lanes(
    table,
    q,
    k,
    v,
    out,
    lse,
    scale,
    cap,
    group,
    num_kv_heads,
    q_stride_t,
    q_stride_h,
    k_stride_h,
    k_stride_s,
    v_stride_h,
    v_stride_s,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    STAGES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Parameters and results of `attend_items` for values that are no part of the keys, without attribution. The rows
    of an item are computed four at a time."""
    HEADER: tl.constexpr = 4
    ROWS: tl.constexpr = 4
    dim_D = tl.arange(0, DIM_PAD)
    value_V = tl.arange(0, VALUE_PAD)
    is_value_V = value_V < VALUE_DIM
    offset_S = tl.arange(0, TILE_KEYS)
    stretches = table + tl.load(table + 1)
    for work in range(tl.program_id(0), tl.load(table) * num_kv_heads, tl.num_programs(0)):
        head = (work % num_kv_heads).to(tl.int64)
        item = table + HEADER + work // num_kv_heads * 5
        row_start, row_end = tl.load(item), tl.load(item + 1)
        for row_first in range(row_start, row_end, ROWS):
            first, last = row_first // group, (tl.minimum(row_first + ROWS, row_end) - 1) // group
            q0_D, token0 = _query(q, row_first, row_end, group, head, q_stride_t, q_stride_h, dim_D, DIM)
            q1_D, token1 = _query(q, row_first + 1, row_end, group, head, q_stride_t, q_stride_h, dim_D, DIM)
            q2_D, token2 = _query(q, row_first + 2, row_end, group, head, q_stride_t, q_stride_h, dim_D, DIM)
            q3_D, token3 = _query(q, row_first + 3, row_end, group, head, q_stride_t, q_stride_h, dim_D, DIM)
            peak0_S = tl.full([TILE_KEYS], float("-inf"), tl.float32)
            mass0_S = tl.zeros([TILE_KEYS], tl.float32)
            acc0_SV = tl.zeros([TILE_KEYS, VALUE_PAD], tl.float32)
            peak1_S, mass1_S, acc1_SV = peak0_S, mass0_S, acc0_SV
            peak2_S, mass2_S, acc2_SV = peak0_S, mass0_S, acc0_SV
            peak3_S, mass3_S, acc3_SV = peak0_S, mass0_S, acc0_SV
            for i in range(tl.load(item + 2), tl.load(item + 3)):
                ahead, window = tl.load(stretches + i * 4 + 2), tl.load(stretches + i * 4 + 3)
                low = tl.maximum(tl.load(stretches + i * 4), ahead + first - window + 1)
                high = tl.minimum(tl.load(stretches + i * 4 + 1), ahead + last + 1)
                for start in tl.range(low // SLOTS * SLOTS, high, TILE_KEYS, num_stages=STAGES):
                    slot_S = start + offset_S.to(tl.int64)
                    is_key_S = (slot_S >= low) & (slot_S < high)
                    keys_SD = k + (head * k_stride_h + slot_S * k_stride_s)[:, None] + dim_D[None, :]
                    values_SV = v + (head * v_stride_h + slot_S * v_stride_s)[:, None] + value_V[None, :]
                    is_k_SD = is_key_S[:, None] & (dim_D < DIM)[None, :]
                    k_SD = tl.load(keys_SD, mask=is_k_SD, other=0.0).to(tl.float32)
                    v_SV = tl.load(values_SV, mask=is_key_S[:, None] & is_value_V[None, :], other=0.0).to(tl.float32)
                    peak0_S, mass0_S, acc0_SV = _more(
                        q0_D, k_SD, v_SV, peak0_S, mass0_S, acc0_SV, scale, cap, is_key_S, ahead + token0 - slot_S,
                        window, HAS_CAP,
                    )  # fmt: skip
                    peak1_S, mass1_S, acc1_SV = _more(
                        q1_D, k_SD, v_SV, peak1_S, mass1_S, acc1_SV, scale, cap, is_key_S, ahead + token1 - slot_S,
                        window, HAS_CAP,
                    )  # fmt: skip
                    peak2_S, mass2_S, acc2_SV = _more(
                        q2_D, k_SD, v_SV, peak2_S, mass2_S, acc2_SV, scale, cap, is_key_S, ahead + token2 - slot_S,
                        window, HAS_CAP,
                    )  # fmt: skip
                    peak3_S, mass3_S, acc3_SV = _more(
                        q3_D, k_SD, v_SV, peak3_S, mass3_S, acc3_SV, scale, cap, is_key_S, ahead + token3 - slot_S,
                        window, HAS_CAP,
                    )  # fmt: skip
            place = tl.load(item + 4) + row_first
            left = row_end - row_first
            _finish(out, lse, place, head, num_kv_heads, left > 0, peak0_S, mass0_S, acc0_SV, value_V, VALUE_DIM)
            _finish(out, lse, place + 1, head, num_kv_heads, left > 1, peak1_S, mass1_S, acc1_SV, value_V, VALUE_DIM)
            _finish(out, lse, place + 2, head, num_kv_heads, left > 2, peak2_S, mass2_S, acc2_SV, value_V, VALUE_DIM)
            _finish(out, lse, place + 3, head, num_kv_heads, left > 3, peak3_S, mass3_S, acc3_SV, value_V, VALUE_DIM)


@triton.jit
def _query(q, row, row_end, group, head, q_stride_t, q_stride_h, dim_D, DIM: tl.constexpr):
    """The query of a row and its token; 0 behind the last row."""
    query = q + row // group * q_stride_t + (head * group + row % group) * q_stride_h
    return tl.load(query + dim_D, mask=(dim_D < DIM) & (row < row_end), other=0.0).to(tl.float32), row // group


@triton.jit
def _more(
    q_D, k_SD, v_SV, peak_S, mass_S, acc_SV, scale, cap, is_key_S, distance_S, window, HAS_CAP: tl.constexpr
):  # fmt: skip
    """Peaks, masses and sums of the places of a tile with one more tile of keys."""
    score_S = tl.sum(q_D[None, :] * k_SD, 1) * scale
    score_S = masked(score_S, is_key_S & (distance_S >= 0) & (distance_S < window), cap, HAS_CAP)
    top_S = tl.maximum(peak_S, score_S)
    shift_S = tl.where(top_S == float("-inf"), 0.0, top_S)
    weight_S, fade_S = tl.exp(score_S - shift_S), tl.exp(peak_S - shift_S)
    return top_S, mass_S * fade_S + weight_S, acc_SV * fade_S[:, None] + weight_S[:, None] * v_SV


@triton.jit
def _finish(out, lse, place, head, num_kv_heads, is_row, peak_S, mass_S, acc_SV, value_V, VALUE_DIM: tl.constexpr):
    """Writes the out and the lse of a row: the places of the tile together."""
    peak = tl.max(peak_S, 0)
    fade_S = tl.exp(peak_S - tl.where(peak == float("-inf"), 0.0, peak))
    mass = tl.sum(mass_S * fade_S, 0)
    is_empty = mass == 0
    total = tl.where(is_empty, 1.0, mass)
    out_V = tl.sum(acc_SV * fade_S[:, None], 0) / total
    place = place * num_kv_heads + head
    tl.store(out + place * VALUE_DIM + value_V, out_V, mask=(value_V < VALUE_DIM) & is_row)
    tl.store(lse + place, tl.where(is_empty, float("-inf"), peak + tl.log(total)), mask=is_row)
