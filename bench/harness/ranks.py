"""Ranks as processes of this machine on simulated nodes, and their joint measurements.

Every rank computes on one thread. Ranks of one node and ranks of different nodes are both processes; only the network
between them differs.
"""

import os
import pickle
import random
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed
import torch.multiprocessing

from bench.harness.async_comm import AsyncGroupComm
from bench.harness.hosts import Network, enter
from bench.harness.interfaces import sent_bytes
from longleaf.comm import Groups
from longleaf.comm.process_group import ProcessGroups, TransportChoice, make_groups
from longleaf.config import apply_environment, rank_environment
from longleaf.topology import Topology

TIMEOUT = 600.0
"""Seconds that a collective may take."""

dist: Any = torch.distributed  # torch annotates these modules only in part
mp: Any = torch.multiprocessing
Name = TypeVar("Name", bound=Hashable)
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Placement:
    """Which ranks run where. The network has one host for all nodes, or as many hosts as there are nodes."""

    world_size: int
    num_simulated: int
    """Nodes to deal the ranks among, of sizes that differ by one at most."""
    network: Network
    device: str = "cpu"
    nodes: tuple[str, ...] = ()
    """The machine of each rank, where they are not simulated."""

    @property
    def topology(self) -> Topology:
        return Topology(self.nodes or tuple(f"node-{self.node(rank)}" for rank in range(self.world_size)))

    @property
    def num_nodes(self) -> int:
        return len(set(self.nodes)) or self.num_simulated

    @property
    def counting_ranks(self) -> tuple[int, ...]:
        """The first rank of each host, which reads the host's counters."""
        hosts = self.nodes or tuple(map(self.namespace, range(self.world_size)))
        return tuple(hosts.index(host) for host in dict.fromkeys(hosts))

    def node(self, rank: int) -> int:
        return rank * self.num_simulated // self.world_size

    def namespace(self, rank: int) -> str | None:
        """The host of a rank; None for this machine's own network."""
        names = self.network.namespaces
        return names[self.node(rank) % len(names)] if names else None


class Rank:
    """One rank of a measurement, in its process."""

    def __init__(self, rank: int, placement: Placement, store: Any, gpu: int | None = None) -> None:
        """`gpu`: which of those that it sees is its own; None: that of its number."""
        self.rank = rank
        self.world_size = placement.world_size
        self.placement = placement
        self.device = f"cuda:{rank if gpu is None else gpu}" if placement.device == "cuda" else "cpu"
        topology = placement.topology
        carrier = TransportChoice("shared_memory" if self.device == "cpu" else "nccl", self.device)
        self._owner = ProcessGroups(rank, topology, store, epoch=1, timeout=TIMEOUT, carrier=carrier)
        self.world = AsyncGroupComm(dist.group.WORLD)
        found = self._owner.groups
        plain = found if found.node.transport != "shared_memory" else make_groups(rank, topology, timeout=TIMEOUT)
        self.groups: dict[str, Groups] = {self.world.transport: plain, found.node.transport: found}
        """By the fastest transport that they use."""
        self._counts = rank in placement.counting_ranks

    def take_turns(
        self, calls: Mapping[Name, Call], *, repeats: int, warm_up: int = 1, in_a_row: int = 1
    ) -> dict[Name, list[float]]:
        """Seconds of each call on this rank. The calls take turns, in another order each time, from a barrier on.

        With `in_a_row` a turn is so many of the same call, and its time their mean.
        """
        seconds: dict[Name, list[float]] = {name: [] for name in calls}
        for turn in range(-warm_up, repeats):
            order = list(calls)
            random.Random(turn).shuffle(order)
            for name in order:
                self.barrier()
                begin = time.perf_counter()
                for _ in range(in_a_row):
                    calls[name]()
                if self.device != "cpu":
                    torch.cuda.synchronize()
                if turn >= 0:
                    seconds[name].append((time.perf_counter() - begin) / in_a_row)
        return seconds

    def count_bytes(self, call: Call, repeats: int) -> dict[str, float]:
        """Bytes that left all ranks per call, by interface, less those that leave anyway."""
        idle = self._window(call, 0)
        busy = self._window(call, repeats)
        return {name: max(0.0, (busy[name] - idle[name]) / repeats) for name in busy}

    def _window(self, call: Call, repeats: int) -> dict[str, int]:
        """The bytes that all hosts sent during the calls, by interface; the first rank of each host reads its
        counters."""
        self.barrier()
        before = sent_bytes()
        self.barrier()
        for _ in range(repeats):
            call()
        self.barrier()
        after = sent_bytes()
        tables = self.gather({name: after[name] - before[name] for name in after} if self._counts else {})
        return {name: sum(table.get(name, 0) for table in tables) for name in sorted({*after}.union(*tables))}

    def barrier(self) -> None:
        dist.barrier()

    def gather(self, value: Any) -> list[Any]:
        """All ranks' values."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def close(self) -> None:
        self._owner.close()


def run(work: Callable[..., Any], placement: Placement, *args: object) -> list[Any]:
    """The result of `work(rank, *args)` in each rank's process; results and arguments must be picklable.

    Raises torch's ProcessRaisedException with the traceback of the first rank that failed, or ProcessExitedException.
    In either case, as after success, no rank process is left.
    """
    apply_environment(rank_environment(1))
    with TemporaryDirectory(prefix="longleaf-ranks-") as folder:
        arguments = (placement, folder, work, args)
        context = mp.spawn(_live, arguments, placement.world_size, join=False, daemon=True)
        try:
            while not context.join():
                pass
        finally:
            for process in context.processes:
                process.kill()
        return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(placement.world_size)]


def _live(rank: int, placement: Placement, folder: str, work: Callable[..., Any], args: tuple[object, ...]) -> None:
    """Main function of a rank process. Ranks rendezvous through a file, so that only measured traffic crosses the
    network.
    """
    namespace = placement.namespace(rank)
    if namespace is not None:
        enter(namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = placement.network.interface
    torch.set_num_threads(1)
    if placement.device == "cuda":
        torch.cuda.set_device(rank)
    one = Rank(rank, placement, dist.FileStore(f"{folder}/store", placement.world_size))
    with torch.inference_mode():
        found = work(one, *args)
    _result(folder, rank).write_bytes(pickle.dumps(found))
    one.barrier()
    one.close()


def _result(folder: str, rank: int) -> Path:
    return Path(folder) / f"result-{rank}"
