"""Attention shares of rows on columns for one layer, from the reports of the attention kernels.

Shape letters: H heads, E entries of a tile.
"""

import triton
import triton.language as tl


@triton.jit
def add_shares(
    entries,
    bags,
    attribution,
    lse,
    sinks,
    means,
    largest,
    heads,
    group,
    num_heads,
    attribution_stride_h,
    lse_stride_t,
    lse_stride_h,
    first_head,
    HEADS_PAD: tl.constexpr,
    TILE_ENTRIES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One program for each column of each reported row, see `longleaf.kernels.gpu.block_sums`; it adds up all heads in
    a fixed order. `attribution` [K, E * G, 2], `lse` [T, H], `sinks` [H]; `means` are summed over heads, `largest` is
    the maximum over heads, float32, and `heads` the number of that head, int32, starting at `first_head`."""
    place = tl.program_id(0)
    bag = bags + place.to(tl.int64) * 5
    head_H = tl.arange(0, HEADS_PAD)
    is_head_H = head_H < num_heads
    attribution_H = attribution + (head_H // group).to(tl.int64) * attribution_stride_h
    lse_H = lse + head_H * lse_stride_h
    share_H = tl.zeros([HEADS_PAD], tl.float32)
    end = tl.load(bag + 1)
    for start in range(tl.load(bag), end, TILE_ENTRIES):
        number_E = start + tl.arange(0, TILE_ENTRIES)
        is_entry_E = number_E < end
        entry_E = entries + number_E * 4
        row_E = tl.load(entry_E, mask=is_entry_E, other=0)
        first_E = tl.load(entry_E + 1, mask=is_entry_E, other=0) * group + tl.load(
            entry_E + 2, mask=is_entry_E, other=0
        )
        per_head_E = tl.load(entry_E + 3, mask=is_entry_E, other=0)
        is_reported_HE = is_head_H[:, None] & is_entry_E[None, :]
        entry_HE = attribution_H[:, None] + 2 * (first_E[None, :] + (head_H % group)[:, None] * per_head_E[None, :])
        peak_HE = tl.load(entry_HE, mask=is_reported_HE, other=0.0)
        sum_HE = tl.load(entry_HE + 1, mask=is_reported_HE, other=0.0)
        lse_HE = tl.load(lse_H[:, None] + row_E[None, :] * lse_stride_t, mask=is_reported_HE, other=0.0)
        # without visible keys, the peak is undefined
        share_H += tl.sum(sum_HE * tl.exp(tl.where(sum_HE == 0, 0.0, peak_HE - lse_HE)), 1)
    if HAS_SINKS:
        sink_H = tl.load(sinks + head_H, mask=is_head_H, other=0.0).to(tl.float32)
        for row in range(tl.load(bag + 2), tl.load(bag + 3)):
            share_H += tl.exp(sink_H - tl.load(lse_H + row * lse_stride_t, mask=is_head_H, other=float("inf")))
    share_H = share_H / tl.load(bag + 4).to(tl.float32)
    tl.store(means + place, tl.load(means + place) + tl.sum(share_H, 0))
    share_H = tl.where(is_head_H, share_H, -1.0)
    top, head, most = tl.max(share_H, 0), tl.argmax(share_H, 0), tl.load(largest + place)
    is_more = top > most
    tl.store(largest + place, tl.where(is_more, top, most))
    tl.store(heads + place, tl.where(is_more, first_head + head, tl.load(heads + place)))
