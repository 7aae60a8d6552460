# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Compile-time and launch constants of each kernel.

They depend only on types and sizes of a model, never on the step, so a model needs few variants.
"""

from typing import Any, NamedTuple

import torch
from triton import knobs
from triton import language as tl

from longleaf.attention.block_attribution import BLOCK
from longleaf.kernels.gpu.work_items import power_of_two
from longleaf.runs import ceil_div

Constants = dict[str, Any]

TYPES: dict[torch.dtype, Any] = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""Types of keys, values and queries."""
MAX_TILE_ROWS = 64
"""Rows of a tile whose products use tensor cores: half of the work that these could do while the keys are loaded."""
MAX_WIDE_TILE_ROWS = 16
"""The same without tensor cores, or if the values fill the registers: float32, and latents."""
INT8_TILE_ROWS = 16
"""Rows of a tile over 8-bit keys, whose converted values fill the registers."""
TILE_BYTES = 32 << 10
"""Approximate size of keys and values read at once. Together with the prefetched next tile this keeps the memory busy,
and two programs fit on a multiprocessor."""
WIDE_TILE_BYTES = 64 << 10
"""The same if values fill the registers of eight warps, with one program per multiprocessor."""
MIN_TILE_KEYS, MAX_TILE_KEYS = 16, 128
MAX_NARROW_DIM = 128
"""Up to this value dim, the registers of four warps suffice."""
MAX_FOLDED_VALUES = 128
"""Values of a row that one program merges: the few rows of a decode step need many programs."""
MIN_SIDE = 16
"""Sides of a matrix product are powers of two of at least this size."""


class KernelLimits(NamedTuple):
    """Tile sizes that fit into the registers, depending on the device's compiler."""

    max_tile_rows: int = MAX_TILE_ROWS
    latent_warps: int = 4
    int8_warps: int = 4
    has_ptx: bool = True
    """Whether kernels may contain PTX."""


