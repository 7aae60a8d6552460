"""CUDA graphs on the CPU: the torch operations of a function are recorded once and replayed in the same memory.

The rules are those of a CUDA graph. Python numbers and addresses are frozen; numbers in memory are read again at each
replay. Control flow must not depend on numbers in memory, because the host does not see them. A capture has no effect:
memory that existed before is restored, and memory that the function allocated is invalid before a replay and is not
preserved between replays. CaptureRefused is raised, with the reason, where a real capture would fail.

Not simulated: memory shared by graphs, streams, and torch operations that wait for the device although their schema
does not show it. Such operations are detected if models are known to use them.
"""

import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from longleaf.comm import Comm
from longleaf.comm.base import ReduceOp, Transport
from longleaf.kernels.gpu.launch import Kernel, Launcher
from workers.cuda_graphs.graphs import CaptureRefused, Work

Operation = Callable[[], object]

aten = torch.ops.aten
COMPOSITE = DispatchKey.CompositeImplicitAutograd
"""The dispatch key of operations that are composed of others."""
ROOM = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
"""Operations that allocate memory and write nothing."""
MASKED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
"""For a mask, the host asks the device for the number of selected elements; index tensors need no such wait."""
TO_HOST = {
    Tensor.__array__,
    Tensor.__format__,
    Tensor.__repr__,
    Tensor.cpu,
    Tensor.numpy,
    Tensor.tolist,
}
"""Methods that read numbers on the host, without a torch operation if the tensor is on the CPU."""
UNREAD = 0xFF
"""The fill byte of memory that must not be read: NaN as a float, -1 as an integer."""


class RecordedGraphs:
    """Implements workers.cuda_graphs.graphs.Graphs on CPU tensors. Each rank has a separate instance.

    `host` lists the tensors that represent host memory: a captured function must not use them.
    """

    def __init__(self, host: Iterable[Tensor] = ()) -> None:
        self.host = [*host]
        self._recording: OpRecorder | None = None

    def check_room(self) -> None:
        """Never raises: memory is not limited."""

    def release(self) -> None:
        """Does nothing: no memory is held."""

    def capture(self, work: Work) -> Work:
        """Returns a function that repeats `work` in the same memory. Raises CaptureRefused where a graph could not."""
        if self._recording is not None:
            raise CaptureRefused(f"a capture within a capture, at {site()}")
        recording = self._recording = OpRecorder(self.host)
        try:
            with torch.inference_mode(), recording, HostCalls(recording):
                work()
        finally:
            self._recording = None
            recording.undo()
        return recording.replay

    def launcher(self, inner: Launcher) -> Launcher:
        """Wraps a launcher so that launches in a captured function, which torch does not see, are recorded."""
        return RecordedLauncher(self, inner)

    def comm(self, inner: Comm) -> Comm:
        """Wraps a Comm so that exchanges in a captured function, which torch does not see, are recorded."""
        return RecordedComm(self, inner)

    def perform(self, operation: Operation, used: Sequence[Tensor]) -> None:
        """Runs an operation and records it during a capture. It may write all tensors in `used`."""
        if self._recording is None:
            operation()
        else:
            self._recording.perform(operation, used)

    def make(self, operation: Callable[[], Tensor], used: Sequence[Tensor]) -> Tensor:
        """Runs an operation that returns a new tensor; a capture records it and allocates memory for the result."""
        return operation() if self._recording is None else self._recording.make(operation, used)


