"""CUDA graphs: recorded launches that a device replays without launching each kernel again."""

import contextlib
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from longleaf.errors import LongleafError
from longleaf.formatting import human_bytes

cuda: Any = torch.cuda  # torch annotates these functions only in part
T = TypeVar("T")
Agree = Callable[[bool], bool]
"""Whether all ranks pass true. A collective: all ranks call it at the same time."""
Work = Callable[[], None]
"""Launches operations that read and write memory of fixed address, without waiting."""


class CaptureRefused(LongleafError):
    """Raised when work cannot be captured."""


class Graphs(Protocol):
    """Captures work for replay."""

    def check_room(self) -> None:
        """Raises CaptureRefused if there is no memory for another graph."""
        ...

    def capture(self, work: Work) -> Work:
        """Returns a function that replays `work` in the same memory. The work must have run before, so that one-time
        compilation, connections and allocations are done. Raises CaptureRefused.
        """
        ...

    def release(self) -> None:
        """Releases all captured graphs, which must not be replayed afterwards. Process groups wait for the release when
        they end.
        """
        ...


class CudaGraphs:
    """CUDA graphs on one device, limited to approximately `most_bytes` of its memory. Implements Graphs.

    The graphs share one pool for temporary memory and must not run concurrently. Results go to memory allocated before.
    """

    def __init__(self, device: str, most_bytes: int) -> None:
        self._device = torch.device(device)
        self._stream: Any = cuda.Stream(self._device)
        self._pool: Any = cuda.graph_pool_handle()
        self._graphs: list[Any] = []
        """A graph's memory is released with the graph."""
        self._most_bytes = most_bytes
        self._num_bytes = 0
        """Bytes taken by the graphs."""

    def check_room(self) -> None:
        """See `Graphs`."""
        if self._num_bytes > self._most_bytes:
            raise CaptureRefused(f"graphs have used their limit of {human_bytes(self._most_bytes)}")

    def capture(self, work: Work) -> Work:
        """See `Graphs`."""
        graph, before = cuda.CUDAGraph(), self._reserved()
        try:
            # after a refused capture, torch leaves the capture stream current
            with cuda.stream(cuda.current_stream(self._device)):
                self._record(graph, work)
        except Exception as error:  # any launch may fail, with errors specific to its library
            # no public torch API: without it the allocator stays in capture mode
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)  # pyright: ignore
            first = error.__context__ or error  # the end of the capture fails as a consequence of the first error
            raise CaptureRefused(f"{type(first).__name__}: {first}") from error
        self._num_bytes += self._reserved() - before
        self._graphs.append(graph)
        return graph.replay

    def _record(self, graph: Any, work: Work) -> None:
        # other threads may call CUDA APIs during the capture
        with cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()

    def _reserved(self) -> int:
        """Bytes reserved by torch, without unused cached memory."""
        cuda.empty_cache()
        return cuda.memory_reserved(self._device)

    def release(self) -> None:
        """See `Graphs`."""
        while self._graphs:
            self._graphs.pop().reset()
        self._num_bytes = 0
        self._pool = cuda.graph_pool_handle()  # torch does not reuse a pool after all of its graphs are gone


class CollectiveGraphs:
    """Captures collective work: either all ranks capture it, or none does."""

    def __init__(self, graphs: Graphs, agree: Agree) -> None:
        self._graphs = graphs
        self._agree = agree

    def check_room(self) -> None:
        """See `Graphs`."""
        self._together(self._graphs.check_room)

    def capture(self, work: Work) -> Work:
        """See `Graphs`."""
        return self._together(lambda: self._graphs.capture(work))

    def _together(self, act: Callable[[], T]) -> T:
        refusal, made = None, None
        try:
            made = act()
        except CaptureRefused as error:
            refusal = error
        if not self._agree(refusal is None):
            raise refusal or CaptureRefused("another rank cannot capture it")
        return made  # pyright: ignore[reportReturnType]
