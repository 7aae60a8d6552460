"""Graphs of launches: a device does again what it was told once, without the host's telling it anew."""

import contextlib
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from longleaf.errors import LongleafError
from longleaf.formatting import human_bytes

cuda: Any = torch.cuda  # torch annotates these functions only in part
T = TypeVar("T")
Agree = Callable[[bool], bool]
"""Whether all ranks say yes; they ask at the same time."""
Work = Callable[[], None]
"""Has the device read and write memory of fixed address, and waits for nothing."""


class CaptureRefused(LongleafError):
    """Why something cannot be captured."""


class Graphs(Protocol):
    """What captures."""

    def check_room(self) -> None:
        """Raises CaptureRefused where there is no memory for more."""
        ...

    def capture(self, work: Work) -> Work:
        """What has the device do again what `work` has it do, in the same memory. The work was done before: what is
        compiled, connected or set aside at the first use is there. Raises CaptureRefused."""
        ...

    def release(self) -> None:
        """Gives back all that was captured, which may not be done again. Groups of ranks wait for it as they end."""
        ...


class CudaGraphs:
    """CUDA graphs on one device, in about so many bytes of its memory. Implements Graphs.

    What they take while they run they take from one pool, in turns: results go into memory that was there before.
    """

    def __init__(self, device: str, most_bytes: int) -> None:
        self._device = torch.device(device)
        self._stream: Any = cuda.Stream(self._device)
        self._pool: Any = cuda.graph_pool_handle()
        self._graphs: list[Any] = []
        """Memory of a graph is given back with it."""
        self._most_bytes = most_bytes
        self._num_bytes = 0
        """That they have taken."""

    def check_room(self) -> None:
        """See `Graphs`."""
        if self._num_bytes > self._most_bytes:
            raise CaptureRefused(f"graphs have taken the {human_bytes(self._most_bytes)} that there are for them")

    def capture(self, work: Work) -> Work:
        """See `Graphs`."""
        graph, before = cuda.CUDAGraph(), self._reserved()
        try:
            # where a capture is refused, torch leaves the capture's own stream the current one
            with cuda.stream(cuda.current_stream(self._device)):
                self._record(graph, work)
        except Exception as error:  # whatever is launched may refuse, each library in its own way
            with contextlib.suppress(RuntimeError):  # torch has no public name for it: it goes on as if it captured
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)  # pyright: ignore
            first = error.__context__ or error  # what ends a capture is refused for what was refused before
            raise CaptureRefused(f"{type(first).__name__}: {first}") from error
        self._num_bytes += self._reserved() - before
        self._graphs.append(graph)
        return graph.replay

    def _record(self, graph: Any, work: Work) -> None:
        # threads that have nothing to do with it may ask the device while this one captures
        with cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()

    def _reserved(self) -> int:
        """Bytes that torch has taken, without those that nobody uses."""
        cuda.empty_cache()
        return cuda.memory_reserved(self._device)

    def release(self) -> None:
        """See `Graphs`."""
        while self._graphs:
            self._graphs.pop().reset()
        self._num_bytes = 0
        self._pool = cuda.graph_pool_handle()  # torch takes no pool again whose graphs are all gone


class SharedGraphs:
    """Graphs of work that all ranks do together: either all of them capture it, or none. Implements Graphs."""

    def __init__(self, graphs: Graphs, agree: Agree) -> None:
        self._graphs = graphs
        self._agree = agree

    def check_room(self) -> None:
        """See `Graphs`."""
        self._together(self._graphs.check_room)

    def capture(self, work: Work) -> Work:
        """See `Graphs`."""
        return self._together(lambda: self._graphs.capture(work))

    def release(self) -> None:
        """See `Graphs`."""
        self._graphs.release()

    def _together(self, act: Callable[[], T]) -> T:
        refusal, made = None, None
        try:
            made = act()
        except CaptureRefused as error:
            refusal = error
        if not self._agree(refusal is None):
            raise refusal or CaptureRefused("another rank cannot capture it")
        return made  # pyright: ignore[reportReturnType]