class OpRecorder(TorchDispatchMode):
    """Records the device operations of a function while this mode is active, in order."""

    def __init__(self, host: Iterable[Tensor]) -> None:
        super().__init__()
        self._host = {place(tensor) for tensor in host}
        self._operations: list[Operation] = []
        self._made: dict[int, torch.UntypedStorage] = {}
        """Memory that the function allocated, by place."""
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """Memory that existed before and that the function wrote, with its previous content, by place."""
        self._is_paused = False
        self._takes_numbers = False

    def replay(self) -> None:
        """Runs all recorded operations again."""
        with torch.inference_mode():
            self._spoil()
            for operation in self._operations:
                operation()

    def undo(self) -> None:
        """Restores memory to its state before the capture."""
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()
        self._spoil()

    def perform(self, operation: Operation, used: Sequence[Tensor]) -> None:
        """See `RecordedGraphs`."""
        self._check_places(used, "a launch")
        self._save(used)
        with self.paused():
            operation()
        self._operations.append(operation)

    def make(self, operation: Callable[[], Tensor], used: Sequence[Tensor]) -> Tensor:
        """See `RecordedGraphs`."""
        self._check_places(used, "an exchange")
        with self.paused():
            made = operation().clone()
            retained = made.detach()
        self._own([made])
        self._operations.append(lambda: retained.copy_(operation()))
        return made

    @contextmanager
    def paused(self) -> Generator[None, None, None]:
        """Operations in the body are not recorded."""
        was_paused, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was_paused

    @contextmanager
    def taking_numbers(self) -> Generator[None, None, None]:
        """In the body, a Python number may be assigned, also through a mask: it is passed with the launch."""
        self._takes_numbers = True
        try:
            yield
        finally:
            self._takes_numbers = False

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused or func.namespace == "prim":
            return func(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), COMPOSITE):
            with self:
                return func._op_dk(COMPOSITE, *args, **kwargs)
        self._check(func, args, kwargs)
        self._save(written(func, args, kwargs))
        found = func(*args, **kwargs)
        self._note(func, args, kwargs, found)
        return found

    def _check(self, func: OpOverload[Any, Any], args: Any, kwargs: dict[str, Any]) -> None:
        """Raises CaptureRefused for operations that a graph could not hold."""
        name, packet, inputs = func.name(), func.overloadpacket, tensors((args, kwargs))
        if func.namespace != "aten":
            raise refused(name, "its effect is unknown")
        if packet is aten.lift_fresh and not (self._takes_numbers and inputs[0].dim() == 0):
            raise refused(name, "numbers of the host become a tensor")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise refused(name, "it draws random numbers")
        if packet is aten._grouped_mm and any(tensor.dtype != torch.bfloat16 for tensor in inputs[:2]):
            raise refused(name, "the host waits for its offsets, unless all is bfloat16")
        fills = self._takes_numbers and packet is aten.index_put_
        if not fills and depends_on_numbers(func, args, kwargs):
            raise refused(name, "the host waits for numbers of the device")
        self._check_places(inputs, name)

    def _check_places(self, used: Sequence[Tensor], name: str) -> None:
        if any(place(tensor) in self._host for tensor in used):
            raise refused(name, "it reads or writes memory of the host")

    def _save(self, tensors: Sequence[Tensor]) -> None:
        """Saves the content of memory before it is written for the first time."""
        for tensor in tensors:
            storage, where = tensor.untyped_storage(), place(tensor)
            if where not in self._made and where not in self._before:
                with self.paused():
                    self._before[where] = (storage, storage.clone())

    def _own(self, tensors: Sequence[Tensor]) -> None:
        self._made.update({place(tensor): tensor.untyped_storage() for tensor in tensors})

    def _spoil(self) -> None:
        for storage in self._made.values():
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(UNREAD)  # pyright: ignore[reportArgumentType]

    def _note(self, func: OpOverload[Any, Any], args: Any, kwargs: dict[str, Any], found: Any) -> None:
        known = {place(tensor) for tensor in tensors((args, kwargs))}
        fresh = [place(tensor) not in known for tensor in tensors(found)]
        self._own([tensor for tensor, is_fresh in zip(tensors(found), fresh, strict=True) if is_fresh])
        is_view = torch.Tag.inplace_view in func.tags or not (func._schema.is_mutable or any(fresh))
        if is_view or func.overloadpacket in ROOM:
            return
        with self.paused():  # detached copies of the arguments, because shapes may be changed in place later
            args, kwargs, outputs = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs, tensors(found)))
        self._operations.append(partial(repeat, func, args, kwargs, [*zip(outputs, fresh, strict=True)]))


def repeat(func: Any, args: Any, kwargs: dict[str, Any], outputs: Sequence[tuple[Tensor, bool]]) -> None:
    """Runs an operation again and copies its fresh results to their previous memory."""
    for result, (output, is_fresh) in zip(tensors(func(*args, **kwargs)), outputs, strict=True):
        if is_fresh:
            output.copy_(result)


class HostCalls(TorchFunctionMode):
    """Intercepts calls that operations do not show: reads of numbers on the host, and assignments of single numbers."""

    def __init__(self, recording: OpRecorder) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._recording.is_paused:
            if func in TO_HOST:
                raise refused(func.__name__, "the host waits for numbers of the device")
            if func is Tensor.__setitem__ and isinstance(args[2], int | float):
                with self._recording.taking_numbers():
                    return func(*args, **kwargs)
        return func(*args, **kwargs)


class RecordedLauncher:
    """A longleaf.kernels.gpu.launch.Launcher."""

    def __init__(self, graphs: RecordedGraphs, inner: Launcher) -> None:
        self._graphs = graphs
        self._inner = inner

    def __call__(self, kernel: Kernel, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        self._graphs.perform(partial(self._inner, kernel, grid, *args, **constants), tensors(args))


class RecordedComm:
    """Implements longleaf.comm.Comm."""

    def __init__(self, graphs: RecordedGraphs, inner: Comm) -> None:
        self.transport: Transport = inner.transport
        self.rank = inner.rank
        self.world_size = inner.world_size
        self._graphs = graphs
        self._inner = inner

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._exchange(self._inner.all_gather, tensor)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        return self._exchange(self._inner.all_to_all, tensor)

    def all_reduce(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        return self._exchange(self._inner.all_reduce, tensor, op)

    def broadcast(self, tensor: Tensor) -> Tensor:
        return self._exchange(self._inner.broadcast, tensor)

    def permute(self, tensor: Tensor, to: int, source: int) -> Tensor:
        return self._exchange(self._inner.permute, tensor, to, source)

    def _exchange(self, operation: Callable[..., Tensor], tensor: Tensor, *options: Any) -> Tensor:
        return self._graphs.make(partial(operation, tensor, *options), [tensor])


def tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def place(tensor: Tensor) -> int:
    """Identifies the memory of a tensor, for as long as that memory exists."""
    return tensor.untyped_storage()._cdata


def written(func: OpOverload[Any, Any], args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes to."""
    arguments = func._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    return tensors([given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write])


def depends_on_numbers(func: OpOverload[Any, Any], args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the host must wait for numbers of the device."""
    if func.overloadpacket in MASKED:
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors(args[1]))
    if func.overloadpacket is aten.repeat_interleave and kwargs.get("output_size") is not None:
        return False
    return bool({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags))


def refused(name: str, reason: str) -> CaptureRefused:
    return CaptureRefused(f"{name} at {site()}: {reason}")


def site() -> str:
    """The innermost stack frame outside torch and this module."""
    frame = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name != __name__ and name.split(".")[0] not in ("torch", "contextlib"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
