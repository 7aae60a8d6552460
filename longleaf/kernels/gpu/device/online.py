"""Common operations of the attention kernels on a tile of scores: masks, soft caps, and online softmax over tiles, in
float32 and natural logarithms.

Shape letters: R rows, S keys of a tile, V value dim.
"""

import triton
import triton.language as tl


@triton.jit
def product(a, b, UPCAST: tl.constexpr):
    """Matrix product with float32 accumulation; float32 operands are not rounded to TF32. UPCAST is for Triton's
    interpreter, which treats bfloat16 as integers."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def visible(token_R, first, start, ahead, window, TILE_KEYS: tl.constexpr):
    """Which rows see which of the keys in slots [start, start + TILE_KEYS), if these are read.

    Compared in 32 bits, with distances to the first token clamped to 2^30.
    """
    key_S = tl.arange(0, TILE_KEYS)
    distance = tl.minimum(tl.maximum(ahead + first - start, -(1 << 30)), 1 << 30).to(tl.int32)
    distance_RS = (distance + (token_R - first).to(tl.int32))[:, None] - key_S[None, :]
    is_near_RS = distance_RS < tl.minimum(window, (1 << 31) - 1).to(tl.int32)
    return (distance_RS >= 0) & is_near_RS


@triton.jit
def capped(score, cap):
    """cap * tanh(score / cap). Near 0 by its series, because the other form loses precision there."""
    x = score / cap
    square = x * x
    fall = tl.exp(-2.0 * tl.abs(x))
    far = tl.where(x < 0, -1.0, 1.0) * (1.0 - fall) / (1.0 + fall)
    near = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315))))
    return cap * tl.where(square < 0.04, near, far)


@triton.jit
def masked(score_RS, is_seen_RS, cap, HAS_CAP: tl.constexpr):
    """Scores after the cap, -inf for invisible keys. Non-finite scores become NaN, because a key of score -inf would
    silently get weight 0."""
    score_RS = tl.where(tl.abs(score_RS) < float("inf"), score_RS, float("nan"))
    if HAS_CAP:
        score_RS = capped(score_RS, cap)
    return tl.where(is_seen_RS, score_RS, float("-inf"))


@triton.jit
def weigh(score_RS, peak_R, mass_R):
    """Weights of a tile's keys relative to the largest score so far, the factor for earlier weights, and the new peak
    and mass. The peak of rows without visible keys is -inf."""
    top_R = tl.maximum(peak_R, tl.max(score_RS, 1))
    shift_R = tl.where(top_R == float("-inf"), 0.0, top_R)
    weight_RS = tl.exp(score_RS - shift_R[:, None])
    fade_R = tl.exp(peak_R - shift_R)
    return weight_RS, fade_R, top_R, mass_R * fade_R + tl.sum(weight_RS, 1)


@triton.jit
def finish(acc_RV, peak_R, mass_R):
    """Out and lse; the identity for rows without visible keys. A mass of NaN is preserved."""
    is_empty_R = mass_R == 0
    out_RV = acc_RV / tl.where(is_empty_R, 1.0, mass_R)[:, None]
    return out_RV, tl.where(is_empty_R, float("-inf"), peak_R + tl.log(tl.where(is_empty_R, 1.0, mass_R)))
