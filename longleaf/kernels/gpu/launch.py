"""How kernels are launched."""

from collections.abc import Callable
from typing import Any

import torch

Kernel = Any
"""A function of the device, as `triton.jit` makes it."""


Launcher = Callable[..., None]
"""Runs a kernel with a grid, arguments and constants, as `launch` does. Others count or simulate launches."""


def launch(kernel: Kernel, grid: tuple[int, ...], *args: Any, num_warps: int, **constants: Any) -> None:
    """Runs a kernel with as many programs as the grid has places, on the current device and stream; waits for none."""
    lanes = 64 if torch.version.hip else 32
    kernel[grid](*args, **constants, num_warps=warps(num_warps, lanes))


def warps(num_warps: int, lanes: int) -> int:
    """Warps of so many lanes that are as many threads as those of 32 lanes: AMD's have 64."""
    return max(1, num_warps * 32 // lanes)
