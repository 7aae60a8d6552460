"""The fleet on Ray: one placement group, one actor per rank. Ray starts and monitors ranks; steps do not pass through
it."""

import asyncio
import logging
import shlex
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from coordinator.cluster.ports import OnDeath, ignore_event
from coordinator.cluster.ray_connection import ray_package
from coordinator.cluster.ray_liveness import is_reachable, refuses_connections
from longleaf.config import LOOPBACK, EngineConfig, rank_environment
from longleaf.errors import StartError
from longleaf.rank_protocol.rank_spec import ConnectInfo, RankSpec
from longleaf.resources import slot_memory
from longleaf.topology import too_few_gpus

POLL_SECONDS = 1.0
PLACE_SECONDS = 60.0
"""Seconds to wait for occupied slots to become free."""
LEAVE_SECONDS = 3.0
KILL_SECONDS = 1.0
MEMORY_SECONDS = 60.0
"""Seconds to wait for the memory of the nodes: Ray starts a process on each."""
ALONE = "; Ray listens on the loopback address, so no other machine can join (ray start --node-ip-address)"
NODE_DIGITS = 12
"""Number of digits of a Ray node id that are shown, out of 56. They suffice to distinguish machines."""

log = logging.getLogger(__name__)


class RayFleet:
    """One actor of `worker_class` per rank. The class has a method `run(spec)`, see workers.actor.

    `worker_args` are passed to its constructor. Needs a connection, see coordinator.cluster.ray_connection.
    """

    def __init__(self, worker_class: type, *worker_args: object) -> None:
        self._worker_class = worker_class
        self._worker_args = worker_args
        self._group: Any = None
        self._resources: dict[str, float] = {}
        self._bundles: list[Bundle] = []
        self._is_local = False
        """Whether all ranks are on this machine."""
        self._places: dict[int, _Place] = {}
        """By member number. The entry of an ended process is removed when the process is replaced."""
        self._on_death: OnDeath = ignore_event
        self._is_stopping = threading.Event()
        self._watcher: threading.Thread | None = None
        self._num_missing = 0

    @property
    def num_missing(self) -> int:
        return self._num_missing

    async def reserve(self, config: EngineConfig, patience: float = 0.0) -> str:
        return await asyncio.to_thread(self._reserve, config, patience)

    def _reserve(self, config: EngineConfig, patience: float) -> str:
        deadline = time.monotonic() + patience
        try:
            self._resources = self._wait_for_slots(config, deadline)
            group = ray_package().util.placement_group([self._resources] * config.world_size, strategy="PACK")
            self._group = group
            self._wait_until_free(config, max(deadline, time.monotonic() + min(PLACE_SECONDS, config.start_timeout)))
        except StartError as error:
            waited = ", and --wait-for-ranks has passed" if patience else ""
            closed = ALONE if ray_package().util.get_node_ip_address() == LOOPBACK else ""
            raise StartError(f"{error}{waited}{closed}") from error
        finally:
            self._num_missing = 0
        own: str = ray_package().util.get_node_ip_address()
        self._bundles = bundles_of(group)
        self._is_local = all(bundle.host == own for bundle in self._bundles)
        self._bundles = self._known_bundles()
        return LOOPBACK if self._is_local else own

    def _wait_for_slots(self, config: EngineConfig, deadline: float) -> dict[str, float]:
        """Resources of one rank, once the cluster has a slot for each rank. Raises StartError."""
        while True:
            total: dict[str, float] = ray_package().cluster_resources()
            try:
                return bundle_for(config, total)
            except StartError:
                if time.monotonic() >= deadline:
                    raise
                self._num_missing = config.world_size - num_slots(kind_of(config, total), total)
            self._pause()

    def _wait_until_free(self, config: EngineConfig, deadline: float) -> None:
        """Returns when all slots are reserved. Raises StartError."""
        while not self._group.wait(timeout_seconds=POLL_SECONDS):
            if time.monotonic() >= deadline:
                raise StartError(
                    f"world size {config.world_size} needs {config.world_size} free slots, and some slots are in use"
                )
            free = num_slots(self._resources, ray_package().available_resources())
            self._num_missing = max(1, config.world_size - free)
            self._pause(0.0)

    def _pause(self, seconds: float = POLL_SECONDS) -> None:
        """Raises StartError when the fleet is shut down."""
        if self._is_stopping.wait(seconds):
            raise StartError("the service is stopping")

    async def rank_memory(self) -> int | None:
        return await asyncio.to_thread(self._rank_memory)

    def _rank_memory(self) -> int | None:
        """Runs a task in a slot of each node. The resource `memory` of Ray is not used: it is a share of the memory of
        the machine, whether available or not, and does not include GPUs."""
        ray = ray_package()
        counts = Counter(bundle.node for bundle in self._bundles)
        slots = {bundle.node: bundle.index for bundle in self._bundles}
        tasks = [
            ray.remote(slot_memory)
            .options(max_retries=0, **bundle_options(self._group, index, self._resources, {}))
            .remote(counts[node], has_gpu="GPU" in self._resources)
            for node, index in slots.items()
        ]
        try:
            sizes: list[int | None] = ray.get(tasks, timeout=MEMORY_SECONDS)
        except ray.exceptions.RayError as error:
            log.warning("the memory of the Ray nodes is unknown: %s", type(error).__name__)
            for task in tasks:
                ray.cancel(task, force=True)
            return None
        known = [size for size in sizes if size is not None]
        return min(known) if len(known) == len(sizes) else None

    async def launch(self, config: EngineConfig, invitations: Sequence[ConnectInfo], on_death: OnDeath) -> None:
        self._on_death = on_death
        await asyncio.to_thread(self._launch, config, invitations)
        self._watcher = threading.Thread(target=self._watch, name="fleet", daemon=True)
        self._watcher.start()

    def _launch(self, config: EngineConfig, invitations: Sequence[ConnectInfo]) -> None:
        for rank, (bundle, invitation) in enumerate(zip(self._bundles, invitations, strict=True)):
            is_first_here = all(other.node != bundle.node for other in self._bundles[:rank])
            self._start(rank, bundle, invitation, config, is_first_here)

    def _start(
        self, member: int, bundle: "Bundle", invitation: ConnectInfo, config: EngineConfig, is_first_here: bool
    ) -> None:
        has_gpu = "GPU" in self._resources
        if has_gpu:  # a rank whose torch finds no GPU must fail instead of computing on CPUs
            config = msgspec.structs.replace(config, device="cuda")
        spec = RankSpec(
            member=member,
            config=config,
            invitation=invitation,
            host=bundle.host,
            node=bundle.node,
            num_ranks_here=sum(other.node == bundle.node for other in self._bundles),
            is_first_here=is_first_here,
            gpu=0 if has_gpu else None,  # Ray makes only its own GPU visible to each rank
        )
        variables = rank_environment(config.threads_per_rank)
        placed = in_bundle(self._worker_class, self._group, bundle.index, self._resources, variables)
        actor = placed.remote(*self._worker_args)
        self._places[member] = _Place(bundle, actor, actor.run.remote(spec))

    # --- watch ---

    def _watch(self) -> None:
        """Reports ended ranks until shutdown. A `run` reference becomes ready when the rank's process ends. If its
        machine fails, the reference becomes ready seconds later, or never if `run` had not started, because Ray then
        looks for another node. Therefore the machines are checked as well. Each wait has a timeout, because Ray may
        crash a thread that waits without one during shutdown. A replacement is included from the next poll on."""
        while not self._is_stopping.is_set():
            places = {member: place for member, place in list(self._places.items()) if not place.has_ended.is_set()}
            ended: list[Any] = []
            if places:
                runs = [place.run for place in places.values()]
                ended, _ = ray_package().wait(runs, num_returns=1, timeout=POLL_SECONDS)
            else:
                self._is_stopping.wait(POLL_SECONDS)
            for member, place in places.items():
                if place.run in ended:
                    self._on_exit(member, _describe(place.run))
            gone = self._nodes_gone()
            for member, place in places.items():
                if place.bundle.node in gone and not place.has_ended.is_set():
                    self._on_exit(member, "its machine left the cluster")

    def _nodes_gone(self) -> set[str]:
        """The nodes of ranks that Ray considers dead or whose Ray process has ended. Empty if all ranks are on the
        coordinator's machine."""
        if self._is_local:
            return set()
        alive = {node["NodeID"][:NODE_DIGITS] for node in ray_package().nodes() if node["Alive"]}
        bundles = {place.bundle.node: place.bundle for place in list(self._places.values())}
        return {
            node
            for node, bundle in bundles.items()
            if node not in alive or refuses_connections(bundle.host, bundle.port)
        }

    def _on_exit(self, member: int, reason: str) -> None:
        place = self._places.get(member)
        if place is not None:
            place.has_ended.set()
        if not self._is_stopping.is_set():
            self._on_death(member, reason)

    def location_of(self, member: int) -> str:
        place = self._places.get(member)
        return "" if self._is_local or place is None else f", on node {place.bundle.node} ({place.bundle.host})"

    # --- replace ---

    async def kill(self, member: int) -> None:
        place = self._places.get(member)
        if place is not None and not place.has_ended.is_set():
            await asyncio.to_thread(self._kill, place)

    def _kill(self, place: "_Place") -> None:
        """Ray removes the actor immediately. If its process is suspended, Ray ends the process some seconds later."""
        with suppress(Exception):  # the actor or its node has ended
            ray_package().kill(place.actor, no_restart=True)
        place.has_ended.wait(KILL_SECONDS)

    async def replace(self, lost: int, member: int, invitation: ConnectInfo, config: EngineConfig) -> None:
        await self.kill(lost)
        await asyncio.to_thread(self._replace, lost, member, invitation, config)

    def _replace(self, lost: int, member: int, invitation: ConnectInfo, config: EngineConfig) -> None:
        """Starts the replacement in the same bundle, which may have moved to another node."""
        place = self._places.get(lost)
        bundle = next((one for one in self._known_bundles() if place and one.index == place.bundle.index), None)
        if bundle is None:
            raise StartError("the slot's node left the cluster, and no other node has a free slot")
        if not self._is_local and not is_reachable(bundle.host, bundle.port):  # Ray detects a dead node late
            raise StartError("the slot's node does not respond")
        self._bundles = [bundle if other.index == bundle.index else other for other in self._bundles]
        self._start(member, bundle, invitation, config, True)
        self._places.pop(lost, None)

    def _known_bundles(self) -> "list[Bundle]":
        """Bundles on live nodes."""
        return [
            msgspec.structs.replace(bundle, host=LOOPBACK) if self._is_local else bundle
            for bundle in bundles_of(self._group)
        ]

    # --- end ---

    async def shutdown(self) -> None:
        """Waits a few seconds for ranks that were asked to stop, then kills the rest and frees all slots."""
        self._is_stopping.set()
        await asyncio.to_thread(self._end_all)

    def _end_all(self) -> None:
        ray = ray_package()
        if self._watcher is not None:
            self._watcher.join()
        places = list(self._places.values())
        runs = [place.run for place in places]
        with suppress(Exception):  # the cluster may have ended with its actors
            if runs:
                ray.wait(runs, num_returns=len(runs), timeout=LEAVE_SECONDS)
            for place in places:
                ray.kill(place.actor, no_restart=True)
            if runs:
                ray.wait(runs, num_returns=len(runs), timeout=LEAVE_SECONDS)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)
        self._places.clear()


