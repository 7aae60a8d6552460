"""Deterministic merge of partials, and their packed wire format.

The result of a merge depends only on its inputs, bitwise: every row is merged by one program, in the order of its
partials. Shape letters: N partials, R rows, V value dim, C columns of a packed row; rows are those of all heads, [T, H]
flattened.
"""

import triton
import triton.language as tl


@triton.jit
def fold_items(
    table,
    part_out,
    part_lse,
    out,
    lse,
    group,
    num_kv_heads,
    VALUE_DIM: tl.constexpr,
    TILE_VALUES: tl.constexpr,
    TILE_PARTS: tl.constexpr,
    TILE_SUMS: tl.constexpr,
):
    """Merge of the partials of work items of each row: `part_out` [P, K, V] and `part_lse` [P, K] to `out` [T, H, V]
    and `lse` [T, H]. One program per token and head and TILE_VALUES values; a row without partials is the identity.

    The weights of all partials are known before the first of them is read, so reads do not wait for each other.
    """
    place = tl.program_id(0).to(tl.int64)
    num_heads = group * num_kv_heads
    token, head = place // num_heads, place % num_heads
    row, kv_head = token * group + head % group, head // group
    shifts = table + tl.load(table + 3)
    bounds = table + tl.load(table + 2) + token * 2
    begin, end = tl.load(bounds), tl.load(bounds + 1)
    peak = float("-inf")
    mass = 0.0
    for start in range(begin, end, TILE_SUMS):
        part_N = start + tl.arange(0, TILE_SUMS)
        is_part_N = part_N < end
        place_N = (tl.load(shifts + part_N, mask=is_part_N, other=0) + row) * num_kv_heads + kv_head
        lse_N = tl.load(part_lse + place_N, mask=is_part_N, other=float("-inf"))
        top = tl.maximum(peak, tl.max(lse_N, 0))
        shift = tl.where(top == float("-inf"), 0.0, top)
        mass = mass * tl.exp(peak - shift) + tl.sum(tl.exp(lse_N - shift), 0)
        peak = top
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    value_V = tl.program_id(1) * TILE_VALUES + tl.arange(0, TILE_VALUES)
    is_value_V = value_V < VALUE_DIM
    acc_V = tl.zeros([TILE_VALUES], tl.float32)
    for start in range(begin, end, TILE_PARTS):
        part_N = start + tl.arange(0, TILE_PARTS)
        is_part_N = part_N < end
        place_N = (tl.load(shifts + part_N, mask=is_part_N, other=0) + row) * num_kv_heads + kv_head
        weight_N = tl.exp(tl.load(part_lse + place_N, mask=is_part_N, other=float("-inf")) - shift)
        is_out_NV = is_part_N[:, None] & is_value_V[None, :]
        out_NV = tl.load(part_out + place_N[:, None] * VALUE_DIM + value_V[None, :], mask=is_out_NV, other=0.0)
        acc_V += tl.sum(weight_N[:, None] * out_NV, 0)
    is_empty = mass == 0
    total = tl.where(is_empty, 1.0, mass)
    tl.store(out + place * VALUE_DIM + value_V, acc_V / total, mask=is_value_V)
    if tl.program_id(1) == 0:
        tl.store(lse + place, tl.where(is_empty, float("-inf"), peak + tl.log(total)))


@triton.jit
def fold_packed(
    packed,
    out,
    lse,
    num_partials,
    num_rows,
    stride_n,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    """Merge of N packed partials [N, R, C], float32 (IS_WIDE) or bfloat16, to `out` [R, V] and `lse` [R]."""
    COLUMNS: tl.constexpr = VALUE_DIM + (1 if IS_WIDE else 2)
    row_R = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row_R = row_R < num_rows
    value_V = tl.arange(0, VALUE_PAD)
    is_out_RV = is_row_R[:, None] & (value_V < VALUE_DIM)[None, :]
    peak_R = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    mass_R = tl.zeros([TILE_ROWS], tl.float32)
    acc_RV = tl.zeros([TILE_ROWS, VALUE_PAD], tl.float32)
    for i in range(num_partials):
        columns_R = packed + i * stride_n + row_R * COLUMNS
        out_RV = tl.load(columns_R[:, None] + value_V[None, :], mask=is_out_RV, other=0.0).to(tl.float32)
        lse_R = _packed_lse(columns_R + VALUE_DIM, is_row_R, IS_WIDE)
        top_R = tl.maximum(peak_R, lse_R)
        shift_R = tl.where(top_R == float("-inf"), 0.0, top_R)
        fade_R, weight_R = tl.exp(peak_R - shift_R), tl.exp(lse_R - shift_R)
        mass_R = mass_R * fade_R + weight_R
        acc_RV = acc_RV * fade_R[:, None] + out_RV * weight_R[:, None]
        peak_R = top_R
    is_empty_R = mass_R == 0
    total_R = tl.where(is_empty_R, 1.0, mass_R)
    tl.store(out + row_R[:, None] * VALUE_DIM + value_V[None, :], acc_RV / total_R[:, None], mask=is_out_RV)
    tl.store(lse + row_R, tl.where(is_empty_R, float("-inf"), peak_R + tl.log(total_R)), mask=is_row_R)


@triton.jit
def pack_rows(
    out,
    lse,
    packed,
    num_rows,
    num_heads,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    """`out` [T, H, V] and `lse` [T, H] side by side in `packed` [T, H, C], float32 (IS_WIDE) or bfloat16; in bfloat16
    the last two columns are the bits of the lse."""
    COLUMNS: tl.constexpr = VALUE_DIM + (1 if IS_WIDE else 2)
    row_R = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row_R = row_R < num_rows
    token_R, head_R = row_R // num_heads, row_R % num_heads
    value_V = tl.arange(0, VALUE_PAD)
    is_out_RV = is_row_R[:, None] & (value_V < VALUE_DIM)[None, :]
    from_R = out + token_R * out_stride_t + head_R * out_stride_h
    out_RV = tl.load(from_R[:, None] + value_V[None, :], mask=is_out_RV, other=0.0)
    lse_R = tl.load(lse + token_R * lse_stride_t + head_R * lse_stride_h, mask=is_row_R, other=0.0)
    columns_R = packed + row_R * COLUMNS
    tl.store(columns_R[:, None] + value_V[None, :], out_RV.to(packed.dtype.element_ty), mask=is_out_RV)
    if IS_WIDE:
        tl.store(columns_R + VALUE_DIM, lse_R, mask=is_row_R)
    else:
        bits_R = lse_R.to(tl.uint32, bitcast=True)
        low_R, high_R = (bits_R & 0xFFFF).to(tl.uint16), (bits_R >> 16).to(tl.uint16)
        tl.store(columns_R + VALUE_DIM, low_R.to(tl.bfloat16, bitcast=True), mask=is_row_R)
        tl.store(columns_R + VALUE_DIM + 1, high_R.to(tl.bfloat16, bitcast=True), mask=is_row_R)


@triton.jit
def _packed_lse(columns_R, is_row_R, IS_WIDE: tl.constexpr):
    """The lse that starts at these columns."""
    if IS_WIDE:
        lse_R = tl.load(columns_R, mask=is_row_R, other=0.0)
    else:
        low_R = tl.load(columns_R, mask=is_row_R, other=0.0).to(tl.uint16, bitcast=True).to(tl.uint32)
        high_R = tl.load(columns_R + 1, mask=is_row_R, other=0.0).to(tl.uint16, bitcast=True).to(tl.uint32)
        lse_R = (high_R << 16 | low_R).to(tl.float32, bitcast=True)
    return lse_R
