"""Copies between the host and a device: to the device without waiting, to the host with a single wait."""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(host: Tensor, device: str) -> Tensor:
    """Copies a tensor to the device, ordered after earlier work of the stream. On a CPU, returns the tensor itself."""
    if device == "cpu":
        return host
    return (host.pin_memory() if device.startswith("cuda") else host).to(device, non_blocking=True)


def numbers_on(device: str, numbers: Sequence[int]) -> Tensor:
    """The numbers as int64 on the device, see `to_device`."""
    return to_device(torch.tensor(numbers, dtype=torch.long), device)


def pinned(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """Zeros in host memory, pinned so that a GPU can copy from and to it asynchronously."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.startswith("cuda"))


class DeviceEvent:
    """The completion of the work launched on a device before this event was created. On a CPU it is always past."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type != "cpu":
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_past(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Waits for the event. Later calls return immediately."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None


class AsyncHostCopy:
    """A tensor whose copy to the host has begun, ordered after earlier work of its device."""

    def __init__(self, tensor: Tensor, host: Tensor | None = None) -> None:
        """Copies to `host` if that is given; otherwise a tensor on a CPU is not copied."""
        if host is None and tensor.device.type != "cpu":
            host = pinned(*tensor.shape, dtype=tensor.dtype, device=str(tensor.device))
        self._host = tensor if host is None else host.copy_(tensor, non_blocking=True)
        self.arrival = DeviceEvent(tensor.device)

    def wait(self) -> Tensor:
        """Waits for the copy. Returns the tensor on the host."""
        self.arrival.wait()
        return self._host