@dataclass(frozen=True)
class _Place:
    """A member's actor and its bundle. The reference `run` becomes ready when the actor has ended."""

    bundle: "Bundle"
    actor: Any
    run: Any
    has_ended: threading.Event = field(default_factory=threading.Event)


class Bundle(msgspec.Struct, frozen=True):
    """A placement-group bundle for one rank: its index, the id and address of its node, and the port of Ray's node
    manager there."""

    index: int
    node: str
    host: str
    port: int = 0


def bundle_for(config: EngineConfig, total: Mapping[str, float]) -> dict[str, float]:
    """Resources of one rank in a cluster with resources `total`, see `kind_of`. Raises StartError when there are fewer
    GPUs or slots than ranks."""
    num_gpus = int(total.get("GPU", 0))
    if config.device == "cuda" and not num_gpus:
        raise StartError("device: cuda is not available: the cluster has no GPU")
    bundle = kind_of(config, total)
    if "GPU" in bundle and num_gpus < config.world_size:
        raise too_few_gpus(config.world_size, "the cluster", num_gpus)
    slots = num_slots(bundle, total)
    if slots < config.world_size:
        raise StartError(f"world size {config.world_size} needs {config.world_size} slots, the cluster has {slots}")
    return bundle


def kind_of(config: EngineConfig, total: Mapping[str, float]) -> dict[str, float]:
    """Resources of one slot in a cluster with resources `total`: one CPU, and one GPU unless ranks run on CPUs."""
    takes_gpus = config.device == "cuda" or (config.device == "auto" and int(total.get("GPU", 0)) > 0)
    return {"CPU": 1.0, "GPU": 1.0} if takes_gpus else {"CPU": 1.0}


