"""The lifecycle of a service: starts and stops the fleet, the control channel, the engine, the use cases and the
servers in order."""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from coordinator.auth.authenticator import AllowAnonymous, Authenticator
from coordinator.auth.credentials import Credentials, unreachable
from coordinator.cluster.ports import Fleet
from coordinator.cluster.rank_manager import RankManager
from coordinator.cluster.replacement_supervisor import ReplacementSupervisor
from coordinator.engine.engine import STOPPING, Engine
from coordinator.grpc_server.certificates import Certificates
from coordinator.grpc_server.gateway_process import GatewayProcess
from coordinator.grpc_server.server import LOADING_SECONDS, GrpcServer
from coordinator.handlers.application import Application
from coordinator.handlers.durable_uploads import DurableUploads
from coordinator.handlers.fair_share import TENANT_SHARE
from coordinator.kv_cache.positions import UNLIMITED
from coordinator.malloc_tuning import return_large
from coordinator.persistence.open import PersistentState
from coordinator.startup_summary import summarize
from coordinator.telemetry.counters import Counts
from coordinator.telemetry.metric_sources import MetricSources
from coordinator.telemetry.observers import Observers
from coordinator.telemetry.telemetry import Telemetry
from coordinator.text.checkpoint import read_sampling
from coordinator.text.renderer import Renderer
from coordinator.text.tokenizer import Tokenizer
from longleaf.config import (
    EngineConfig,
    join_address,
)
from longleaf.errors import StartError, Unavailable
from longleaf.formatting import human_bytes, human_seconds
from longleaf.rank_protocol.group_messages import Ready
from longleaf.resources import allow_files, num_processors
from longleaf.sampling import GREEDY
from longleaf.service_settings import ServiceConfig
from longleaf.topology import describe_lost
from longleaf.types import Cluster, Draining, ModelInfo
from longleaf.weights_choice import with_chosen_weights

SWITCH_SECONDS = 0.0005
"""The interpreter's thread switch interval in seconds: how long a tokenizing thread may delay the event loop each time
it waits for the interpreter lock. It is a tenth of Python's default because the loop waits many times per step."""
LOG_INTERVAL_SECONDS = 0.5
"""Seconds that ended streams get to send the tokens they have."""
GRACE_SECONDS = 2.0
"""Seconds that open calls get to receive the shutdown reason."""


WHOLE_UNKNOWN = "weights: whole, because the memory of the Ray nodes is unknown; see --weights"
NOT_DURABLE = "contexts are only in memory and are lost when this service stops: --data-dir DIR saves them"


class StartupProgress(msgspec.Struct, frozen=True):
    """Progress of the start."""

    world_size: int
    num_ready: int
    """Ranks that have loaded the model."""
    num_missing: int
    """Missing worker slots."""

    def __str__(self) -> str:
        missing = f", {self.num_missing} of their slots missing" if self.num_missing else ""
        return f"loading, {self.num_ready} of {self.world_size} ranks ready{missing}"


