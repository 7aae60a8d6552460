"""Launch sizes of the attention kernels for single types, rows and dims, where measured ones replace those of
`longleaf.kernels.gpu.constants`.

They affect speed, and the order of sums, never which keys a row sees. `python -m bench.gpu.variants` measures the
alternatives.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from longleaf.kernels.gpu.constants import MIN_TILE_KEYS, USUAL, Constants, KernelLimits, padded
from longleaf.kernels.gpu.work_items import power_of_two


class Tile(NamedTuple):
    """A launch of an attention kernel over items of at most a given number of rows."""

    kernel: str
    """"items" (`attend_items`, `attend_items_int8`) or "unmasked" (`attend_unmasked`)."""
    rows: int
    """Rows of a tile, a power of two, at least those of an item."""
    keys: int
    """Keys of a tile, a power of two; attribution needs 32 or more."""
    num_warps: int = 4
    num_stages: int = 2
    """Tiles of keys in shared memory at once."""
    precision: str = "ieee"
    """Of products of float32: "ieee", or "tf32x3" for three products of tensor cores, of which the error is that of
    float32 up to a small factor."""
    max_registers: int | None = None
    """Registers of a thread of `attend_items_int8`; None: as many as the compiler chooses. A lower number allows more
    programs per multiprocessor."""


class Tuning(NamedTuple):
    """How one layer's attention is cut and launched."""

    tiles: Mapping[int, Tile] = {}
    """By the maximum rows of an item: 16, 32, 64 or 128. Rows without an entry use `constants`."""
    max_rows: int | None = None
    """Maximum rows of an item; None: those of `constants.max_tile_rows`."""
    programs: int = 2
    """Programs per multiprocessor that share the keys."""
    min_piece: int | None = None
    """Minimum keys of a piece; None: `work_items.MIN_PIECE`."""


Key = tuple[torch.dtype, int]
"""The type of the products, or int8 for keys in 8 bits, and the dim of keys."""
NONE = Tuning()
_SIXTEEN_BITS = Tuning(
    {
        16: Tile("items", 16, 64, 4, 2),
        32: Tile("unmasked", 64, 64, 4, 3),
        64: Tile("unmasked", 64, 64, 4, 3),
    },
    max_rows=64,
    min_piece=128,
)
HOPPER: Mapping[Key, Tuning] = {
    (torch.bfloat16, 128): _SIXTEEN_BITS,
    (torch.float16, 128): _SIXTEEN_BITS,
    (torch.float32, 128): Tuning({16: Tile("unmasked", 16, 32, 4, 3, "tf32x3")}),
    (torch.int8, 128): Tuning({16: Tile("items", 16, 128, 4, 3)}),
}
"""Tunings for compute capability 9 and for Triton's interpreter: the fastest variants on an H100, see
bench/results/gpu.md. float16 uses the sizes that were measured in bfloat16."""
Table = Mapping[Key, Tuning]


def table_of(limits: KernelLimits) -> Table:
    """The tunings of a device with these limits."""
    return HOPPER if limits == USUAL else {}


def constants_of(tile: Tile, chosen: Constants, *, is_attributed: bool) -> Constants:
    """The constants of a tile's kernel, from those of `constants.attend`."""
    if tile.kernel == "items":
        return {**chosen, **_sizes(tile), "ATTRIBUTES": is_attributed}
    names = ("DIM", "VALUE_DIM", "VALUE_PAD", "HAS_CAP", "SLOTS")
    shared = {name: chosen[name] for name in names} | {"DIM_PAD": padded(chosen["DIM"])}
    types = {"TYPE": chosen["TYPE"], "UPCAST": chosen["UPCAST"], "PRECISION": tile.precision}
    return {**shared, **_sizes(tile), **types, "ATTRIBUTES": is_attributed}


def int8_constants_of(tile: Tile, chosen: Constants) -> Constants:
    """The constants of `attend_items_int8`, from those of `constants.attend_int8`, for queries of 16 bits. No tile is
    larger than a block of slots."""
    keys = min(tile.keys, power_of_two(chosen["BLOCK"], MIN_TILE_KEYS))
    launch: Constants = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if tile.max_registers is not None:
        launch["maxnreg"] = tile.max_registers
    return {**chosen, **launch, "TILE_KEYS": keys}


def _sizes(tile: Tile) -> Constants:
    return {
        "TILE_ROWS": tile.rows,
        "TILE_KEYS": tile.keys,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
