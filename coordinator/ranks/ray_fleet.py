"""The fleet on Ray: one placement group, one actor per rank. Ray places and watches; it never carries a step."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from coordinator.ranks.ports import OnDeath
from longleaf.channel.rank_spec import Invitation, RankSpec
from longleaf.config import LOOPBACK, EngineConfig, rank_environment
from longleaf.errors import StartError
from longleaf.topology import too_few_gpus

POLL_SECONDS = 1.0
LEAVE_SECONDS = 3.0
NODE_DIGITS = 12
"""Digits of a Ray node id that are shown, of 56: enough to tell machines apart."""


def _ray() -> Any:
    """The package, untyped (its annotations are partial), and imported late: see coordinator.ranks.ray_connection."""
    import ray

    return ray


class RayFleet:
    """One actor of `worker_class` per rank. The class offers `run(spec)`, see workers.actor.

    `worker_args` go to its constructor. Needs a connection, see coordinator.ranks.ray_connection.
    """

    def __init__(self, worker_class: type, *worker_args: object) -> None:
        self._worker_class = worker_class
        self._worker_args = worker_args
        self._group: Any = None
        self._resources: dict[str, float] = {}
        self._bundles: list[Bundle] = []
        self._actors: list[Any] = []
        self._ranks_by_run: dict[Any, int] = {}
        self._is_stopping = threading.Event()
        self._watcher: threading.Thread | None = None

    async def reserve(self, config: EngineConfig) -> str:
        return await asyncio.to_thread(self._reserve, config)

    def _reserve(self, config: EngineConfig) -> str:
        self._resources = check_slots(config)
        group = _ray().util.placement_group([self._resources] * config.world_size, strategy="PACK")
        self._group = group
        if not group.wait(timeout_seconds=min(60.0, config.start_timeout)):
            raise StartError(f"world size {config.world_size} needs {config.world_size} free slots; some are in use")
        own: str = _ray().util.get_node_ip_address()
        self._bundles = bundles_of(group)
        if all(bundle.host == own for bundle in self._bundles):
            self._bundles = [msgspec.structs.replace(bundle, host=LOOPBACK) for bundle in self._bundles]
            return LOOPBACK
        return own

    async def launch(self, config: EngineConfig, invitations: Sequence[Invitation], on_death: OnDeath) -> None:
        await asyncio.to_thread(self._launch, config, invitations)
        self._watcher = threading.Thread(target=self._watch, args=(on_death,), name="fleet", daemon=True)
        self._watcher.start()

    def _launch(self, config: EngineConfig, invitations: Sequence[Invitation]) -> None:
        variables = rank_environment(config.threads_per_rank)
        has_gpu = "GPU" in self._resources
        if has_gpu:  # a rank whose torch sees none must say so, not compute on CPUs
            config = msgspec.structs.replace(config, device="cuda")
        for rank, (bundle, invitation) in enumerate(zip(self._bundles, invitations, strict=True)):
            self._actors.append(self._place(self._resources, bundle.index, variables))
            spec = RankSpec(
                rank=rank,
                config=config,
                invitation=invitation,
                host=bundle.host,
                node=bundle.node,
                num_ranks_here=sum(other.node == bundle.node for other in self._bundles),
                gpu=0 if has_gpu else None,  # Ray shows each rank its own GPU alone
            )
            self._ranks_by_run[self._actors[-1].run.remote(spec)] = rank

    def _place(self, bundle: dict[str, float], index: int, variables: dict[str, str]) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        actor_class = _ray().remote(self._worker_class)
        options: dict[str, Any] = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
        options |= {"max_restarts": 0, "max_task_retries": 0, "runtime_env": {"env_vars": variables}}
        return actor_class.options(scheduling_strategy=strategy, **options).remote(*self._worker_args)

    # --- watch ---

    def _watch(self, on_death: OnDeath) -> None:
        """`run` returns or fails exactly when the rank is gone. Polled, because Ray may crash a thread that waits
        without end while it is shut down."""
        ray = _ray()
        alive = dict(self._ranks_by_run)
        while alive and not self._is_stopping.is_set():
            ended, _ = ray.wait(list(alive), num_returns=1, timeout=POLL_SECONDS)
            for run in ended:
                reason = _describe(run)
                rank = alive.pop(run)
                if not self._is_stopping.is_set():
                    on_death(rank, reason)

    # --- end ---

    async def shutdown(self) -> None:
        """Gives ranks that were told to leave a few seconds, then kills them; frees their slots."""
        self._is_stopping.set()
        await asyncio.to_thread(self._reap)

    def _reap(self) -> None:
        ray = _ray()
        if self._watcher is not None:
            self._watcher.join()
        runs = list(self._ranks_by_run)
        with suppress(Exception):  # the cluster itself may be gone, and its actors with it
            if runs:
                ray.wait(runs, num_returns=len(runs), timeout=LEAVE_SECONDS)
            for actor in self._actors:
                ray.kill(actor, no_restart=True)
            if runs:
                ray.wait(runs, num_returns=len(runs), timeout=LEAVE_SECONDS)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)
        self._actors.clear()
        self._ranks_by_run.clear()


class Bundle(msgspec.Struct, frozen=True):
    """Where a rank goes: its number, its machine's name and address."""

    index: int
    node: str
    host: str


def check_slots(config: EngineConfig) -> dict[str, float]:
    """What one rank takes of the cluster. Raises StartError when the cluster has fewer slots than ranks."""
    return bundle_for(config, _ray().cluster_resources())


def bundle_for(config: EngineConfig, total: Mapping[str, float]) -> dict[str, float]:
    """What one rank takes of a cluster that has `total`: a GPU each where there are any. Raises StartError when there
    are too few of them, or fewer slots than ranks."""
    num_gpus = int(total.get("GPU", 0))
    if config.device == "cuda" and not num_gpus:
        raise StartError("device: cuda was asked for, and the cluster has no GPU")
    takes_gpus = config.device != "cpu" and num_gpus > 0
    if takes_gpus and num_gpus < config.world_size:
        raise too_few_gpus(config.world_size, "the cluster", num_gpus)
    bundle = {"CPU": 1.0, "GPU": 1.0} if takes_gpus else {"CPU": 1.0}
    slots = int(min(total.get(name, 0) for name in bundle))
    if slots < config.world_size:
        raise StartError(f"world size {config.world_size} needs {config.world_size} slots, the cluster has {slots}")
    return bundle


def bundles_of(group: Any) -> list[Bundle]:
    """The bundles of a placement group node by node, the coordinator's node first, so that ranks are too."""
    ray = _ray()
    here = ray.get_runtime_context().get_node_id()
    hosts = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes()}
    table: dict[str, Any] = ray.util.placement_group_table(group)
    by_bundle: dict[int, str] = table["bundles_to_node_id"]
    ordered = sorted(by_bundle.items(), key=lambda item: (item[1] != here, item[1], item[0]))
    return [Bundle(bundle, node[:NODE_DIGITS], hosts[node]) for bundle, node in ordered]


def _describe(run: Any) -> str:
    """Why a finished `run` finished. Every error is a death: Ray calls some that are final merely unavailable."""
    ray = _ray()
    try:
        return f"left with exit code {ray.get(run, timeout=POLL_SECONDS)}"
    except Exception as error:
        return f"its process died ({type(error).__name__})"
