"""Process groups over torch.distributed: gloo on CPUs, NCCL on GPUs.

CPU ranks of one machine use shared memory instead, if all ranks of the world can. Ranks that share a GPU, which NCCL
does not support, use gloo, and their tensors are staged through host memory.
"""

import logging
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed
from torch import Tensor

from longleaf.comm.base import Comm, Groups, ReduceOp, Transport
from longleaf.comm.shared_memory import JoinMessage, SharedMemoryComm, share_memory
from longleaf.comm.staged import staged
from longleaf.errors import StartError
from longleaf.topology import Topology

dist: Any = torch.distributed  # torch annotates these functions only in part
cuda: Any = torch.cuda
Store = Any  # torch.distributed.Store
ProcessGroup = Any  # torch.distributed.ProcessGroup

CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 300.0
"""Timeout for connecting to the store, which is already open or gone; and default timeout of its operations."""
OPS = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}

log = logging.getLogger(__name__)


class ProcessGroupComm:
    """One rank's handle of a process group."""

    def __init__(self, group: ProcessGroup) -> None:
        self.rank: int = dist.get_rank(group)
        self.world_size: int = dist.get_world_size(group)
        self.transport: Transport = "gloo" if dist.get_backend(group) == "gloo" else "nccl"
        self.num_exchanges = 0
        """Operations started so far, without replays of captured ones."""
        self._group = group

    def all_gather(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        if self.transport == "gloo":
            # measured on two cores with four ranks: gloo's all-to-all of copies is 3 times faster than its all-gather
            return self.all_to_all(tensor[None].expand(self.world_size, *tensor.shape))
        self.num_exchanges += 1
        out = tensor.new_empty((self.world_size, *tensor.shape))
        dist.all_gather_single(out, tensor, group=self._group)
        return out

    def all_to_all(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        self.num_exchanges += 1
        out = torch.empty_like(tensor)
        dist.all_to_all_single(out, tensor, group=self._group)
        return out

    def all_reduce(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        self.num_exchanges += 1
        out = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, op=OPS[op], group=self._group)
        return out

    def broadcast(self, tensor: Tensor) -> Tensor:
        self.num_exchanges += 1
        out = tensor.contiguous()
        dist.broadcast(out, group_src=0, group=self._group)
        return out

    def permute(self, tensor: Tensor, to: int, source: int) -> Tensor:
        tensor = tensor.contiguous()
        out = tensor if source == self.rank else torch.empty_like(tensor)
        self.num_exchanges += 1
        operations: list[Any] = []
        if source != self.rank:
            # First, because gloo sends in both directions of a pair concurrently only if both ends already wait for
            # data (measured: twice as fast over a cable of 1 Gbit/s)
            operations.append(dist.P2POp(dist.irecv, out, group=self._group, group_peer=source))
        if to != self.rank:
            operations.append(dist.P2POp(dist.isend, tensor, group=self._group, group_peer=to))
        works: list[Any] = dist.batch_isend_irecv(operations) if operations else []
        for work in works:
            work.wait()
        return out


class TransportChoice(NamedTuple):
    """Transport between the ranks, and the device of this rank's tensors."""

    transport: Transport
    """The same on every rank."""
    device: str = "cpu"


def agree_on_carrier(rank: int, world_size: int, store: Store, device: str, *, timeout: float) -> TransportChoice:
    """The best transport between the ranks, each of which publishes its device in the store.

    All ranks of an epoch must call it, with the epoch's store; it waits for them. Raises torch's DistStoreError after
    `timeout` seconds.
    """
    store.set(f"place-{rank}", place_of(device))
    keys = [f"place-{other}" for other in range(world_size)]
    store.wait(keys, timedelta(seconds=timeout))
    transport = fastest_transport([place.decode() for place in store.multi_get(keys)])
    if transport == "gloo" and rank == 0:
        log.warning("ranks share a GPU or have none: tensors are sent through host memory with gloo (slower)")
    return TransportChoice(transport, device)


def place_of(device: str) -> str:
    """Unique identifier of the GPU across machines, equal only for ranks that share it; `cpu` for CPUs."""
    return str(cuda.get_device_properties(device).uuid) if device.startswith("cuda") else "cpu"


def fastest_transport(places: Sequence[str]) -> Transport:
    """The best transport between ranks at these places: NCCL if each has its own GPU."""
    if set(places) == {"cpu"}:
        return "shared_memory"
    return "nccl" if "cpu" not in places and len(set(places)) == len(places) else "gloo"


def epoch_store(store: Store, epoch: int) -> Store:
    """The part of rank 0's store that belongs to an epoch."""
    return dist.PrefixStore(f"epoch-{epoch}", store)


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
        carrier: TransportChoice,
    ) -> None:
        """Joins the groups; blocks until all ranks have. `timeout` in seconds bounds every operation.

        With `shared_memory` the ranks of one machine use it if all can, and otherwise gloo. For NCCL the carrier's
        device must be the current one.
        """
        self._is_nccl = carrier.transport == "nccl"
        self._closing = threading.Lock()
        self._has_left = False
        self._shared: SharedMemoryComm | None = None
        _init(
            "nccl" if self._is_nccl else "gloo",
            store=epoch_store(store, epoch),
            rank=rank,
            world_size=topology.world_size,
            timeout=timedelta(seconds=timeout),
            # creates the communicator now, and lets those of nodes and rails be split off it
            device_id=torch.device(carrier.device) if self._is_nccl else None,
        )
        try:
            self.groups = self._make(rank, topology, epoch, timeout, carrier)
        except BaseException:
            self.abort()
            raise

    def _make(self, rank: int, topology: Topology, epoch: int, timeout: float, carrier: TransportChoice) -> Groups:
        nodes = topology.node_groups
        if carrier.transport == "shared_memory" and len(nodes) < topology.world_size:
            own = next(ranks for ranks in nodes if rank in ranks)
            self._shared = share_memory(own, rank, _broadcast_choice, epoch=epoch, timeout=timeout)
        groups = make_groups(rank, topology, self._shared, timeout=timeout)
        comms = dict.fromkeys((groups.world, groups.node, groups.rail))
        self._counting = [comm for comm in comms if isinstance(comm, ProcessGroupComm | SharedMemoryComm)]
        if self._is_nccl:
            connect(groups, carrier.device)
            return groups
        return groups if carrier.device == "cpu" else staged(groups)

    @property
    def num_exchanges(self) -> int:
        """Exchanges that this rank has entered so far, in all groups; thread-safe."""
        return sum(comm.num_exchanges for comm in self._counting)

    def fence(self) -> None:
        """Makes this rank raise when it waits for others, in shared memory and on a GPU. Thread-safe. Gloo is only
        freed through its sockets: see `longleaf.comm.abort`."""
        if self._shared is not None:
            self._shared.fence()
        if self._is_nccl:
            self.abort()

    def close(self) -> None:
        """Leaves the groups in order, which all ranks must do at the same time: NCCL waits for pending operations."""
        self._leave(dist.destroy_process_group)

    def abort(self) -> None:
        """Leaves the groups although other ranks may be lost: NCCL aborts the pending operations of all groups without
        waiting. Gloo and shared memory never wait. Idempotent."""
        # private API of torch without a public equivalent: aborting the groups in sequence could wait for an operation
        # that hangs in the next one
        self._leave(dist.distributed_c10d._abort_process_group if self._is_nccl else dist.destroy_process_group)

    def _leave(self, leave: Callable[[], None]) -> None:
        with self._closing:
            if self._has_left:
                return
            self._has_left = True
            if self._shared is not None:
                self._shared.close()
            leave()


def _init(backend: str, **options: Any) -> None:
    """Creates torch's first group, and restores the previous state on failure and at the end."""
    hook = sys.excepthook
    try:
        dist.init_process_group(backend, **options)
    except BaseException:
        # Private API of torch without a public equivalent. The counter is part of the keys in the store; without the
        # reset, later keys would differ from those of ranks for which the call did not fail.
        dist.distributed_c10d._world.group_count = 0
        raise
    finally:
        sys.excepthook = hook  # torch wraps it each time


def make_groups(rank: int, topology: Topology, shared: SharedMemoryComm | None = None, *, timeout: float) -> Groups:
    """World, node and rail groups of a rank, inside the initialised process group.

    All ranks must call it at the same time. `shared` is the Comm of this machine's ranks; None uses torch. `timeout` in
    seconds bounds the operations in nodes and on rails.
    """
    world = ProcessGroupComm(dist.group.WORLD)
    if len(topology.node_groups) == 1:
        return Groups(topology, shared or world, shared or world, None)
    node: Comm | None = shared or _own(rank, topology.node_groups, timeout)
    assert node is not None, "every rank has a machine"
    return Groups(topology, world, node, _own(rank, topology.full_rails, timeout))


def connect(groups: Groups, device: str) -> None:
    """Makes the ranks of each group exchange a number, the groups in the same order on every rank. Raises StartError if
    a wrong number arrives.

    The first point-to-point batch in a group must include all of its ranks (see torch.distributed.batch_isend_irecv),
    and in a merge some have nothing to send: here each sends to the next. Connection failures show here instead of in a
    step.
    """
    comms = [comm for comm in (groups.world, groups.node, groups.rail) if comm is not None]
    for comm in dict.fromkeys(comms):
        rank, size = comm.rank, comm.world_size
        if size == 1:
            continue
        number = torch.tensor([rank], device=device)
        received = comm.permute(number, (rank + 1) % size, (rank - 1) % size)
        if (total := int(comm.all_reduce(received, "sum"))) != sum(range(size)):
            raise StartError(
                f"device: data is corrupted between the GPUs of {size} ranks: the sum of their numbers is {total}"
            )


def _own(rank: int, groups: Sequence[Sequence[int]], timeout: float) -> ProcessGroupComm | None:
    """Creates process groups of these ranks; returns the one of `rank`."""
    made = [dist.new_group(list(group), timeout=timedelta(seconds=timeout)) for group in groups]
    return next((ProcessGroupComm(g) for g, ranks in zip(made, groups, strict=True) if rank in ranks), None)


def _broadcast_choice(word: JoinMessage) -> Sequence[JoinMessage]:
    """The messages of all ranks of the world. Encoded as msgpack, because torch's own exchange of objects uses pickle,
    which allows a rank to run code on another."""
    world = ProcessGroupComm(dist.group.WORLD)
    sent = torch.frombuffer(bytearray(msgspec.msgpack.encode(word)), dtype=torch.uint8)
    sizes = [int(size) for size in world.all_gather(torch.tensor([len(sent)]))]
    padded = sent.new_zeros(max(sizes))
    padded[: len(sent)] = sent
    rows = world.all_gather(padded).numpy()
    return [
        msgspec.msgpack.decode(row[:size].tobytes(), type=JoinMessage) for row, size in zip(rows, sizes, strict=True)
    ]


def open_store(host: str) -> Store:
    """Rank 0's store on a free port of `host`, an IP address; it must be kept alive as long as the group.

    Raises OSError if listening fails.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    # By default the store would listen on all addresses of the machine. It takes ownership of the socket.
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def connect_store(host: str, port: int) -> Store:
    """A connection to rank 0's store. Raises torch's DistNetworkError if it is unreachable."""
    try:  # torch would repeat a refused connection until its timeout, where no abort reaches it
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise dist.DistNetworkError(f"rank 0 is not reachable at {host} port {port}: {error}") from error
    connected = timedelta(seconds=CONNECT_SECONDS)
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=connected)
    store.set_timeout(timedelta(seconds=ANSWER_SECONDS))
    return store
