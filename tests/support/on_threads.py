"""Work of several ranks that are threads."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from longleaf.comm.base import Comm, Groups
from longleaf.topology import Topology
from tests.support.loopback import LoopbackComm, loopback_groups

T = TypeVar("T")


def on_groups(topology: Topology, work: Callable[[int, Groups], T]) -> list[T]:
    """The results of `work(rank, groups)` for each rank, as if the ranks ran on the machines of `topology`."""
    groups = loopback_groups(topology)
    comms = [comm for each in groups for comm in (each.world, each.node, each.rail) if comm is not None]
    return _on_threads([lambda rank=rank: work(rank, groups[rank]) for rank in range(len(groups))], comms)


def on_ends(ends: Sequence[LoopbackComm], work: Callable[[LoopbackComm], T]) -> list[T]:
    """The results of `work(comm)` for each rank of a group."""
    return _on_threads([lambda end=end: work(end) for end in ends], ends)


def _on_threads(works: Sequence[Callable[[], T]], comms: Iterable[Comm]) -> list[T]:
    """Raises the first error of a rank. It aborts the collectives of the other ranks, so that none waits for the failed
    one.
    """
    errors: list[Exception] = []

    def run(work: Callable[[], T]) -> T:
        try:
            return work()
        except Exception as error:
            errors.append(error)
            for comm in comms:
                assert isinstance(comm, LoopbackComm)
                comm.abort()
            raise

    with ThreadPoolExecutor(len(works)) as threads:
        results = [threads.submit(run, work) for work in works]
    if errors:
        raise errors[0]
    return [result.result() for result in results]
