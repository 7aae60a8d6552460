# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false
"""The GPUs for which kernels are compiled: resources of a multiprocessor, and the speed of the device."""

from typing import Any, NamedTuple

from triton.backends.compiler import GPUTarget

from longleaf.kernels.gpu.constants import AMD, KernelLimits, limits_of
from longleaf.kernels.gpu.launch import warps
from longleaf.runs import ceil_div


class Device(NamedTuple):
    """The device that bounds are computed for, by its maker's data sheet."""

    name: str
    num_multiprocessors: int
    bytes_per_s: float
    clock_hz: float
    """The sustained clock under load, somewhat below the boost clock of the data sheet."""

    @property
    def bytes_per_ns(self) -> float:
        """The memory bandwidth share of one multiprocessor."""
        return self.bytes_per_s / self.num_multiprocessors / 1e9


class Target(NamedTuple):
    """Limits of a multiprocessor (AMD: compute unit) of an architecture, and a device that has it.

    NVIDIA's are those of the CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability";
    AMD's those of the CDNA 3 instruction set manual.
    """

    name: str
    triton: GPUTarget
    num_registers: int
    """32 bits each; AMD: per lane of one SIMD, vector and accumulation registers together."""
    max_shared: int
    """Bytes that a program may have. The compiler does not hold a kernel to it."""
    shared: int
    """Bytes of all programs together."""
    max_warps: int
    max_programs: int
    device: Device

    @property
    def limits(self) -> KernelLimits:
        """Of tiles, as a rank on this target has them."""
        return limits_of(int(self.triton.arch) // 10) if self.is_nvidia else AMD

    @property
    def is_nvidia(self) -> bool:
        return self.triton.backend == "cuda"

    def warps(self, num_warps: int) -> int:
        """Warps of this target for those of NVIDIA."""
        return warps(num_warps, self.triton.warp_size)

    def occupancy(self, num_warps: int, registers: int, shared: int) -> int:
        """Programs that a multiprocessor holds at once; 0: it cannot hold one."""
        if shared > self.max_shared:
            return 0
        if not self.is_nvidia:
            # four SIMDs share the waves of a program; registers are dealt in eights
            waves = min(self.max_warps // 4, self.num_registers // (ceil_div(max(registers, 1), 8) * 8))
            return min(waves * 4 // num_warps, self.shared // max(shared, 1), self.max_programs)
        # a warp's registers are dealt in 256s, and the system keeps 1 KiB of shared memory of every program for itself
        by_registers = self.num_registers // (ceil_div(max(registers, 1), 8) * 256 * num_warps)
        by_shared = self.shared // (shared + RESERVED)
        return min(by_registers, by_shared, self.max_warps // num_warps, self.max_programs)


RESERVED = 1024
KIB = 1024


def nvidia(capability: int, **limits: Any) -> Target:
    """A target whose multiprocessors have 65,536 registers."""
    return Target(f"sm_{capability}", GPUTarget("cuda", capability, 32), 65536, **limits)


SM_80 = nvidia(
    80,
    max_shared=163 * KIB,
    shared=164 * KIB,
    max_warps=64,
    max_programs=32,
    device=Device("A100 SXM 80 GB", 108, 2.039e12, 1.275e9),
)
SM_89 = nvidia(
    89,
    max_shared=99 * KIB,
    shared=100 * KIB,
    max_warps=48,
    max_programs=24,
    device=Device("L40S", 142, 0.864e12, 2.2e9),
)
SM_90 = nvidia(
    90,
    max_shared=227 * KIB,
    shared=228 * KIB,
    max_warps=64,
    max_programs=32,
    device=Device("H200", 132, 4.8e12, 1.755e9),
)
SM_100 = nvidia(
    100,
    max_shared=227 * KIB,
    shared=228 * KIB,
    max_warps=64,
    max_programs=32,
    device=Device("B200", 148, 8e12, 1.7e9),
)
GFX942 = Target(
    "gfx942",
    GPUTarget("hip", "gfx942", 64),
    num_registers=512,
    max_shared=64 * KIB,
    shared=64 * KIB,
    max_warps=32,
    max_programs=16,
    device=Device("MI300X", 304, 5.3e12, 1.9e9),
)
TARGETS = {target.name: target for target in (SM_80, SM_89, SM_90, SM_100, GFX942)}
"""By name, as compilers call them."""
