"""Attention as in `longleaf.kernels.gpu.device.decode`, for many rows per tile: tiles of keys that all rows see
entirely are computed without masks, which leaves the time of a tile to its matrix products.

Exponentials are powers of two, with scores in units of log2(e). Tiles with masks come first. Shape letters as there.
"""

import triton
import triton.language as tl

from longleaf.kernels.gpu.device.block_sums import reported_rows, store_attribution
from longleaf.kernels.gpu.device.online import capped, masked, visible

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def attend_unmasked(
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
    attribution_reads,
    attribution,
    attribution_stride_h,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    ATTRIBUTES: tl.constexpr,
    SLOTS: tl.constexpr,
    TYPE: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Parameters and results of `attend_items` for values that are no part of the keys; `scale` is positive. PRECISION
    is that of products of float32."""
    HEADER: tl.constexpr = 4
    dim_D = tl.arange(0, DIM_PAD)
    is_dim_D = dim_D < DIM
    value_V = tl.arange(0, VALUE_PAD)
    is_value_V = value_V < VALUE_DIM
    offset_S = tl.arange(0, TILE_KEYS)
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
        q_RD = q_RD.to(TYPE)
        keys_SD = k + head * k_stride_h + dim_D[None, :]
        values_SV = v + head * v_stride_h + value_V[None, :]
        peak_R = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        mass_R = tl.zeros([TILE_ROWS], tl.float32)
        lowest_R = tl.zeros([TILE_ROWS], tl.float32)
        acc_RV = tl.zeros([TILE_ROWS, VALUE_PAD], tl.float32)
        for i in range(tl.load(item + 2), tl.load(item + 3)):
            ahead, window = tl.load(stretches + i * 4 + 2), tl.load(stretches + i * 4 + 3)
            slot_start, slot_end = tl.load(stretches + i * 4), tl.load(stretches + i * 4 + 1)
            low = tl.maximum(slot_start, ahead + first - window + 1)
            high = tl.minimum(slot_end, ahead + last + 1)
            if ATTRIBUTES:
                reported_R, is_reported_R, edge = reported_rows(
                    attribution_reads + i * 5, attribution + head * attribution_stride_h, row_R, is_row_R
                )
            begin = low // SLOTS * SLOTS
            num_tiles = tl.maximum(high - begin + TILE_KEYS - 1, 0) // TILE_KEYS
            # the tiles [plain, masked_end) are seen entirely by all rows
            seen_low = tl.maximum(low, ahead + last - window + 1)
            seen_high = tl.minimum(high, ahead + first + 1)
            plain = tl.minimum(tl.maximum(seen_low - begin + TILE_KEYS - 1, 0) // TILE_KEYS, num_tiles)
            plain_end = tl.maximum(tl.maximum(seen_high - begin, 0) // TILE_KEYS, plain)
            for turn in tl.range(0, num_tiles - (plain_end - plain), num_stages=1):
                tile = tl.where(turn < plain, turn, turn + plain_end - plain)
                start = begin + tile * TILE_KEYS
                slot_S1 = (start + offset_S.to(tl.int64))[:, None]
                is_key_S = (offset_S >= (low - start).to(tl.int32)) & (offset_S < (high - start).to(tl.int32))
                is_key_S1 = is_key_S[:, None]
                k_SD = tl.load(keys_SD + slot_S1 * k_stride_s, mask=is_key_S1 & is_dim_D[None, :], other=0.0).to(TYPE)
                v_SV = tl.load(values_SV + slot_S1 * v_stride_s, mask=is_key_S1 & is_value_V[None, :], other=0.0)
                score_RS = _product(q_RD, tl.trans(k_SD), UPCAST, PRECISION)
                is_seen_RS = is_key_S[None, :] & visible(token_R, first, start, ahead, window, TILE_KEYS)
                score_RS = masked(score_RS * scale, is_seen_RS, cap, HAS_CAP) * LOG2_E
                top_R = tl.maximum(peak_R, tl.max(score_RS, 1))
                shift_R = tl.where(top_R == float("-inf"), 0.0, top_R)
                weight_RS, fade_R = tl.exp2(score_RS - shift_R[:, None]), tl.exp2(peak_R - shift_R)
                mass_R = mass_R * fade_R + tl.sum(weight_RS, 1)
                peak_R = top_R
                acc_RV = acc_RV * fade_R[:, None]
                acc_RV = _product_onto(weight_RS.to(TYPE), v_SV.to(TYPE), acc_RV, UPCAST, PRECISION)
                if ATTRIBUTES:
                    store_attribution(
                        reported_R, is_reported_R, edge, weight_RS, peak_R * LN_2, start, low, high,
                        TILE_ROWS, TILE_KEYS, SLOTS,
                    )  # fmt: skip
            for start in range(begin + plain * TILE_KEYS, begin + plain_end * TILE_KEYS, TILE_KEYS):
                slot_S1 = (start + offset_S.to(tl.int64))[:, None]
                if DIM == DIM_PAD:
                    k_SD = tl.load(keys_SD + slot_S1 * k_stride_s).to(TYPE)
                else:
                    k_SD = tl.load(keys_SD + slot_S1 * k_stride_s, mask=is_dim_D[None, :], other=0.0).to(TYPE)
                score_RS = _product(q_RD, tl.trans(k_SD), UPCAST, PRECISION)
                # a score of -inf, of which nothing else would be seen
                lowest_R = tl.minimum(lowest_R, tl.min(score_RS, 1))
                if HAS_CAP:
                    score_RS = capped(score_RS * scale, cap) * LOG2_E
                    top_R = tl.maximum(peak_R, tl.max(score_RS, 1))
                    weight_RS = tl.exp2(score_RS - top_R[:, None])
                else:
                    top_R = tl.maximum(peak_R, tl.max(score_RS, 1) * (scale * LOG2_E))
                    weight_RS = tl.exp2(score_RS * (scale * LOG2_E) - top_R[:, None])
                fade_R = tl.exp2(peak_R - top_R)
                mass_R = mass_R * fade_R + tl.sum(weight_RS, 1)
                peak_R = top_R
                if VALUE_DIM == VALUE_PAD:
                    v_SV = tl.load(values_SV + slot_S1 * v_stride_s)
                else:
                    v_SV = tl.load(values_SV + slot_S1 * v_stride_s, mask=is_value_V[None, :], other=0.0)
                acc_RV = acc_RV * fade_R[:, None]
                acc_RV = _product_onto(weight_RS.to(TYPE), v_SV.to(TYPE), acc_RV, UPCAST, PRECISION)
                if ATTRIBUTES:
                    store_attribution(
                        reported_R, is_reported_R, edge, weight_RS, peak_R * LN_2, start, low, high,
                        TILE_ROWS, TILE_KEYS, SLOTS,
                    )  # fmt: skip
        mass_R = tl.where(lowest_R == float("-inf"), float("nan"), mass_R)
        is_empty_R = mass_R == 0
        total_R = tl.where(is_empty_R, 1.0, mass_R)
        place_R = (tl.load(item + 4) + row_R) * num_kv_heads + head
        is_out_RV = is_row_R[:, None] & is_value_V[None, :]
        tl.store(out + place_R[:, None] * VALUE_DIM + value_V[None, :], acc_RV / total_R[:, None], mask=is_out_RV)
        lse_R = tl.where(is_empty_R, float("-inf"), (peak_R + tl.log2(total_R)) * LN_2)
        tl.store(lse + place_R, lse_R, mask=is_row_R)


@triton.jit
def _product(a, b, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """Matrix product with float32 accumulation, see `longleaf.kernels.gpu.device.online.product`."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _product_onto(a, b, acc, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """The sum of `acc` and a matrix product."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)
