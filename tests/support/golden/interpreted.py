"""Ranks whose kernels are those of GPUs, on CPU tensors: for Triton's interpreter."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import Lock
from typing import Any
from unittest.mock import patch

from longleaf.kernels import registry
from longleaf.kernels.backend import Backend
from longleaf.kernels.gpu.launch import launch

_interpreter = Lock()
"""There is one interpreter in a process, and ranks are threads."""


class Launches:
    """A launcher that records its launches."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        with _interpreter:
            self.names.add(kernel.fn.__name__)
            launch(kernel, grid, *args, **constants)


@contextmanager
def served_by(make: Callable[[Launches], Backend]) -> Generator[Launches, None, None]:
    """Ranks that load within the block use such backends. These are not probed: it would take a minute each, and the
    interpreter truncates where a GPU rounds to bfloat16.
    """
    launches = Launches()
    with patch.object(registry, "choose", lambda *_: make(launches)):
        yield launches


def use_kernels(rank: Any, kernels: Any) -> None:
    """Lets a rank compute with other kernels in the rest of its epoch."""
    rank.backend = kernels
    rank.epoch._decode._model_runner.backend = kernels
