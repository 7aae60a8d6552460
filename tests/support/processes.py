"""Ranks as processes of a test, forked from one that has torch loaded already."""

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from longleaf.comm.process_group import ProcessGroups, Store, TransportChoice, connect_store, open_store
from longleaf.config import apply_environment, network_environment
from longleaf.network_interfaces import interface_of
from longleaf.topology import Topology

TIMEOUT = 60.0
Work = Callable[..., Any]


class Ranks(NamedTuple):
    """Where ranks run: a letter of `machines` each, and an address of `hosts`, by default all on the loopback."""

    machines: str
    hosts: Sequence[str] = ()

    def host(self, rank: int) -> str:
        return self.hosts[rank] if self.hosts else "127.0.0.1"


class RankProcess:
    """A rank's process and its messages."""

    def __init__(
        self, rank: int, ranks: "Ranks", store: Store, work: Work, prepare: Work | None, method: str, options: Any
    ) -> None:
        context: Any = multiprocessing.get_context(method)
        self._store = store
        self._pipe, theirs = multiprocessing.Pipe()
        self.process = context.Process(target=live, args=(theirs, rank, ranks, store.port, work, prepare, options))
        self.process.start()
        theirs.close()

    def result(self) -> Any:
        """The return value or exception of the work; the exit code of a process that sent neither."""
        assert self._pipe.poll(2 * TIMEOUT), "no message from the rank"
        try:
            return self._pipe.recv()
        except EOFError:
            return None

    def send(self, message: Any) -> None:
        """Sends something to the rank that waits in `owner.pipe.recv()`."""
        self._pipe.send(message)

    def end(self) -> int | None:
        """Waits for the process; its exit code."""
        self.process.join(timeout=TIMEOUT)
        return self.process.exitcode


class Owner(ProcessGroups):
    """The groups of a rank, and its pipe to the test."""

    pipe: Connection


def live(pipe: Connection, rank: int, ranks: Ranks, port: int, work: Work, prepare: Work | None, options: Any) -> None:
    """Runs a rank: joins, works, and sends the result."""
    torch.set_num_threads(1)
    try:
        if prepare is not None:
            prepare(rank)
        apply_environment(network_environment(interface_of(ranks.host(rank))))
        store = connect_store(ranks.host(0), port)
        settings = {"epoch": 1, "timeout": TIMEOUT, "carrier": TransportChoice("shared_memory"), **options}
        owner = Owner(rank, Topology(tuple(ranks.machines)), store, **settings)
        owner.pipe = pipe
        pipe.send(work(rank, owner))
        owner.close()
    except Exception as error:
        pipe.send(error)


def start_ranks(
    machines: str, work: Work, prepare: Work | None = None, method: str = "forkserver", **options: Any
) -> list[RankProcess]:
    """One process per letter of `machines`, which names its simulated machine.

    Each calls `prepare(rank)`, joins the groups with `options`, and calls `work(rank, owner)`. With the method `spawn`
    they are this process's own children, which are not reaped before `end`.
    """
    store = open_store("127.0.0.1")
    ranks = Ranks(machines)
    return [RankProcess(rank, ranks, store, work, prepare, method, options) for rank in range(len(machines))]


def run_ranks(machines: str, work: Work, prepare: Work | None = None, **options: Any) -> list[Any]:
    """The results of the ranks, in rank order. Raises the first error that a rank raised."""
    processes = start_ranks(machines, work, prepare, **options)
    results = [process.result() for process in processes]
    assert [process.end() for process in processes] == [0] * len(machines)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
