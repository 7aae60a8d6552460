"""The dispatch of torch operations on the simulated device: nothing is computed, and every operation is recorded.

Its tensors are FakeTensors of a custom device (PrivateUse1, made in Python: fake CUDA tensors need a torch that was
built with CUDA). Tensors on the CPU are real. Every number that is read from the device is 1 or True, and shapes that
depend on such numbers follow from ones.

A launch is one aten operation that writes device memory, or one kernel that is launched by a `CountingLauncher`. Views
and allocations are not launches. Operations that Python code registered with torch are run as that code.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.support.accelerator.events import Log

TYPE = "pretend"
DEVICE = f"{TYPE}:1"
"""Not the first device of its type, so that a tensor on the default device is noticed."""

aten = torch.ops.aten
NO_LAUNCH = {
    aten._unsafe_view,
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
}
"""Beside views, operations that write nothing."""
MASKED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
"""Where masks select, the host asks the device how many they are; indices it takes as they are."""


def register() -> None:
    """Makes the device known to torch, for the rest of the process."""
    if not hasattr(torch, TYPE):
        _setup_privateuseone_for_python_backend(TYPE)


def lies_there(value: object) -> bool:
    """Whether a value is a tensor on the pretended device."""
    return isinstance(value, Tensor) and value.device.type == TYPE


def is_there(device: object) -> bool:
    """Whether `device` is the simulated device, in any notation."""
    return device is not None and torch.device(device).type == TYPE  # pyright: ignore[reportArgumentType]


class Dispatch(TorchDispatchMode):
    """Records the device operations and returns their results as fake tensors."""

    def __init__(self, log: Log, fake: FakeTensorMode) -> None:
        """Tensors of another `fake` would come into this one as copies, each time that they are used."""
        super().__init__()
        self._log = log
        self._fake = fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        inputs = tensors((args, kwargs))
        if func.namespace == "prim" or not (any(map(lies_there, inputs)) or is_there(kwargs.get("device"))):
            return func(*args, **kwargs)
        if func.namespace != "aten":
            return self._run(body_of(func), args, kwargs)
        if func._can_decompose():
            return self._run(func.decompose, args, kwargs)
        if depends_on_numbers(func, inputs):
            return self._ask(func, args, kwargs)
        if func.overloadpacket in (aten._to_copy, aten.copy_):
            return self._copy(func, args, kwargs)
        return self._launch(func, args, kwargs, inputs)

    def _run(self, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the decomposition of an operation and records its operations."""
        with self:
            return body(*args, **kwargs)

    def _launch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Sequence[Tensor]) -> Any:
        for tensor in inputs:
            if tensor.device.type == "cpu" and tensor.dim():  # scalars are sent with the launch
                self._travel("to device", tensor, is_blocking=True)
        with self._fake:
            found = func(*args, **kwargs)
        outputs = tensors(found)
        self._allocate(outputs, inputs)
        is_launch = bool(outputs) or func._schema.is_mutable
        if is_launch and not func.is_view and func.overloadpacket not in NO_LAUNCH:
            self._log.add("launch", func.overloadpacket.__name__)
        return found

    def _copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Copies within the device are launches."""
        is_new = func.overloadpacket is aten._to_copy
        source: Tensor = args[0] if is_new else args[1]
        target: object = kwargs.get("device", source.device) if is_new else args[0].device
        is_blocking = not (kwargs.get("non_blocking") or (not is_new and len(args) > 2 and args[2]))
        if lies_there(source) and is_there(target):
            return self._launch(func, args, kwargs, tensors((args, kwargs)))
        if lies_there(source):
            self._travel("to host", source, is_blocking=is_blocking)
            found = torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
            return found if is_new else args[0].copy_(found)
        self._travel("to device", source, is_blocking=is_blocking)
        if not is_new:
            return args[0]
        with self._fake:
            found = torch.empty_like(source, dtype=kwargs.get("dtype"), device=kwargs["device"])
        self._allocate([found], ())
        return found

    def _travel(self, kind: Any, tensor: Tensor, *, is_blocking: bool) -> None:
        self._log.add(kind, "copy", tensor.nbytes)
        if is_blocking:
            self._log.add("wait", kind)

    def _allocate(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        known = {tensor.untyped_storage()._cdata for tensor in inputs if lies_there(tensor)}
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                known.add(storage._cdata)
                self._log.add("allocation", str(tensor.device), storage.nbytes())

    def _ask(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records a read of numbers from the device, for which the host waits. The numbers are ones."""
        name = func.overloadpacket.__name__
        self._log.add("wait", name)
        is_number = func.overloadpacket is aten._local_scalar_dense
        if not is_number:
            self._log.add("launch", name)
        device = next(tensor.device for tensor in tensors((args, kwargs)) if lies_there(tensor))
        args, kwargs = pytree.tree_map(ones, (args, kwargs))
        found = func(*args, **kwargs)
        with self._fake:
            return pytree.tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device=device), found)


def tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def ones(value: Any) -> Any:
    """A tensor of the pretended device as a real one."""
    return torch.ones(value.shape, dtype=value.dtype) if lies_there(value) else value


def depends_on_numbers(func: OpOverload[Any, Any], inputs: Sequence[Tensor]) -> bool:
    """Whether the host must read numbers from the device before it can continue."""
    if func.overloadpacket in MASKED:
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in inputs[1:])
    return bool({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags))


def body_of(func: OpOverload[Any, Any]) -> Callable[..., Any]:
    """The Python code that was registered as an operation."""
    name = func.name().removesuffix(".default")
    if name not in OPDEFS:
        raise NotImplementedError(f"{name}: its device requests are unknown, because it is not Python code")
    return OPDEFS[name]._init_fn


class Numbers(TorchFunctionMode):
    """Handles calls that are not dispatched: Python numbers copied from the CPU to a device, and addresses."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and is_there(kwargs.get("device")):
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if func is Tensor.new_tensor and lies_there(args[0]):
            own, data = args
            return torch.tensor(data, dtype=kwargs.get("dtype", own.dtype)).to(own.device)
        if func is Tensor.data_ptr and lies_there(args[0]):
            return args[0].untyped_storage()._cdata + args[0].storage_offset() * args[0].itemsize
        return func(*args, **kwargs)


def to_list(tensor: FakeTensor) -> Any:
    """Tensor.tolist: all numbers in one copy."""
    return tensor.to("cpu").tolist()
