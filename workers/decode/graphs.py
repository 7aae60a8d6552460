"""Graphs of launches: a device does again what it was told once, without the host's telling it anew."""

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch

from longleaf.errors import LongleafError
from longleaf.units import human_bytes

cuda: Any = torch.cuda  # torch annotates these functions only in part
Work = Callable[[], None]
"""Has the device read and write memory of fixed address, and waits for nothing."""

log = logging.getLogger(__name__)


class CaptureRefused(LongleafError):
    """Why something cannot be captured."""


class Graphs(Protocol):
    """What captures."""

    def capture(self, work: Work) -> Work:
        """What has the device do again what `work` has it do, in the same memory. The work was done before: what is
        compiled, connected or set aside at the first use is there. Raises CaptureRefused."""
        ...


class CudaGraphs:
    """CUDA graphs on one device. Implements Graphs.

    What they take while they run they take from one pool, in turns: results go into memory that was there before.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._stream: Any = cuda.Stream(self._device)
        self._pool: Any = None
        self._graphs: list[Any] = []
        """Memory of a graph is given back with it."""

    def capture(self, work: Work) -> Work:
        graph = cuda.CUDAGraph()
        try:
            # threads that have nothing to do with it may ask the device while this one captures
            with cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                work()
        except Exception as error:  # whatever is launched may refuse, each library in its own way
            raise CaptureRefused(f"{type(error).__name__}: {error}") from error
        self._pool = self._pool or graph.pool()
        self._graphs.append(graph)
        return graph.replay


class MeteredGraphs:
    """Graphs that stop at a limit of memory. Implements Graphs."""

    def __init__(self, graphs: Graphs, reserved: Callable[[], int], most_bytes: int) -> None:
        """`reserved` tells how many bytes are taken by now."""
        self._graphs = graphs
        self._reserved = reserved
        self._limit = reserved() + most_bytes
        self._most_bytes = most_bytes

    def capture(self, work: Work) -> Work:
        if self._reserved() > self._limit:
            raise CaptureRefused(f"graphs have taken the {human_bytes(self._most_bytes)} that there are for them")
        return self._graphs.capture(work)


def cuda_graphs(device: str, most_bytes: int) -> Graphs:
    """Graphs that take at most about so many bytes of a device."""
    return MeteredGraphs(CudaGraphs(device), lambda: cuda.memory_reserved(device), most_bytes)
