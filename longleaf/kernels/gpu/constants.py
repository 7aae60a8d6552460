# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""The constants that each kernel is compiled with and launched with.

They depend on types and sizes of a model alone, never on the numbers of a step, so a model has few variants.
"""

from typing import Any

import torch
from triton import knobs
from triton import language as tl

from longleaf.kernels.gpu.items import power_of_two
from longleaf.runs import ceil_div

Constants = dict[str, Any]

TYPES: dict[torch.dtype, Any] = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""Types of keys, values and queries."""
MAX_TILE_ROWS = 64
"""Rows of a tile whose products are those of tensor cores: half of what these could do in the time that keys take to
come."""
MAX_WIDE_TILE_ROWS = 16
"""As above of what has no such products, or fills the registers with its values: float32, and latents."""
TILE_BYTES = 32 << 10
"""Keys and values that are read at once, about: with the next tile on its way enough bytes are under way to keep the
memory busy, and two programs fit on a multiprocessor."""
MIN_TILE_KEYS, MAX_TILE_KEYS = 16, 128
MIN_SIDE = 16
"""Sides of a matrix product have a power of two at least so large."""


def attend(
    query: torch.dtype, kept: torch.dtype, dim: int, value_dim: int, *, is_latent: bool, has_cap: bool
) -> Constants:
    """Of `attend_items`, but for the rows of a tile. Types that differ meet in the one that holds both."""
    dtype = torch.promote_types(query, kept)
    first, rest = (padded(value_dim), padded(dim - value_dim)) if is_latent else (padded(dim), 0)
    width = first + rest if is_latent else first + padded(value_dim)
    return {
        "DIM": dim,
        "DIM_PAD": first,
        "REST_PAD": rest,
        "VALUE_DIM": value_dim,
        "VALUE_PAD": padded(value_dim),
        "TILE_KEYS": tile_keys(width * kept.itemsize),
        "HAS_CAP": has_cap,
        "TYPE": TYPES[dtype],
        "UPCAST": upcasts(dtype),
        "num_warps": 8 if dtype == torch.float32 or is_latent else 4,
        "num_stages": 2,
    }


def attend_int8(query: torch.dtype, dim: int, block_size: int, *, has_cap: bool) -> Constants:
    """Of `attend_items_int8`, but for the rows of a tile. Weights of float16 are bfloat16: what the scales of values
    make of them may be below what float16 holds."""
    weight = torch.bfloat16 if query == torch.float16 else query
    most = tile_keys(2 * padded(dim) * query.itemsize)  # so wide they become in the registers
    in_block = block_size & -block_size  # the largest power of two that divides it
    return {
        "DIM": dim,
        "DIM_PAD": padded(dim),
        "BLOCK": block_size,
        "TILE_KEYS": min(most, in_block) if in_block >= MIN_TILE_KEYS else most,
        "HAS_CAP": has_cap,
        "TYPE": TYPES[query],
        "WEIGHT_TYPE": TYPES[weight],
        "UPCAST": upcasts(weight),
        "num_warps": 8,
        "num_stages": 2,
    }


def with_rows(chosen: Constants, tile_rows: int) -> Constants:
    """The constants of attention with those that depend on the rows of a tile."""
    return {**chosen, "TILE_ROWS": tile_rows, "num_warps": 8 if tile_rows > MIN_SIDE else chosen["num_warps"]}


def fold_items(value_dim: int) -> Constants:
    """Of the fold of work items."""
    pad = padded(value_dim)
    parts = min(32, max(4, 2048 // pad))
    return {"VALUE_DIM": value_dim, "VALUE_PAD": pad, "TILE_PARTS": parts, "num_warps": 4, "num_stages": 2}


def packed(value_dim: int, dtype: torch.dtype) -> Constants:
    """Of `pack_rows` and `fold_packed`."""
    is_wide, pad = dtype == torch.float32, padded(value_dim)
    return {"VALUE_DIM": value_dim, "VALUE_PAD": pad, "TILE_ROWS": 4, "IS_WIDE": is_wide, "num_warps": 4}


def betray(dim: int) -> Constants:
    """Of what makes keys show that are not finite."""
    return {"DIM": dim, "DIM_PAD": padded(dim), "TILE_KEYS": 64, "TILE_ROWS": 128, "num_warps": 4}


def fold_rounds(dim: int, *, has_rest: bool) -> Constants:
    """Of the fold of what flash kernels made."""
    return {"DIM": dim, "DIM_PAD": padded(dim), "TILE_ROWS": 16, "HAS_REST": has_rest, "num_warps": 4}


def store(dim: int, value_dim: int, *, has_values: bool) -> Constants:
    """Of `store_tokens`."""
    return {
        "DIM": dim,
        "DIM_PAD": padded(dim),
        "VALUE_DIM": value_dim,
        "VALUE_PAD": padded(value_dim),
        "HAS_VALUES": has_values,
        "TILE_TOKENS": 4,
        "num_warps": 4,
    }


def store_int8(dim: int, block_size: int) -> Constants:
    """Of the store in 8 bits."""
    tiles = {"TILE_TOKENS": 16, "TILE_SLOTS": 32, "TILE_SCAN": 1024}
    return {"DIM": dim, "DIM_PAD": padded(dim), "BLOCK": block_size, **tiles, "num_warps": 4}


def max_tile_rows(dtype: torch.dtype, *, is_latent: bool = False) -> int:
    """Rows of a tile at most, by the type of its products."""
    return MAX_WIDE_TILE_ROWS if dtype == torch.float32 or is_latent else MAX_TILE_ROWS


def tile_keys(slot_bytes: int) -> int:
    """Keys of a tile, by the bytes of a slot: the power of two around TILE_BYTES."""
    return min(MAX_TILE_KEYS, power_of_two(ceil_div(TILE_BYTES, slot_bytes), MIN_TILE_KEYS))


def padded(dim: int) -> int:
    """The side of a matrix product that holds so many dims."""
    return power_of_two(dim, MIN_SIDE)


def upcasts(dtype: torch.dtype) -> bool:
    """Whether products must be those of float32 numbers: Triton's interpreter takes bfloat16 for integers."""
    return dtype == torch.bfloat16 and bool(knobs.runtime.interpret)
