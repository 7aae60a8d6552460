"""Attention over keys and values in a floating-point type: computes one partial per row and work item of a layer.

The table is that of `longleaf.kernels.gpu.work_items`. Programs process items in turn, for every key head, so the
number of programs and items affects only speed. Tiles of keys start at multiples of a block's slots, with or without
block attribution (ATTRIBUTES), so partials are bitwise identical in both cases.

Shape letters: R rows, S keys of a tile, D dim, V value dim, E dims of the keys beyond the values.
"""

import triton
import triton.language as tl

from longleaf.kernels.gpu.device.block_sums import reported_rows, store_attribution
from longleaf.kernels.gpu.device.online import finish, masked, product, visible, weigh


@triton.jit
def attend_items(
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
    REST_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    ATTRIBUTES: tl.constexpr,
    SLOTS: tl.constexpr,
    TYPE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Writes `out` [P, K, V] and `lse` [P, K] of P part rows, float32, from `q` [T, H, D], `k` [K, S, D] and `v` [K, S,
    V]; products are of type TYPE.

    If REST_PAD is not 0, the values are the first dims of the keys, and both are read once: DIM_PAD is then VALUE_PAD,
    and REST_PAD is the padded number of the other dims. `v` is ignored.

    With ATTRIBUTES it also writes `attribution` [K, E * G, 2], float32, for each stretch in `attribution_reads`, see
    `store_attribution`.
    """
    HEADER: tl.constexpr = 4
    first_dim_D = tl.arange(0, DIM_PAD)
    is_dim_D = first_dim_D < (VALUE_DIM if REST_PAD else DIM)
    value_V = tl.arange(0, VALUE_PAD)
    is_value_V = value_V < VALUE_DIM
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
        q_RD = tl.load(query_R[:, None] + first_dim_D[None, :], mask=is_row_R[:, None] & is_dim_D[None, :], other=0.0)
        q_RD = q_RD.to(TYPE)
        if REST_PAD:
            rest_E = VALUE_DIM + tl.arange(0, REST_PAD)
            is_rest_E = rest_E < DIM
            q_RE = tl.load(query_R[:, None] + rest_E[None, :], mask=is_row_R[:, None] & is_rest_E[None, :], other=0.0)
            q_RE = q_RE.to(TYPE)
        peak_R = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        mass_R = tl.zeros([TILE_ROWS], tl.float32)
        acc_RV = tl.zeros([TILE_ROWS, VALUE_PAD], tl.float32)
        for i in range(tl.load(item + 2), tl.load(item + 3)):
            ahead, window = tl.load(stretches + i * 4 + 2), tl.load(stretches + i * 4 + 3)
            low = tl.maximum(tl.load(stretches + i * 4), ahead + first - window + 1)
            high = tl.minimum(tl.load(stretches + i * 4 + 1), ahead + last + 1)
            if ATTRIBUTES:
                reported_R, is_reported_R, edge = reported_rows(
                    attribution_reads + i * 5, attribution + head * attribution_stride_h, row_R, is_row_R
                )
            for start in range(low // SLOTS * SLOTS, high, TILE_KEYS):
                # 64 bits, because slots x dim exceeds 2^31 at 16 M tokens of 128
                offset_S = tl.arange(0, TILE_KEYS)
                slot_S = start + offset_S.to(tl.int64)
                is_key_S = (offset_S >= (low - start).to(tl.int32)) & (offset_S < (high - start).to(tl.int32))
                is_key_S1 = is_key_S[:, None]
                keys_S1 = k + (head * k_stride_h + slot_S * k_stride_s)[:, None]
                k_SD = tl.load(keys_S1 + first_dim_D[None, :], mask=is_key_S1 & is_dim_D[None, :], other=0.0).to(TYPE)
                score_RS = product(q_RD, tl.trans(k_SD), UPCAST)
                if REST_PAD:
                    k_SE = tl.load(keys_S1 + rest_E[None, :], mask=is_key_S1 & is_rest_E[None, :], other=0.0)
                    score_RS += product(q_RE, tl.trans(k_SE.to(TYPE)), UPCAST)
                    v_SV = k_SD
                else:
                    values_S1 = v + (head * v_stride_h + slot_S * v_stride_s)[:, None]
                    v_SV = tl.load(values_S1 + value_V[None, :], mask=is_key_S1 & is_value_V[None, :], other=0.0)
                    v_SV = v_SV.to(TYPE)
                is_seen_RS = is_key_S[None, :] & visible(token_R, first, start, ahead, window, TILE_KEYS)
                score_RS = masked(score_RS * scale, is_seen_RS, cap, HAS_CAP)
                weight_RS, fade_R, peak_R, mass_R = weigh(score_RS, peak_R, mass_R)
                acc_RV = acc_RV * fade_R[:, None] + product(weight_RS.to(TYPE), v_SV, UPCAST)
                if ATTRIBUTES:
                    store_attribution(
                        reported_R,
                        is_reported_R,
                        edge,
                        weight_RS,
                        peak_R,
                        start,
                        low,
                        high,
                        TILE_ROWS,
                        TILE_KEYS,
                        SLOTS,
                    )
        out_RV, lse_R = finish(acc_RV, peak_R, mass_R)
        place_R = (tl.load(item + 4) + row_R) * num_kv_heads + head
        is_out_RV = is_row_R[:, None] & is_value_V[None, :]
        tl.store(out + place_R[:, None] * VALUE_DIM + value_V[None, :], out_RV, mask=is_out_RV)
        tl.store(lse + place_R, lse_R, mask=is_row_R)
