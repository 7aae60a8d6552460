"""Kernels around flash kernels: propagation of non-finite keys, and the merge of the partials of rounds.

Flash kernels give a key of score -inf the weight 0. For a row whose mass is NaN they return an lse of +inf, as for a
row without visible keys. Every row of a round sees a key, so any non-finite lse means NaN.
Shape letters: R rows, S keys of a tile, D dim. Device code only.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens"])
def propagate_nonfinite(
    pieces,
    k,
    lse_0,
    lse_1,
    lse_2,
    lse_3,
    num_tokens,
    group,
    k_stride_h,
    k_stride_s,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Writes NaN into the lse [H, T] of each round where a row sees a key of `k` [K, S, D] that is not finite. One
    program per piece of `longleaf.kernels.gpu.varlen_plan` and key head."""
    piece = pieces + tl.program_id(0) * 5
    head = tl.program_id(1).to(tl.int64)
    start, end = tl.load(piece).to(tl.int64), tl.load(piece + 1).to(tl.int64)
    dim_D = tl.arange(0, DIM_PAD)
    is_broken = 0
    for low in range(start, end, TILE_KEYS):
        slot_S = low + tl.arange(0, TILE_KEYS)
        is_key_SD = (slot_S < end)[:, None] & (dim_D < DIM)[None, :]
        place_SD = (head * k_stride_h + slot_S * k_stride_s)[:, None] + dim_D[None, :]
        k_SD = tl.load(k + place_SD, mask=is_key_SD, other=0.0).to(tl.float32)
        is_broken = tl.maximum(is_broken, tl.max(tl.max(tl.where(tl.abs(k_SD) < float("inf"), 0, 1), 1), 0))
    if is_broken:
        row_start, row_end, own = tl.load(piece + 2), tl.load(piece + 3), tl.load(piece + 4)
        for first in range(row_start, row_end, TILE_ROWS):
            row_R = first + tl.arange(0, TILE_ROWS)
            for member in range(group):
                place_R = (head * group + member) * num_tokens + row_R
                nan_R = tl.full([TILE_ROWS], float("nan"), tl.float32)
                tl.store(lse_0 + place_R, nan_R, mask=(row_R < row_end) & (own == 0))
                tl.store(lse_1 + place_R, nan_R, mask=(row_R < row_end) & (own == 1))
                tl.store(lse_2 + place_R, nan_R, mask=(row_R < row_end) & (own == 2))
                tl.store(lse_3 + place_R, nan_R, mask=(row_R < row_end) & (own == 3))


@triton.jit(do_not_specialize=["num_tokens"])
def fold_rounds(
    members,
    out_0,
    out_1,
    out_2,
    out_3,
    lse_0,
    lse_1,
    lse_2,
    lse_3,
    rest_out,
    rest_lse,
    out,
    lse,
    num_tokens,
    num_heads,
    out_stride_t,
    out_stride_h,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    HAS_REST: tl.constexpr,
):
    """Each row's partials of rounds, `out_*` of the queries' type [T, H, D] and `lse_*` [H, T], and the partial of all
    other reads, float32 [T, H, D] and [T, H], to `out` [T, H, D] and `lse` [T, H]. Rows are those of all heads, [T, H]
    flat; where one has no part in a round nothing is looked at. Strides are those of `out_*`."""
    row_R = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row_R = row_R < num_tokens * num_heads
    token_R, head_R = row_R // num_heads, row_R % num_heads
    bits_R = tl.load(members + token_R, mask=is_row_R, other=0)
    from_out_R, from_lse_R = token_R * out_stride_t + head_R * out_stride_h, head_R * num_tokens + token_R
    dim_D = tl.arange(0, DIM_PAD)
    is_out_RD = is_row_R[:, None] & (dim_D < DIM)[None, :]
    peak_R = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    mass_R = tl.zeros([TILE_ROWS], tl.float32)
    acc_RD = tl.zeros([TILE_ROWS, DIM_PAD], tl.float32)
    for i in tl.static_range(4):
        part_out = out_0 if i == 0 else out_1 if i == 1 else out_2 if i == 2 else out_3
        part_lse = lse_0 if i == 0 else lse_1 if i == 1 else lse_2 if i == 2 else lse_3
        is_member_R = ((bits_R >> i) & 1) == 1
        lse_R = tl.load(part_lse + from_lse_R, mask=is_member_R, other=0.0)
        lse_R = tl.where(tl.abs(lse_R) < float("inf"), lse_R, float("nan"))
        lse_R = tl.where(is_member_R, lse_R, float("-inf"))
        is_part_RD = is_out_RD & is_member_R[:, None]
        out_RD = tl.load(part_out + from_out_R[:, None] + dim_D[None, :], mask=is_part_RD, other=0.0).to(tl.float32)
        peak_R, mass_R, acc_RD = _joined(peak_R, mass_R, acc_RD, lse_R, out_RD)
    if HAS_REST:
        lse_R = tl.load(rest_lse + row_R, mask=is_row_R, other=float("-inf"))
        out_RD = tl.load(rest_out + row_R[:, None] * DIM + dim_D[None, :], mask=is_out_RD, other=0.0)
        peak_R, mass_R, acc_RD = _joined(peak_R, mass_R, acc_RD, lse_R, out_RD)
    is_empty_R = mass_R == 0
    total_R = tl.where(is_empty_R, 1.0, mass_R)
    tl.store(out + row_R[:, None] * DIM + dim_D[None, :], acc_RD / total_R[:, None], mask=is_out_RD)
    tl.store(lse + row_R, tl.where(is_empty_R, float("-inf"), peak_R + tl.log(total_R)), mask=is_row_R)


@triton.jit
def _joined(peak_R, mass_R, acc_RD, lse_R, out_RD):
    """Peak, mass and sum with one more partial. An lse that is NaN makes NaN of mass and sum."""
    top_R = tl.maximum(peak_R, lse_R)
    shift_R = tl.where(top_R == float("-inf"), 0.0, top_R)
    fade_R, weight_R = tl.exp(peak_R - shift_R), tl.exp(lse_R - shift_R)
    return top_R, mass_R * fade_R + weight_R, acc_RD * fade_R[:, None] + out_RD * weight_R[:, None]
