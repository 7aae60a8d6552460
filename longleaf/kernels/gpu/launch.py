"""How kernels are launched."""

from typing import Any, Protocol

Kernel = Any
"""A function of the device, as `triton.jit` makes it."""


class Launcher(Protocol):
    """Whoever counts launches passes for one."""

    def __call__(self, kernel: Kernel, grid: tuple[int, ...], *args: Any, **constants: Any) -> None: ...


def launch(kernel: Kernel, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Runs a kernel with as many programs as the grid has places, on the current device and stream; waits for none."""
    kernel[grid](*args, **constants)
