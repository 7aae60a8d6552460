# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""The compiled variants of the kernels for supported models: argument types and constants.

Used for ahead-of-time compilation. A rank compiles with Triton at the first launch, which specializes on integers that
are 1 or not multiples of 16; these variants cover the usual model sizes.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch

from longleaf.kernels.gpu import constants, tuning, varlen
from longleaf.kernels.gpu.constants import Constants, KernelLimits
from longleaf.kernels.gpu.device.decode import attend_items
from longleaf.kernels.gpu.device.fold import fold_items, fold_packed, pack_rows
from longleaf.kernels.gpu.device.int8 import attend_items_int8
from longleaf.kernels.gpu.device.rounds import fold_rounds, propagate_nonfinite
from longleaf.kernels.gpu.device.store import store_int8, store_tokens
from longleaf.kernels.gpu.device.unmasked import attend_unmasked
from longleaf.kernels.gpu.launch import Kernel

NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DIMS = (64, 80, 96, 112, 128, 192, 256)
LATENT = (576, 512)
"""Dims of a latent key and its value."""
BLOCK_SIZE = 128
ATTENDING = {
    **dict.fromkeys(("table", "attribution_reads"), torch.int64),
    **dict.fromkeys(("out", "lse", "attribution"), torch.float32),
}
"""Argument types common to all attention kernels."""


class KernelVariant(NamedTuple):
    """A kernel and its compile-time parameters."""

    name: str
    kernel: Kernel
    signature: dict[str, str]
    """The type of each argument, in order and in Triton's notation; `constexpr` for constants."""
    constants: Constants
    """Values of the constants."""
    num_warps: int
    num_stages: int

    @property
    def aligned(self) -> list[str]:
        """Arguments that are multiples of 16, or aligned addresses, as Triton detects them at a launch."""
        return [name for name, kind in self.signature.items() if kind.startswith("*") or "stride" in name]


def variants(limits: KernelLimits) -> Iterator[KernelVariant]:
    """All variants for a device with these limits."""
    for dtype, dim, has_cap in product(DTYPES, DIMS, (False, True)):
        for tile_rows in (16, 32, 64):
            if tile_rows <= constants.max_tile_rows(dtype, dim, limits):
                yield attend(dtype, dim, dim, tile_rows, limits, has_cap=has_cap)
        yield attend_int8(dtype, dim, limits, has_cap=has_cap)
    for dtype in DTYPES:
        tile_rows = constants.max_tile_rows(dtype, LATENT[0], limits, is_latent=True)
        yield attend(dtype, *LATENT, tile_rows, limits)
    for dim in (*DIMS, LATENT[1]):
        yield fold(dim)
        for dtype in (torch.float32, torch.bfloat16):
            yield from packed(dtype, dim)
    for dtype, dim in product(DTYPES, DIMS):
        yield store(dtype, dim, dim)
        yield store_in_int8(dtype, dim)
    for dtype in DTYPES:
        yield store(dtype, *LATENT)
    for dtype, dim in product(varlen.TYPES, DIMS):
        yield from around_rounds(dtype, dim)


def attend(
    dtype: torch.dtype, dim: int, value_dim: int, tile_rows: int, limits: KernelLimits, *, has_cap: bool = False
) -> KernelVariant:
    """Attention over keys of a type."""
    is_latent = value_dim < dim
    chosen = constants.attend(dtype, dtype, dim, value_dim, limits, is_latent=is_latent, has_cap=has_cap)
    types = {**ATTENDING, "q": dtype, "k": dtype, "v": dtype}
    name = f"attend {NAMES[dtype]} {dim}{'/' + str(value_dim) if is_latent else ''} rows {tile_rows}{' cap' * has_cap}"
    return _variant(name, attend_items, types, constants.with_rows(chosen, tile_rows))


def tuned(dtype: torch.dtype, dim: int, tile: tuning.Tile) -> KernelVariant:
    """Attention with the sizes of a tile; not in `variants`."""
    if dtype == torch.int8:
        chosen = constants.attend_int8(torch.bfloat16, dim, BLOCK_SIZE, constants.USUAL, has_cap=False)
        types = {**ATTENDING, "q": torch.bfloat16, "scales": torch.float32}
        types |= dict.fromkeys(("keys", "values", "exponents"), torch.int16)
        chosen = constants.with_rows(tuning.int8_constants_of(tile, chosen), tile.rows)
        return _variant(f"int8 {dim} {tile}", attend_items_int8, types, chosen)
    kernel = {"items": attend_items, "unmasked": attend_unmasked}[tile.kernel]
    chosen = constants.attend(dtype, dtype, dim, dim, constants.USUAL, is_latent=False, has_cap=False)
    types = {**ATTENDING, "q": dtype, "k": dtype, "v": dtype}
    return _variant(
        f"{NAMES[dtype]} {dim} {tile}", kernel, types, tuning.constants_of(tile, chosen, is_attributed=False)
    )


