"""Attention over 8-bit keys and values, otherwise as `longleaf.kernels.gpu.device.decode`.

`longleaf.kernels.int8` defines the format. Dequantization may take longer than reading, so it does little work per
number: two at a time, as 16 bits, become float16, which represents them exactly. Factors are applied to the smaller
operand of a product: exponents of keys to queries, scales of values to weights. The operand is first scaled to the
upper end of float16's range. Float16 then drops contributions below 2^-28 of a row's largest query times the largest
exponent, or of the largest scale so far, which is below the precision of float32 sums. For float32 queries products are
float32 and nothing is rounded.

Shape letters as there; C pairs of dims, of which `even` is the first and `odd` the second.
"""

import triton
import triton.language as tl

from longleaf.kernels.gpu.device.block_sums import reported_rows, store_attribution
from longleaf.kernels.gpu.device.online import finish, masked, visible, weigh

# x << 1 and x >> 7 bring a byte to bits 1 to 8 of its half; there, behind the bits of 512, and with its sign turned, it
# counts from 512 in steps of 1, and bit 0 is one half
KEYS_PTX: tl.constexpr = tl.constexpr("""{
    .reg .b32 even, odd, middle;
    mov.b32 middle, 0x61006100;
    shl.b32 even, $2, 1;
    shr.u32 odd, $2, 7;
    lop3.b32 even, even, 0x01FE01FE, 0x61016101, 0x6A;
    lop3.b32 odd, odd, 0x01FE01FE, 0x61016101, 0x6A;
    sub.f16x2 $0, even, middle;
    sub.f16x2 $1, odd, middle;
}""")
# as above, behind the bits of 1024
VALUES_PTX: tl.constexpr = tl.constexpr("""{
    .reg .b32 even, odd, middle;
    mov.b32 middle, 0x64806480;
    shr.u32 odd, $2, 8;
    lop3.b32 even, $2, 0x00FF00FF, middle, 0x6A;
    lop3.b32 odd, odd, 0x00FF00FF, middle, 0x6A;
    sub.f16x2 $0, even, middle;
    sub.f16x2 $1, odd, middle;
}""")


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
    attribution_reads,
    attribution,
    attribution_stride_h,
    DIM: tl.constexpr,
    PAIRS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    ATTRIBUTES: tl.constexpr,
    SLOTS: tl.constexpr,
    TYPE: tl.constexpr,
    HAS_PTX: tl.constexpr,
):
    """Writes `out` [P, K, D] and `lse` [P, K] of P part rows, float32, from `q` [T, H, D]; `keys` and `values` [K, S,
    C] and `exponents` [K, B, C], whose 16 bits are two numbers each; and `scales` [K, S]. Products are of type TYPE,
    float16 or float32. With ATTRIBUTES, block attribution is written as there.

    All keys of a tile have the same exponents: a tile ends where a block ends.
    """
    HEADER: tl.constexpr = 4
    NO_PAIR: tl.constexpr = -30584  # -120 twice
    PAIRS: tl.constexpr = DIM // 2
    TILES: tl.constexpr = (BLOCK + TILE_KEYS - 1) // TILE_KEYS
    pair_C = tl.arange(0, PAIRS_PAD)
    is_pair_C = pair_C < PAIRS
    stretches = table + tl.load(table + 1)
    for work in range(tl.program_id(0), tl.load(table) * num_kv_heads, tl.num_programs(0)):
        head = (work % num_kv_heads).to(tl.int64)
        item = table + HEADER + work // num_kv_heads * 5
        row_start, row_end = tl.load(item), tl.load(item + 1)
        row_R = row_start + tl.arange(0, TILE_ROWS)
        is_row_R = row_R < row_end
        token_R = row_R // group
        first, last = row_start // group, (row_end - 1) // group
        is_q_RC = is_row_R[:, None] & is_pair_C[None, :]
        query_RC = (q + token_R * q_stride_t + (head * group + row_R % group) * q_stride_h)[:, None] + 2 * pair_C
        even_RC, odd_RC, unit_R = _raised(
            tl.load(query_RC, mask=is_q_RC, other=0.0).to(tl.float32),
            tl.load(query_RC + 1, mask=is_q_RC, other=0.0).to(tl.float32),
            TYPE,
        )
        peak_R = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        mass_R = tl.zeros([TILE_ROWS], tl.float32)
        largest = tl.full([], 1.2e-38, tl.float32)
        acc_even_RC = tl.zeros([TILE_ROWS, PAIRS_PAD], tl.float32)
        acc_odd_RC = tl.zeros([TILE_ROWS, PAIRS_PAD], tl.float32)
        for i in range(tl.load(item + 2), tl.load(item + 3)):
            ahead, window = tl.load(stretches + i * 4 + 2), tl.load(stretches + i * 4 + 3)
            low = tl.maximum(tl.load(stretches + i * 4), ahead + first - window + 1)
            high = tl.minimum(tl.load(stretches + i * 4 + 1), ahead + last + 1)
            first_tile, end_tile = _tile_of(low, BLOCK, TILE_KEYS), _tile_of(high - 1, BLOCK, TILE_KEYS) + 1
            exponents_C = exponents + head * (num_slots // BLOCK) * PAIRS + pair_C
            exponent_C = tl.load(exponents_C + first_tile // TILES * PAIRS, mask=is_pair_C, other=NO_PAIR)
            if ATTRIBUTES:
                reported_R, is_reported_R, edge = reported_rows(
                    attribution_reads + i * 5, attribution + head * attribution_stride_h, row_R, is_row_R
                )
            for tile in range(first_tile, end_tile):
                start = tile // TILES * BLOCK + tile % TILES * TILE_KEYS
                end = tl.minimum(high, (tile // TILES + 1) * BLOCK)
                offset_S = tl.arange(0, TILE_KEYS)
                is_slot_S = offset_S < (num_slots - start).to(tl.int32) if BLOCK % TILE_KEYS else offset_S < TILE_KEYS
                place_SC = (head * num_slots + start + offset_S)[:, None] * PAIRS + pair_C[None, :]
                is_stored_SC = is_slot_S[:, None] & is_pair_C[None, :]
                q_even_RC, q_odd_RC, top = _shifted(even_RC, odd_RC, exponent_C, TYPE)
                # loaded one tile ahead: nothing else hides the latency of this load
                is_next_C = is_pair_C & (tile + 1 < end_tile)
                exponent_C = tl.load(exponents_C + (tile + 1) // TILES * PAIRS, mask=is_next_C, other=NO_PAIR)
                k_even_SC, k_odd_SC = _keys(tl.load(keys + place_SC, mask=is_stored_SC, other=0), TYPE, HAS_PTX)
                score_RS = tl.dot(q_even_RC, tl.trans(k_even_SC), input_precision="ieee")
                score_RS = tl.dot(q_odd_RC, tl.trans(k_odd_SC), score_RS, input_precision="ieee")
                score_RS = score_RS * (_power(top) * scale * unit_R)[:, None]
                is_key_S = (offset_S >= (low - start).to(tl.int32)) & (offset_S < (end - start).to(tl.int32))
                is_seen_RS = is_key_S[None, :] & visible(token_R, first, start, ahead, window, TILE_KEYS)
                score_RS = masked(score_RS, is_seen_RS, cap, HAS_CAP)
                weight_RS, fade_R, peak_R, mass_R = weigh(score_RS, peak_R, mass_R)
                if ATTRIBUTES:
                    store_attribution(
                        reported_R, is_reported_R, edge, weight_RS, peak_R, start, low, end, TILE_ROWS, TILE_KEYS, SLOTS
                    )
                scale_S = tl.load(scales + head * num_slots + start + offset_S, mask=is_key_S, other=0.0)
                before, largest = largest, tl.maximum(largest, tl.max(scale_S, 0))
                fade_R *= before / largest
                weight_RS = (weight_RS * (scale_S / largest * 32768)[None, :]).to(TYPE)
                v_even_SC, v_odd_SC = _values(tl.load(values + place_SC, mask=is_stored_SC, other=0), TYPE, HAS_PTX)
                acc_even_RC = tl.dot(weight_RS, v_even_SC, acc_even_RC * fade_R[:, None], input_precision="ieee")
                acc_odd_RC = tl.dot(weight_RS, v_odd_SC, acc_odd_RC * fade_R[:, None], input_precision="ieee")
        place_R = (tl.load(item + 4) + row_R) * num_kv_heads + head
        place_RC = out + place_R[:, None] * DIM + 2 * pair_C[None, :]
        even_RC, lse_R = finish(acc_even_RC * (largest / 32768), peak_R, mass_R)
        odd_RC, lse_R = finish(acc_odd_RC * (largest / 32768), peak_R, mass_R)
        tl.store(place_RC, even_RC, mask=is_q_RC)
        tl.store(place_RC + 1, odd_RC, mask=is_q_RC)
        tl.store(lse + place_R, lse_R, mask=is_row_R)


@triton.jit
def _tile_of(slot, BLOCK: tl.constexpr, TILE_KEYS: tl.constexpr):
    """The tile that a slot lies in, counted from the pool's first."""
    TILES: tl.constexpr = (BLOCK + TILE_KEYS - 1) // TILE_KEYS
    return slot // BLOCK * TILES + slot % BLOCK // TILE_KEYS


@triton.jit
def _raised(even_RC, odd_RC, TYPE: tl.constexpr):
    """Queries times the powers of two that bring the largest of each row to [2^14, 2^15), and the inverse factors."""
    if TYPE == tl.float32:
        unit_R = tl.full([even_RC.shape[0]], 1.0, tl.float32)
    else:
        top_R = tl.maximum(tl.max(tl.abs(even_RC), 1), tl.max(tl.abs(odd_RC), 1))
        shift_R = tl.minimum(14 + 127 - (top_R.to(tl.int32, bitcast=True) >> 23), 126)
        even_RC, odd_RC = even_RC * _power(shift_R)[:, None], odd_RC * _power(shift_R)[:, None]
        unit_R = _power(-shift_R)
    return even_RC, odd_RC, unit_R


@triton.jit
def _shifted(even_RC, odd_RC, exponent_C, TYPE: tl.constexpr):
    """Queries times the powers of keys, over 2^top, of which `top` is the largest exponent."""
    even_C, odd_C = ((exponent_C << 8) >> 8).to(tl.int32), (exponent_C >> 8).to(tl.int32)
    top = tl.max(tl.maximum(even_C, odd_C), 0)
    even_RC = even_RC * _power(even_C - top)[None, :]
    odd_RC = odd_RC * _power(odd_C - top)[None, :]
    return even_RC.to(TYPE), odd_RC.to(TYPE), top


@triton.jit
def _keys(pairs, TYPE: tl.constexpr, HAS_PTX: tl.constexpr):
    """Both 8 bits of 16, plus one half."""
    if HAS_PTX and TYPE == tl.float16:
        even, odd = _both(pairs, KEYS_PTX)
    else:
        even, odd = ((pairs << 8) >> 8).to(TYPE) + 0.5, (pairs >> 8).to(TYPE) + 0.5
    return even, odd


@triton.jit
def _values(pairs, TYPE: tl.constexpr, HAS_PTX: tl.constexpr):
    """Both 8 bits of 16."""
    if HAS_PTX and TYPE == tl.float16:
        even, odd = _both(pairs, VALUES_PTX)
    else:
        even, odd = ((pairs << 8) >> 8).to(TYPE), (pairs >> 8).to(TYPE)
    return even, odd


@triton.jit
def _both(pairs, PTX: tl.constexpr):
    """Converts two pairs at a time in assembly."""
    return tl.inline_asm_elementwise(PTX, "=r,=r,r", [pairs], (tl.float16, tl.float16), is_pure=True, pack=2)


@triton.jit
def _power(exponent):
    """2^e, float32; 0 below -126."""
    return (tl.maximum(exponent + 127, 0) << 23).to(tl.float32, bitcast=True)
