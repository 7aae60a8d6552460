"""Ranks as actors in the free slots of a running Ray cluster, and their joint measurements.

Their placement is that of a service with as many ranks. Other machines need this version of the project's packages but
no checkout: Ray ships the measurement code.
"""

import sys
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from typing import Any

import torch

import bench
from bench.harness.arguments import log
from bench.harness.hosts import Network
from bench.harness.ranks import Placement, Rank
from coordinator.cluster.ray_connection import connect, ray_package
from coordinator.cluster.ray_fleet import PLACE_SECONDS, bundle_for, bundles_of, in_bundle
from longleaf.comm.process_group import connect_store, open_store
from longleaf.config import DeviceName, EngineConfig, apply_environment, network_environment, rank_environment
from longleaf.errors import StartError
from longleaf.launch import BAD_INPUT
from longleaf.network_interfaces import interface_of

NETWORK = Network("ray", "", (), 0, 0)
"""Machines of unknown topology; the counts include other traffic."""
Work = Callable[..., Any]


@contextmanager
def joined(address: str) -> Generator[None, None, None]:
    """Within the block, this process is in the Ray cluster at `address`.

    Ends the program with exit code 2 when it cannot be, or when ranks cannot be placed there.
    """
    try:
        with closing(connect(address, 1)):
            carry_measurements()
            yield
    except StartError as error:
        log(f"error: {error}")
        sys.exit(BAD_INPUT)


def carry_measurements() -> None:
    """From now on, Ray ships the code of this package with all work: other machines may not have it."""
    ray_package().cloudpickle.register_pickle_by_value(bench)


def num_gpus() -> int:
    """GPUs of the cluster that was joined."""
    return int(ray_package().cluster_resources().get("GPU", 0))


class RankActor:
    """One rank of a measurement, in its process."""

    def __init__(self) -> None:
        self._store: Any = None

    def open_store(self, host: str) -> tuple[str, int]:
        """Rank 0's: where the others meet it."""
        self._store = open_store(host)
        return host, self._store.port

    def live(
        self, rank: int, placement: Placement, host: str, rendezvous: tuple[str, int], work: Work, args: Any
    ) -> Any:
        """Runs `work(rank, *args)` and returns its result."""
        apply_environment(network_environment(interface_of(host)))
        torch.set_num_threads(1)
        if placement.device == "cuda":
            torch.cuda.set_device(0)  # Ray makes only the rank's own device visible
        one = Rank(rank, placement, self._store or connect_store(*rendezvous), gpu=0)
        with torch.inference_mode():
            found = work(one, *args)
        one.barrier()
        one.close()
        return found


def run_on_ray(work: Work, world_size: int, device: DeviceName, *args: Any) -> tuple[Placement, list[Any]]:
    """The placement of the ranks, and the result of `work(rank, *args)` on each; work, arguments and results must be
    picklable.

    Raises StartError when there are too few free slots, and RayError when a rank fails; no rank is left then, or after.
    """
    ray = ray_package()
    config = EngineConfig(model="", world_size=world_size, device=device)
    resources = bundle_for(config, ray.cluster_resources())
    group = ray.util.placement_group([resources] * world_size, strategy="PACK")
    actors: list[Any] = []
    try:
        if not group.wait(timeout_seconds=PLACE_SECONDS):
            raise StartError(f"world size {world_size} needs {world_size} free slots; some are in use")
        bundles = bundles_of(group)
        placement = Placement(world_size, 0, NETWORK, device, nodes=tuple(bundle.node for bundle in bundles))
        variables = rank_environment(1)
        actors += [in_bundle(RankActor, group, each.index, resources, variables).remote() for each in bundles]
        rendezvous = ray.get(actors[0].open_store.remote(bundles[0].host))
        given = zip(actors, bundles, strict=True)
        runs = [
            actor.live.remote(rank, placement, bundle.host, rendezvous, work, args)
            for rank, (actor, bundle) in enumerate(given)
        ]
        waiting = list(runs)
        while waiting:  # the first that fails ends all, though others may wait for it
            ended, waiting = ray.wait(waiting)
            ray.get(ended)
        return placement, ray.get(runs)
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.util.remove_placement_group(group)
