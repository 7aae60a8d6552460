"""Staging of device tensors through host memory, for ranks that share a GPU: NCCL does not support shared GPUs.

Gloo does not make staging unnecessary, because its sends and receives support only host memory.
"""

import torch
from torch import Tensor

from longleaf.comm.base import Comm, Groups, ReduceOp, Transport


class StagedComm:
    """Copies each tensor to the host, passes it to another Comm, and copies the result to the tensor's device.

    Each operation synchronizes with the device. Results have separate memory.
    """

    def __init__(self, comm: Comm) -> None:
        self.transport: Transport = comm.transport
        self.rank = comm.rank
        self.world_size = comm.world_size
        self._comm = comm

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._comm.all_gather(on_host(tensor)).to(tensor.device)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        return self._comm.all_to_all(on_host(tensor)).to(tensor.device)

    def all_reduce(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        return self._comm.all_reduce(on_host(tensor), op).to(tensor.device)

    def broadcast(self, tensor: Tensor) -> Tensor:
        return self._comm.broadcast(on_host(tensor)).to(tensor.device)

    def permute(self, tensor: Tensor, to: int, source: int) -> Tensor:
        received = self._comm.permute(on_host(tensor), to, source)
        return tensor if source == self.rank else received.to(tensor.device)


def on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory. For GPU tensors the memory is pinned, which avoids a second copy. Torch caches pinned
    memory, so only the first copy of a size allocates."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor)


def staged(groups: Groups) -> Groups:
    """The groups with each Comm wrapped in a StagedComm, for device tensors."""
    world = StagedComm(groups.world)
    node = world if groups.node is groups.world else StagedComm(groups.node)
    return Groups(groups.topology, world, node, StagedComm(groups.rail) if groups.rail is not None else None)
