"""Numbers on their way between the host and a device: on the way there nobody waits, on the way back once."""

import torch
from torch import Tensor


def to_device(host: Tensor, device: str) -> Tensor:
    """What the host has, on the device, where it is after all that the device was told before. On a CPU it is the
    tensor itself."""
    if device == "cpu":
        return host
    return (host.pin_memory() if device.startswith("cuda") else host).to(device, non_blocking=True)


class ToHost:
    """A tensor that has begun to come to the host, behind what its device was told before."""

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if tensor.device.type == "cpu":
            self._host = tensor
            return
        # only into pinned memory do GPUs copy while the host goes on
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._host.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def wait(self) -> Tensor:
        """The tensor, on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host