def num_slots(bundle: Mapping[str, float], total: Mapping[str, float]) -> int:
    """Number of slots of this kind in a cluster with resources `total`."""
    return int(min(total.get(name, 0) for name in bundle))


def bundles_of(group: Any) -> list[Bundle]:
    """The bundles of a placement group, grouped by node, the coordinator's node first. Bundles on dead nodes are
    omitted."""
    ray = ray_package()
    here = ray.get_runtime_context().get_node_id()
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    table: dict[str, Any] = ray.util.placement_group_table(group)
    by_bundle: dict[int, str] = table["bundles_to_node_id"]
    placed = [(bundle, node) for bundle, node in by_bundle.items() if node in nodes]
    ordered = sorted(placed, key=lambda item: (item[1] != here, item[1], item[0]))
    return [
        Bundle(bundle, node[:NODE_DIGITS], str(nodes[node]["NodeManagerAddress"]), int(nodes[node]["NodeManagerPort"]))
        for bundle, node in ordered
    ]


def in_bundle(actor_class: type, group: Any, index: int, bundle: Mapping[str, float], variables: dict[str, str]) -> Any:
    """The actor class with options: its actors use a whole bundle of the placement group, have these environment
    variables, and are never restarted."""
    options = bundle_options(group, index, bundle, variables)
    return ray_package().remote(actor_class).options(max_restarts=0, max_task_retries=0, **options)


def bundle_options(group: Any, index: int, bundle: Mapping[str, float], variables: dict[str, str]) -> dict[str, Any]:
    """Options of an actor or a task that uses a whole bundle of the placement group and has these environment
    variables."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    runtime_env: dict[str, Any] = {"env_vars": variables}
    if shlex.quote(sys.executable) != sys.executable:  # Ray passes the path of Python to a shell without quoting
        runtime_env["py_executable"] = shlex.quote(sys.executable)
    resources = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
    return {**resources, "runtime_env": runtime_env, "scheduling_strategy": strategy}


def _describe(run: Any) -> str:
    """The reason why `run` finished. Every error counts as the death of the process, even one that Ray reports as
    temporary, because such an error can be final."""
    ray = ray_package()
    try:
        return f"exited with code {ray.get(run, timeout=POLL_SECONDS)}"
    except Exception as error:
        return f"its process died ({type(error).__name__})"
