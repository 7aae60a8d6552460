"""Launches of Triton kernels, noted and not done."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tests.support.accelerator.dispatch import lies_there
from tests.support.accelerator.events import Log

Grid = Sequence[int] | Callable[[dict[str, Any]], Sequence[int]]


class CountingLauncher:
    """The launcher of a backend. Its kernels write nothing."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def __call__(self, kernel: Any, grid: Grid, *args: Any, **constants: Any) -> None:
        """Raises ValueError for the arguments that Triton would refuse: tensors on another device, and a grid other
        than one to three positive numbers.
        """
        name = name_of(kernel)
        sizes = tuple(grid(constants) if callable(grid) else grid)
        if not 1 <= len(sizes) <= 3 or not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError(f"{name}: a grid of {sizes}")
        for i, argument in enumerate((*args, *constants.values())):
            if isinstance(argument, Tensor) and not lies_there(argument):
                raise ValueError(f"{name}: argument {i} lies on {argument.device}")
        self._log.add("launch", name)


def name_of(kernel: Any) -> str:
    """The name of the function of a kernel, below any wrappers."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel.__name__
