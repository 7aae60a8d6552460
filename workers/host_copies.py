"""Numbers on their way between the host and a device: on the way there nobody waits, on the way back once."""

import torch
from torch import Tensor


def to_device(host: Tensor, device: str) -> Tensor:
    """What the host has, on the device, where it is after all that the device was told before. On a CPU it is the
    tensor itself."""
    if device == "cpu":
        return host
    return (host.pin_memory() if device.startswith("cuda") else host).to(device, non_blocking=True)


def pinned(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """Zeros in memory of the host from which a device copies, and into which it does, while the host goes on."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.startswith("cuda"))


class DeviceEvent:
    """The end of what a device was told so far. A CPU is never behind."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type != "cpu":
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_past(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Waits for it, once."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None


class AsyncHostCopy:
    """A tensor that has begun to come to the host, behind what its device was told before."""

    def __init__(self, tensor: Tensor, host: Tensor | None = None) -> None:
        """With `host` it comes there; what lies on a CPU stays where it is otherwise."""
        if host is None and tensor.device.type != "cpu":
            host = pinned(*tensor.shape, dtype=tensor.dtype, device=str(tensor.device))
        self._host = tensor if host is None else host.copy_(tensor, non_blocking=True)
        self.arrival = DeviceEvent(tensor.device)

    def wait(self) -> Tensor:
        """The tensor, on the host."""
        self.arrival.wait()
        return self._host
