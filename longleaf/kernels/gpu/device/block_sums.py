"""Block attribution output of the attention kernels, see `longleaf.attention.block_attribution`.

It does not affect partials. Shape letters: R rows, S keys of a tile, B blocks of a tile.
"""

import triton
import triton.language as tl


@triton.jit
def reported_rows(read, attribution, row_R, is_row_R):
    """Attribution of a stretch, from its table entries (`longleaf.kernels.gpu.block_sums`): position of each row's
    entry for slot 0, mask of reported rows, and the edge. `attribution` has the entries of this key head."""
    is_reported_R = is_row_R & (row_R >= tl.load(read + 1)) & (row_R < tl.load(read + 2))
    return attribution + 2 * (tl.load(read) + row_R * tl.load(read + 4)), is_reported_R, tl.load(read + 3)


@triton.jit
def store_attribution(
    reported_R,
    is_reported_R,
    edge,
    weight_RS,
    peak_R,
    start,
    low,
    end,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Writes the entries of the blocks of SLOTS slots in a tile that starts at slot `start` and has the keys in slots
    [low, end): the rows' running peak and the sum of the weights."""
    BLOCKS: tl.constexpr = TILE_KEYS // SLOTS
    first_B = start + tl.arange(0, BLOCKS).to(tl.int64) * SLOTS
    is_reported_RB = is_reported_R[:, None] & ((low < first_B + SLOTS) & (first_B < end))[None, :]
    entry_RB = reported_R[:, None] + 2 * (first_B // SLOTS + (first_B >= edge).to(tl.int64))[None, :]
    peak_RB = tl.broadcast_to(peak_R[:, None], [TILE_ROWS, BLOCKS])
    sum_RB = _block_sums(weight_RS, TILE_ROWS, BLOCKS, SLOTS)
    if (start < edge) & (edge < end):
        is_behind_S = start + tl.arange(0, TILE_KEYS) >= edge
        is_cut_RB = is_reported_RB & ((first_B < edge) & (edge < first_B + SLOTS))[None, :]
        before_RB = _block_sums(tl.where(is_behind_S[None, :], 0.0, weight_RS), TILE_ROWS, BLOCKS, SLOTS)
        behind_RB = _block_sums(tl.where(is_behind_S[None, :], weight_RS, 0.0), TILE_ROWS, BLOCKS, SLOTS)
        sum_RB = tl.where(is_cut_RB, before_RB, sum_RB)
        tl.store(entry_RB + 2, peak_RB, mask=is_cut_RB)
        tl.store(entry_RB + 3, behind_RB, mask=is_cut_RB)
    tl.store(entry_RB, peak_RB, mask=is_reported_RB)
    tl.store(entry_RB + 1, sum_RB, mask=is_reported_RB)


@triton.jit
def _block_sums(weight_RS, TILE_ROWS: tl.constexpr, BLOCKS: tl.constexpr, SLOTS: tl.constexpr):
    return tl.sum(tl.reshape(weight_RS, [TILE_ROWS, BLOCKS, SLOTS]), 2)
