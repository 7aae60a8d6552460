"""Ranks as processes over torch.distributed: gloo on CPUs, NCCL on GPUs, the same code.

CPU ranks of one machine meet in shared memory instead, where all ranks of the world can.
"""

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed
from torch import Tensor

from longleaf.comm.base import Comm, Groups, ReduceOp, Transfer, Transport
from longleaf.comm.shared_memory import SharedMemoryComm, Word, share_memory
from longleaf.topology import Topology

dist: Any = torch.distributed  # torch annotates these functions only in part
Store = Any  # torch.distributed.Store
ProcessGroup = Any  # torch.distributed.ProcessGroup

OPS = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}


class ProcessGroupComm:
    """One rank's end of a process group."""

    def __init__(self, group: ProcessGroup) -> None:
        self.rank: int = dist.get_rank(group)
        self.world_size: int = dist.get_world_size(group)
        self.transport: Transport = "gloo" if dist.get_backend(group) == "gloo" else "nccl"
        self._group = group

    def all_gather(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        if self.transport == "gloo":
            # measured on two cores with four ranks: gloo's all-to-all of copies is 3 times faster than its all-gather
            return self.all_to_all(tensor[None].expand(self.world_size, *tensor.shape))
        out = tensor.new_empty((self.world_size, *tensor.shape))
        dist.all_gather_single(out, tensor, group=self._group)
        return out

    def all_to_all(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        out = torch.empty_like(tensor)
        dist.all_to_all_single(out, tensor, group=self._group)
        return out

    def all_reduce(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        out = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, op=OPS[op], group=self._group)
        return out

    def broadcast(self, tensor: Tensor) -> Tensor:
        out = tensor.contiguous()
        dist.broadcast(out, group_src=0, group=self._group)
        return out

    def permute(self, tensor: Tensor, to: int, source: int) -> Tensor:
        tensor = tensor.contiguous()
        out = tensor if source == self.rank else torch.empty_like(tensor)
        self._start(tensor if to != self.rank else None, out if source != self.rank else None, to, source).wait()
        return out

    def start_permute(self, tensor: Tensor, out: Tensor, to: int, source: int) -> Transfer:
        return self._start(tensor if tensor.numel() else None, out if out.numel() else None, to, source)

    def _start(self, sent: Tensor | None, received: Tensor | None, to: int, source: int) -> Transfer:
        operations: list[Any] = []
        if received is not None:
            # first: gloo sends both ways of a pair at once only when both ends wait for data already (measured: twice
            # as fast over a cable of 1 Gbit/s)
            operations.append(dist.P2POp(dist.irecv, received, group=self._group, group_peer=source))
        if sent is not None:
            operations.append(dist.P2POp(dist.isend, sent, group=self._group, group_peer=to))
        works: list[Any] = dist.batch_isend_irecv(operations) if operations else []
        return Transfer(works)


def fastest_transport(device: str) -> Transport:
    """What carries tensors of a device between processes best."""
    return "nccl" if device.startswith("cuda") else "shared_memory"


class ProcessGroups:
    """Owns the process groups of one epoch: world, nodes and rails, made in the same order on every rank."""

    def __init__(
        self,
        rank: int,
        topology: Topology,
        store: Store,
        *,
        epoch: int,
        timeout: float,
        transport: Transport,
    ) -> None:
        """Joins the groups; blocks until all ranks have. `timeout` in seconds bounds every operation.

        `transport` must be the same on every rank. By `shared_memory` the ranks of one machine meet there if all can,
        and the others over gloo.
        """
        dist.init_process_group(
            "nccl" if transport == "nccl" else "gloo",
            store=dist.PrefixStore(f"epoch-{epoch}", store),
            rank=rank,
            world_size=topology.world_size,
            timeout=timedelta(seconds=timeout),
        )
        self._shared: SharedMemoryComm | None = None
        nodes = topology.node_groups
        if transport == "shared_memory" and len(nodes) < topology.world_size:
            own = next(ranks for ranks in nodes if rank in ranks)
            self._shared = share_memory(own, rank, _tell_all, epoch=epoch, timeout=timeout)
        self.groups = make_groups(rank, topology, self._shared, timeout=timeout)

    def close(self) -> None:
        """Leaves the groups."""
        if self._shared is not None:
            self._shared.close()
        dist.destroy_process_group()


def make_groups(rank: int, topology: Topology, shared: SharedMemoryComm | None = None, *, timeout: float) -> Groups:
    """World, node and rail groups of a rank, inside the process group that was initialised.

    All ranks must call it at the same time. `shared` is how the ranks of this machine meet; None leaves it to torch.
    `timeout` in seconds bounds the operations in nodes and on rails.
    """
    world = ProcessGroupComm(dist.group.WORLD)
    if len(topology.node_groups) == 1:
        return Groups(topology, shared or world, shared or world, None)
    node: Comm | None = shared or _own(rank, topology.node_groups, timeout)
    assert node is not None, "every rank has a machine"
    return Groups(topology, world, node, _own(rank, topology.full_rails, timeout))


def _own(rank: int, groups: Sequence[Sequence[int]], timeout: float) -> ProcessGroupComm | None:
    """Makes process groups of these ranks; the one that `rank` belongs to."""
    made = [dist.new_group(list(group), timeout=timedelta(seconds=timeout)) for group in groups]
    return next((ProcessGroupComm(g) for g, ranks in zip(made, groups, strict=True) if rank in ranks), None)


def _tell_all(word: Word) -> Sequence[Word]:
    """The words of all ranks of the world, for this rank's own. As msgpack: what a rank sends must not be able to run
    code on another, and torch's own exchange of objects pickles them."""
    world = ProcessGroupComm(dist.group.WORLD)
    sent = torch.frombuffer(bytearray(msgspec.msgpack.encode(word)), dtype=torch.uint8)
    sizes = [int(size) for size in world.all_gather(torch.tensor([len(sent)]))]
    padded = sent.new_zeros(max(sizes))
    padded[: len(sent)] = sent
    rows = world.all_gather(padded).numpy()
    return [msgspec.msgpack.decode(row[:size].tobytes(), type=Word) for row, size in zip(rows, sizes, strict=True)]


def open_store(host: str) -> Store:
    """Rank 0's store on a free port of `host`, an IP address; it must be kept alive as long as the group.

    Raises OSError where nobody can listen there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    # Left to itself the store would listen on all addresses of the machine. It closes the socket that it is given.
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def connect_store(host: str, port: int) -> Store:
    """The store of rank 0 as the other ranks see it."""
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