class Service:
    """Lifecycle: start, wait, drain, stop. `stop` may be called at any time, including after `start` failed."""

    def __init__(self, config: ServiceConfig, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        self._renderer = Renderer()
        self._control: RankManager | None = None
        self._supervisor: ReplacementSupervisor | None = None
        self._engine: Engine | None = None
        self._application: Application | None = None
        self._server: GrpcServer | None = None
        self._loop: asyncio.Task[None] | None = None
        self._durability: PersistentState | None = None
        self._end = ShutdownState()
        is_open = config.security.credentials is None and config.security.tls_client_ca is None
        self._sampling_defaults = GREEDY
        self._watching = Telemetry(config.telemetry, config.shown_name, config.launcher, is_open)
        self._observers = Observers()
        self._gateway: GatewayProcess | None = None
        self.http = ""
        """Address of the HTTP gateway; empty if it is off."""
        self.notes: tuple[str, ...] = ()
        """Warnings that the ranks logged during the start, without duplicates, followed by notes of the service. At
        level info, the ranks' informational messages come first."""
        self.summary: tuple[tuple[str, str], ...] = ()
        """The model, the ranks and the limits, as pairs of a label and a text."""

    async def start(self) -> int:
        """Opens the port, starts all components and returns the port. Raises StartError, ModelRefused, InvalidArgument
        or RankLost."""
        return_large()
        allow_files()
        sys.setswitchinterval(SWITCH_SECONDS)
        self._observers = await self._watching.start()
        config = self._config.engine
        authenticator, certificates = self._authenticator(), Certificates.from_config(self._config.security)
        self._server = GrpcServer(
            unread_timeout=config.unread_timeout,
            loading=self._not_yet,
            drain=self.on_drain_call,
            reset_slots=self._reset_slots,
            authenticator=authenticator,
            observers=self._observers,
            certificates=certificates,
        )
        if self._config.gateway.http is not None:
            self._gateway = GatewayProcess(self._config)
        unix = self._gateway.socket if self._gateway is not None else None
        port = await self._server.start(self._config.host, self._config.port, unix)
        if self._gateway is not None:
            self.http = await self._gateway.start()
        notes = await self._start_health(self._server)
        notes += await self._watching.log_start(self._sources(authenticator, certificates))
        tokenizer = await self._load_tokenizer(config)
        if self._config.sampling_defaults == "model":
            self._sampling_defaults = read_sampling(tokenizer.checkpoint.folder)
        self._durability = await self._open_durability(config)
        if self._durability is not None:
            config = replace(config, snapshot_url=self._durability.snapshot_url)
        host = await self._fleet.reserve(config, self._config.wait_for_ranks)
        if config.weights == "auto" and config.world_size > 1:
            config, choice = await self._choose_weights(config)
            notes += choice
        self._control = RankManager(config, host, self._fleet.kill, self._fleet.location_of)
        # without a limit in the checkpoint, only the pool bounds the positions
        max_positions = tokenizer.checkpoint.max_positions or UNLIMITED
        self._engine = Engine(self._control, config, max_positions, durability=self._durability)
        await self._fleet.launch(config, self._control.invitations, self._control.on_process_exit)
        readies = await self._engine.start()
        self._supervisor = ReplacementSupervisor(self._control.registry, self._fleet, config, readies)
        retained = self._durability.notes if self._durability else (NOT_DURABLE,)
        if self._durability is not None and isinstance(authenticator, Credentials):
            retained += unreachable((each.id for each in self._durability.contents.contexts), authenticator.tenants)
        if self._config.launcher == "local":
            devices = [ready.device for ready in readies]
            notes += idle_processors(config.world_size, config.threads_per_rank, devices, num_processors())
        if config.has_shares:
            notes += (describe_weights(max(ready.weight_bytes for ready in readies), config.spare_ranks),)
        logged = [note for ready in readies for note in ready.notes]
        if self._config.telemetry.log_level in ("debug", "info"):
            logged = [detail for ready in readies for detail in ready.details] + logged
        self.notes = (*dict.fromkeys(logged), *retained, *notes)
        self._loop = asyncio.create_task(self._engine.run())
        model = self._describe(self._engine, tokenizer, readies[0])
        describe = partial(self._engine.cluster, model, self._config.launcher)
        self.summary = summarize(describe(), self._engine.positions.limit, config.threads_per_rank)
        self._application = self._make_application(self._engine, tokenizer, describe)
        await self._application.generation.resume_all()
        if self._durability is not None:
            await self._durability.record_address(join_address(self._config.host, port))
            if self._config.data.preload:
                self._engine.preload()
        self._server.open(self._application)
        return port

    async def _choose_weights(self, config: EngineConfig) -> tuple[EngineConfig, tuple[str, ...]]:
        """Replaces the weights `auto` by the memory of the ranks, and returns the notes on the choice. Raises
        InvalidArgument."""
        rank_memory = await self._fleet.rank_memory()
        is_on_gpus = config.device != "cpu"  # if the ranks choose their devices, these may be GPUs
        chosen, reason = await asyncio.to_thread(with_chosen_weights, config, rank_memory, is_on_gpus=is_on_gpus)
        if rank_memory is None and self._config.launcher == "ray":
            reason = WHOLE_UNKNOWN
        return chosen, (reason,) if reason else ()

    async def _start_health(self, server: GrpcServer) -> tuple[str, ...]:
        """Starts the health port if one is configured, and returns a note with its address. Raises StartError."""
        if (port := self._config.security.health_port) is None:
            return ()
        bound = await server.start_health(self._config.host, port)
        return (f"health checks only, without TLS: {join_address(self._config.host, bound)}",)

    def _authenticator(self) -> Authenticator:
        """Raises InvalidArgument."""
        path = self._config.security.credentials
        return AllowAnonymous() if path is None else Credentials.from_file(path)

    def _sources(self, authenticator: Authenticator, certificates: Certificates | None) -> MetricSources:
        """The sources of the metrics."""
        file = authenticator if isinstance(authenticator, Credentials) else None
        files = {
            name: each for name, each in (("credentials", file), ("certificates", certificates)) if each is not None
        }
        return MetricSources(
            cluster=self._cluster,
            counts=lambda: self._engine.counts if self._engine else Counts(),
            ranks_lost=lambda: self._control.num_lost if self._control else 0,
            refused_credentials=(lambda: file.num_refused) if file else None,
            rejected_connections=lambda: self._control.num_refused if self._control else 0,
            failed_reloads={name: partial(_num_failed, each) for name, each in files.items()},
            unusable_files={name: partial(_is_unusable, each) for name, each in files.items()},
            certificate_expiry=(lambda: certificates.expires) if certificates else None,
        )

    def _cluster(self) -> Cluster:
        """Raises Unavailable before the service is ready."""
        if self._application is None:
            raise self._not_yet()
        return self._application.cluster()

    def _make_application(self, engine: Engine, tokenizer: Tokenizer, describe: Callable[[], Cluster]) -> Application:
        journal = uploads = None
        if self._durability is not None:
            journal = self._durability.journal
            uploads = DurableUploads(self._durability.catalog, self._durability.contents.uploads)
            uploads.begin()
        share = 1.0 if self._config.security.credentials is None else TENANT_SHARE
        return Application(
            engine,
            tokenizer,
            describe,
            journal,
            uploads,
            engine.transfers,
            observers=self._observers,
            tenant_share=share,
            sampling_defaults=self._sampling_defaults,
        )

    async def _open_durability(self, config: EngineConfig) -> PersistentState | None:
        """Raises CatalogError."""
        return None if self._config.data.data_dir is None else await PersistentState.open(self._config.data, config)

    @property
    def loading(self) -> StartupProgress:
        """Progress of the start."""
        num_ready = self._control.num_ready if self._control is not None else 0
        return StartupProgress(self._config.engine.world_size, num_ready, self._fleet.num_missing)

    def _not_yet(self) -> Unavailable:
        return Unavailable(str(self.loading), LOADING_SECONDS)

    async def _load_tokenizer(self, config: EngineConfig) -> Tokenizer:
        """Raises ModelRefused, and StartError when loading takes longer than `start_timeout`."""
        loading = asyncio.to_thread(Tokenizer.load, Path(config.model), self._renderer)
        try:
            return await asyncio.wait_for(loading, config.start_timeout)
        except TimeoutError:
            raise StartError(f"the tokenizer did not load within {human_seconds(config.start_timeout)}") from None

    def _describe(self, engine: Engine, tokenizer: Tokenizer, ready: Ready) -> ModelInfo:
        checkpoint = tokenizer.checkpoint
        model = ModelInfo(
            name=self._config.shown_name,
            architecture=checkpoint.architecture,
            quantization=checkpoint.quantization,
            dtype=ready.dtype,
            vocabulary_size=checkpoint.vocabulary_size,
            has_chat_template=checkpoint.chat_template is not None,
            kv_dtype=ready.kv_dtype,
        )
        return engine.positions.describe_model(model)

    async def wait(self) -> None:
        """Returns when the service is drained or stopped. Raises the error that ended the engine's loop, such as
        RankLost."""
        assert self._loop is not None
        drained = asyncio.create_task(self._end.drained.wait())
        await asyncio.wait([self._loop, drained], return_when=asyncio.FIRST_COMPLETED)
        if not self._end.has_ended_calls:
            drained.cancel()
            await asyncio.shield(self._loop)
        await drained

    async def wait_drained(self) -> None:
        """Returns when the service is drained, even if it never started."""
        await self._end.drained.wait()

    # --- end ---

    def drain(self) -> None:
        """Refuses new calls and gives running calls `signal_drain_seconds` to finish; after that they end with the
        shutdown reason. A second call ends them immediately."""
        if self._end.is_ordered.is_set():
            self._end.is_urgent.set()
        self._end.is_ordered.set()
        self._begin_drain()

    def _begin_drain(self) -> None:
        self._end.task = self._end.task or asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        end = self._end
        if self._server is not None:
            calls = self._server.drain(self._config.call_drain_seconds)
            await first_completed(calls, self._end_of_signal(), end.is_urgent.wait())
            end.num_cut, end.has_ended_calls = self._server.num_open, True
            waited = f"; waited {human_seconds(self._drain_limit)} for calls to end"
            await self._end_calls(self._server, STOPPING + ("" if end.is_urgent.is_set() else waited))
        end.drained.set()

    async def _end_of_signal(self) -> None:
        """Returns when the time for running calls after a signal is over, which also limits an unlimited drain call: a
        container is killed soon after the signal."""
        await self._end.is_ordered.wait()
        await asyncio.sleep(self._config.signal_drain_seconds)

    @property
    def _drain_limit(self) -> float:
        """Seconds that running calls may continue."""
        is_ordered = self._end.is_ordered.is_set()
        return self._config.signal_drain_seconds if is_ordered else self._config.call_drain_seconds

    async def _end_calls(self, server: GrpcServer, reason: str) -> None:
        """Ends all calls: first the engine's streams, which send the tokens computed so far, then calls that wait for
        other input, such as the next chunk of a document."""
        if self._engine is not None:
            self._engine.end_streams(reason)
        await server.drain(LOG_INTERVAL_SECONDS)
        server.end_calls(reason)
        await server.drain(GRACE_SECONDS)

    async def on_drain_call(self, wait: bool) -> Draining:
        """Starts a drain without shortening a running one. With `wait`, returns only in `stop`, because the process may
        be killed right after the reply. Raises Unavailable if the service stops before the drain has ended."""
        self._begin_drain()
        assert self._server is not None
        if wait:
            await self._end.closing.wait()
            if not self._end.has_ended_calls:
                raise Unavailable(f"the service did not drain: {self._failure or STOPPING}")
        num_open = self._end.num_cut if wait else self._server.num_open
        return Draining(open_calls=num_open, limit=self._drain_limit)

    def _reset_slots(self) -> int:
        assert self._supervisor is not None
        return self._supervisor.reset_slots()

    @property
    def _failure(self) -> BaseException | None:
        """The error that ended the engine's loop, if any."""
        loop = self._loop
        return loop.exception() if loop is not None and loop.done() and not loop.cancelled() else None

    async def stop(self) -> None:
        """Ends open calls with the reason, stops the ranks and reaps all processes."""
        self._end.closing.set()
        if self._end.task is not None:
            self._end.task.cancel()
        self._renderer.stop()
        if self._server is not None:
            await self._end_calls(self._server, str(self._failure or STOPPING))
            await self._server.stop(GRACE_SECONDS)
        if self._gateway is not None:
            await self._gateway.stop()
        if self._application is not None:
            await self._application.close()
        if self._supervisor is not None:
            await self._supervisor.close()
        if self._engine is not None:
            await self._engine.close()
        if self._durability is not None:
            await self._durability.close()
        await self._fleet.shutdown()
        if self._loop is not None:
            await asyncio.gather(self._loop, return_exceptions=True)
        await self._watching.stop()


class ShutdownState:
    """Progress of the shutdown."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.is_ordered = asyncio.Event()
        """Set when the operator requests the shutdown with a signal, not only with an RPC."""
        self.is_urgent = asyncio.Event()
        """Set when the operator requests the shutdown a second time: the drain ends immediately."""
        self.has_ended_calls = False
        """The calls that did not finish in time were counted and are being ended with the reason."""
        self.num_cut = 0
        """Number of those calls."""
        self.drained = asyncio.Event()
        self.closing = asyncio.Event()
        """Set once `stop` has been called."""


async def first_completed(*waits: Coroutine[Any, Any, object]) -> None:
    """Returns when the first coroutine has finished, and cancels the others."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _num_failed(files: Certificates | Credentials) -> int:
    """Number of reloads that failed because the new content is invalid."""
    return files.num_failed_reloads


def _is_unusable(files: Certificates | Credentials) -> bool:
    """Whether the current content is invalid."""
    return files.is_unusable


def describe_weights(most_bytes: int, num_spare: int) -> str:
    """A start-up note about sharded weights: the bytes of each rank, and the effect of a loss."""
    note = f"weights: at most {human_bytes(most_bytes)} on each rank"
    if not num_spare:
        return f"{note}; if a rank is lost, answers wait until a replacement has read its weights (see --spare-ranks)"
    return f"{note}, and room for those of {describe_lost(num_spare)}: the other ranks read them and continue at once"


def idle_processors(world_size: int, num_threads: int, devices: Sequence[str], num_here: int) -> tuple[str, ...]:
    """A start-up note if the CPU ranks leave more than half of the `num_here` processors idle."""
    num_used = world_size * num_threads
    if 2 * num_used >= num_here or any(device != "cpu" for device in devices):
        return ()
    used = "1 thread computes" if num_used == 1 else f"{num_used:,} threads compute"
    return (f"{used} on {num_here:,} processors: --threads N (per rank) uses more",)