def attend_int8(dtype: torch.dtype, dim: int, limits: KernelLimits, *, has_cap: bool = False) -> KernelVariant:
    """Attention over keys in 8 bits, with queries of a type."""
    chosen = constants.attend_int8(dtype, dim, BLOCK_SIZE, limits, has_cap=has_cap)
    types = {**ATTENDING, "q": dtype, "scales": torch.float32}
    types |= dict.fromkeys(("keys", "values", "exponents"), torch.int16)
    tile_rows = constants.INT8_TILE_ROWS
    name = f"attend int8 {NAMES[dtype]} {dim} rows {tile_rows}{' cap' * has_cap}"
    return _variant(name, attend_items_int8, types, constants.with_rows(chosen, tile_rows))


def fold(dim: int) -> KernelVariant:
    """The merge of partials of work items."""
    types = {"table": torch.int64, **dict.fromkeys(("part_out", "part_lse", "out", "lse"), torch.float32)}
    return _variant(f"fold {dim}", fold_items, types, constants.fold_items(dim))


def packed(dtype: torch.dtype, dim: int) -> Iterator[KernelVariant]:
    """The packing of partials for the wire, and the merge of packed partials."""
    types = {"packed": dtype, "out": torch.float32, "lse": torch.float32}
    for kernel, verb in ((pack_rows, "pack"), (fold_packed, "fold packed")):
        yield _variant(f"{verb} {NAMES[dtype]} {dim}", kernel, types, constants.packed(dim, dtype))


def store(dtype: torch.dtype, dim: int, value_dim: int) -> KernelVariant:
    """The store of keys, and of values unless they are part of the keys."""
    types = {"slots": torch.int64, **dict.fromkeys(("k", "v", "pool_keys", "pool_values"), dtype)}
    chosen = constants.store(dim, value_dim, has_values=value_dim == dim)
    return _variant(f"store {NAMES[dtype]} {dim}", store_tokens, types, chosen)


def store_in_int8(dtype: torch.dtype, dim: int) -> KernelVariant:
    """The store in 8 bits."""
    types = {"slots": torch.int64, "k": dtype, "v": dtype, "scales": torch.float32}
    types |= dict.fromkeys(("keys", "values", "exponents"), torch.int8)
    return _variant(f"store int8 {NAMES[dtype]} {dim}", store_int8, types, constants.store_int8(dim, BLOCK_SIZE))


def around_rounds(dtype: torch.dtype, dim: int) -> Iterator[KernelVariant]:
    """The kernels around flash kernels, for queries and keys of a type."""
    sums = ("lse_0", "lse_1", "lse_2", "lse_3", "rest_out", "rest_lse", "out", "lse")
    types = {"pieces": torch.int32, "members": torch.int32, "k": dtype, **dict.fromkeys(sums, torch.float32)}
    types |= dict.fromkeys(("out_0", "out_1", "out_2", "out_3"), dtype)
    yield _variant(f"betray {NAMES[dtype]} {dim}", propagate_nonfinite, types, constants.propagate_nonfinite(dim))
    for has_rest in (False, True):
        name = f"fold rounds {NAMES[dtype]} {dim}{' and rest' * has_rest}"
        yield _variant(name, fold_rounds, types, constants.fold_rounds(dim, has_rest=has_rest))


def _variant(name: str, kernel: Kernel, types: dict[str, torch.dtype], chosen: Constants) -> KernelVariant:
    """`types` are the element types of pointer arguments; other arguments are constants or integers."""
    values: dict[str, Any] = {key: value for key, value in chosen.items() if key.isupper()}
    signature = {argument: _kind(argument, types, values) for argument in kernel.arg_names}
    return KernelVariant(name, kernel, signature, values, chosen["num_warps"], chosen.get("num_stages", 2))


def _kind(argument: str, types: dict[str, torch.dtype], values: dict[str, Any]) -> str:
    if argument in values:
        return "constexpr"
    if argument in types:
        return "*" + NAMES[types[argument]]
    if argument in ("scale", "cap"):
        return "fp32"
    return "i64" if argument.endswith("stride_h") or argument == "num_slots" else "i32"