USUAL = KernelLimits()
AMPERE = KernelLimits(int8_warps=8)
"""Compute capability 8."""
BLACKWELL = KernelLimits(MAX_TILE_ROWS // 2)
"""Compute capability 10: larger tiles would spill registers."""
AMD = KernelLimits(latent_warps=8, has_ptx=False)


def attend(
    query: torch.dtype,
    stored: torch.dtype,
    dim: int,
    value_dim: int,
    limits: KernelLimits,
    *,
    is_latent: bool,
    has_cap: bool,
) -> Constants:
    """Constants of `attend_items`, except the rows of a tile. Different types are converted to the one that represents
    both."""
    dtype = torch.promote_types(query, stored)
    first, rest = (padded(value_dim), padded(dim - value_dim)) if is_latent else (padded(dim), 0)
    width = first + rest if is_latent else first + padded(value_dim)
    is_float32, is_wide = dtype == torch.float32, first > MAX_NARROW_DIM and not is_latent
    tile_bytes = WIDE_TILE_BYTES if is_wide and not is_float32 else TILE_BYTES
    return {
        "DIM": dim,
        "DIM_PAD": first,
        "REST_PAD": rest,
        "VALUE_DIM": value_dim,
        "VALUE_PAD": padded(value_dim),
        "TILE_KEYS": tile_keys(width * stored.itemsize, tile_bytes),
        "HAS_CAP": has_cap,
        "SLOTS": BLOCK,
        "TYPE": TYPES[dtype],
        "UPCAST": upcasts(dtype),
        "num_warps": 8 if is_wide or (is_float32 and is_latent) else limits.latent_warps if is_latent else 4,
        "num_stages": 2,
    }


def attend_int8(query: torch.dtype, dim: int, block_size: int, limits: KernelLimits, *, has_cap: bool) -> Constants:
    """Constants of `attend_items_int8`, except the rows of a tile."""
    pairs, is_float32 = padded(ceil_div(dim, 2)), query == torch.float32
    most = tile_keys(4 * pairs, TILE_BYTES // 2 if is_float32 else TILE_BYTES)
    return {
        "DIM": dim,
        "PAIRS_PAD": pairs,
        "BLOCK": block_size,
        "TILE_KEYS": min(most, power_of_two(block_size, MIN_TILE_KEYS)),
        "HAS_CAP": has_cap,
        "SLOTS": BLOCK,
        "TYPE": TYPES[torch.float32 if is_float32 else torch.float16],
        "HAS_PTX": limits.has_ptx and not knobs.runtime.interpret,
        "num_warps": 8 if is_float32 or pairs > MAX_NARROW_DIM // 2 else limits.int8_warps,
        "num_stages": 2,
    }


def with_rows(chosen: Constants, tile_rows: int, *, is_attributed: bool = False) -> Constants:
    """Attention constants completed with those that depend on the rows of a tile. More rows leave registers for fewer
    keys. Block attribution requires that each block of keys is within one tile."""
    keys = chosen["TILE_KEYS"] if tile_rows == MIN_SIDE else max(MIN_TILE_KEYS, chosen["TILE_KEYS"] // 2)
    is_whole = keys >= BLOCK and chosen.get("BLOCK", BLOCK) % BLOCK == 0
    return {**chosen, "TILE_ROWS": tile_rows, "TILE_KEYS": keys, "ATTRIBUTES": is_attributed and is_whole}


def add_shares(num_heads: int, *, has_sinks: bool) -> Constants:
    """Constants of the attribution sum."""
    return {"HEADS_PAD": power_of_two(num_heads, MIN_SIDE), "TILE_ENTRIES": 8, "HAS_SINKS": has_sinks, "num_warps": 4}


def fold_items(value_dim: int) -> Constants:
    """Constants of the merge of partials of work items."""
    values = min(MAX_FOLDED_VALUES, padded(value_dim))
    return {
        "VALUE_DIM": value_dim,
        "TILE_VALUES": values,
        "TILE_PARTS": min(32, 4096 // values),
        "TILE_SUMS": 128,
        "num_warps": 4,
        "num_stages": 2,
    }


def packed(value_dim: int, dtype: torch.dtype) -> Constants:
    """Constants of `pack_rows`, and of `fold_packed`, which merges packed partials."""
    is_wide, pad = dtype == torch.float32, padded(value_dim)
    return {"VALUE_DIM": value_dim, "VALUE_PAD": pad, "TILE_ROWS": 4, "IS_WIDE": is_wide, "num_warps": 4}


def propagate_nonfinite(dim: int) -> Constants:
    """Constants of the check for non-finite keys."""
    return {"DIM": dim, "DIM_PAD": padded(dim), "TILE_KEYS": 64, "TILE_ROWS": 128, "num_warps": 4}


def fold_rounds(dim: int, *, has_rest: bool) -> Constants:
    """Constants of the merge of partials of flash kernels."""
    return {"DIM": dim, "DIM_PAD": padded(dim), "TILE_ROWS": 8, "HAS_REST": has_rest, "num_warps": 4}


def store(dim: int, value_dim: int, *, has_values: bool) -> Constants:
    """Constants of `store_tokens`."""
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
    """Constants of the 8-bit store."""
    tiles = {"TILE_TOKENS": 8, "TILE_SLOTS": 32, "TILE_SCAN": 1024}
    return {"DIM": dim, "DIM_PAD": padded(dim), "BLOCK": block_size, **tiles, "num_warps": 4}


def max_tile_rows(dtype: torch.dtype, dim: int, limits: KernelLimits, *, is_latent: bool = False) -> int:
    """Maximum rows of a tile, from the type of its products and the dim of its keys."""
    if dtype == torch.float32 or is_latent:
        return MAX_WIDE_TILE_ROWS
    return limits.max_tile_rows if padded(dim) <= MAX_NARROW_DIM else MAX_TILE_ROWS // 2


def limits_here() -> KernelLimits:
    """The limits of the current GPU."""
    if torch.version.hip:
        return AMD
    return limits_of(torch.cuda.get_device_capability()[0]) if torch.cuda.is_available() else USUAL


def limits_of(capability: int) -> KernelLimits:
    """The limits of an NVIDIA device, by its major compute capability."""
    return BLACKWELL if capability >= 10 else AMPERE if capability < 9 else USUAL


def tile_keys(slot_bytes: int, tile_bytes: int) -> int:
    """Keys of a tile, from the bytes of a slot: a power of two near that many bytes."""
    return min(MAX_TILE_KEYS, power_of_two(ceil_div(tile_bytes, slot_bytes), MIN_TILE_KEYS))


def padded(dim: int) -> int:
    """The padded side of a matrix product for this dim."""
    return power_of_two(dim, MIN_SIDE)


def upcasts(dtype: torch.dtype) -> bool:
    """Whether products must use float32 operands: Triton's interpreter treats bfloat16 as integers."""
    return dtype == torch.bfloat16 and bool(knobs.runtime.interpret)
