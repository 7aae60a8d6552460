# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false
"""Bounds of a kernel that reads keys, as a share of the bandwidth of a device.

Three rates in bytes per nanosecond and multiprocessor are compared with the memory's share of it. The bound is the
smallest of them over that share, and at most 1:

    memory      By Little's law bytes arrive at the rate of (bytes in flight) / latency. In flight are those of
                `num_stages` - 1 tiles of each program that a multiprocessor runs at once.
    arithmetic  A turn of the loop over tiles keeps each of four schedulers busy for the cycles that `sass` counts, for
                each of its warps. A multiprocessor's programs share the schedulers.
    matrix      Products of a tile, padded as they are computed, over the rate of tensor cores, or of float32.

Latency is that of a memory under full load, about three times that of an idle one (about 480 cycles, or 270 ns, on an
H100: Luo et al., arXiv 2402.13499). A bound is no measurement: it leaves out waits inside a turn, bank conflicts, the
fold that follows, and the launch.
"""

from typing import NamedTuple

import torch

from bench.occupancy.compiling import Resources
from bench.occupancy.targets import Target
from bench.occupancy.variants import KernelVariant
from longleaf.attention.masks import Read
from longleaf.kernels.gpu.backend import PROGRAMS_PER_MULTIPROCESSOR
from longleaf.kernels.gpu.work_items import HEADER, ITEM, STRETCH, Shape, work_of

LATENCY_NS = 800.0
SCHEDULERS = 4
TENSOR_PRODUCTS = {"sm_80": 1024, "sm_89": 512, "sm_90": 1024, "sm_100": 1024, "gfx942": 1024}
"""Multiplications with 16-bit numbers per cycle and multiprocessor. sm_90 and sm_100 have faster ones, which 16 rows do
not fill."""
FLOAT_PRODUCTS = {"sm_80": 64, "sm_89": 128, "sm_90": 128, "sm_100": 128, "gfx942": 128}


class Bound(NamedTuple):
    """Shares of the bandwidth of a target's device, not cut off at 1."""

    num_programs: int
    """At once on a multiprocessor."""
    bytes_in_flight: int
    """Of a multiprocessor."""
    memory: float
    arithmetic: float
    """0: unknown."""
    matrix: float

    @property
    def share(self) -> float:
        """The bound."""
        return min(1.0, self.memory, self.matrix, self.arithmetic or 1.0)


def bound_of(variant: KernelVariant, target: Target, used: Resources) -> Bound:
    """The bound of a variant of attention."""
    device, warps = target.device, target.warps(variant.num_warps)
    programs = min(PROGRAMS_PER_MULTIPROCESSOR, target.occupancy(warps, used.registers, used.shared))
    tile = variant.constants["TILE_KEYS"] * bytes_per_key(variant)
    in_flight = programs * (variant.num_stages - 1) * tile
    cycles = used.cycles * warps / SCHEDULERS
    rates = FLOAT_PRODUCTS if variant.signature["q"] == "*fp32" else TENSOR_PRODUCTS
    wanted = device.bytes_per_ns

    def share(cycles: float) -> float:
        return tile / (cycles / device.clock_hz * 1e9) / wanted if cycles else 0.0

    return Bound(
        programs,
        in_flight,
        in_flight / LATENCY_NS / wanted,
        share(cycles),
        share(products_of(variant) / rates[target.name]),
    )


def bytes_per_key(variant: KernelVariant) -> int:
    """That a key and its value take in memory, for one key head."""
    constants = variant.constants
    if "keys" in variant.signature:
        return 2 * constants["DIM"] + torch.float32.itemsize
    itemsize = torch.float32.itemsize if variant.signature["k"] == "*fp32" else 2
    return itemsize * (constants["DIM"] + (0 if constants["REST_PAD"] else constants["VALUE_DIM"]))


def products_of(variant: KernelVariant) -> int:
    """Multiplications of a tile."""
    constants = variant.constants
    if "PAIRS_PAD" in constants:
        width = 4 * constants["PAIRS_PAD"]
    else:
        width = constants["DIM_PAD"] + constants["REST_PAD"] + constants["VALUE_PAD"]
    return constants["TILE_ROWS"] * constants["TILE_KEYS"] * width


def evenness(num_keys: int, shape: Shape, target: Target) -> float:
    """How evenly programs share one read of all rows: keys of all of them over those that they would read if each had
    as many as the one with most."""
    num_programs = PROGRAMS_PER_MULTIPROCESSOR * target.device.num_multiprocessors
    work = work_of([Read(0, shape.num_tokens, 0, num_keys)], shape, num_programs)
    num_items, stretches_at = work.numbers[:2]
    loads = [0] * num_programs
    for turn in range(num_items * shape.num_kv_heads):
        first, last = work.numbers[HEADER + turn // shape.num_kv_heads * ITEM :][2:4]
        stretches = [work.numbers[stretches_at + i * STRETCH :][:2] for i in range(first, last)]
        loads[turn % num_programs] += sum(end - start for start, end in stretches)
    return sum(loads) / (num_programs * max(loads))
