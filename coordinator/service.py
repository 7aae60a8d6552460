"""A whole service: fleet, control channel, engine, use cases and their door, brought up and taken down in the right
order."""

import asyncio
import os
import sys
from functools import partial
from pathlib import Path

import msgspec

from coordinator.calls.use_cases import UseCases
from coordinator.engine.engine import Engine
from coordinator.memory import return_large
from coordinator.placement.positions import UNLIMITED
from coordinator.ranks.control import Control
from coordinator.ranks.ports import Fleet
from coordinator.serving.server import Server, check_address
from coordinator.text.renderer import Renderer
from coordinator.text.tokenizer import Tokenizer
from longleaf.channel.lives import Ready
from longleaf.config import LOOPBACK, EngineConfig, Launcher, check_model_name
from longleaf.errors import StartError
from longleaf.messages import ModelInfo
from longleaf.units import human_seconds

SWITCH_SECONDS = 0.0005
"""How long threads that turn texts into ids may keep the event loop from going on, each time that it has waited: a
tenth of the interpreter's own measure, for it waits many times while it serves one step."""
GRACE_SECONDS = 2.0
"""How long open calls may take to hear why the service ends."""


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What to serve and where to listen."""

    engine: EngineConfig
    host: str = LOOPBACK
    port: int = 0
    """0 lets the system choose."""
    launcher: Launcher = "ray"
    model_name: str | None = None
    """What clients see of the model; None: the name of its folder."""
    ray_address: str | None = None
    """A Ray cluster to join; None starts one."""
    as_json: bool = False
    """Tell the address as a JSON object instead of a line for people."""

    @property
    def shown_name(self) -> str:
        """What clients see of the model."""
        folder = Path(self.engine.model).resolve().name
        return self.model_name or os.fsencode(folder).decode(errors="replace")  # it may be any bytes


class Service:
    """Life: start, wait, stop. `stop` may be called at any time, also when `start` failed."""

    def __init__(self, config: ServiceConfig, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        self._renderer = Renderer()
        self._engine: Engine | None = None
        self._use_cases: UseCases | None = None
        self._server: Server | None = None
        self._loop: asyncio.Task[None] | None = None
        self.notes: tuple[str, ...] = ()
        """What the ranks logged while they started, each text once."""

    async def start(self) -> int:
        """Brings everything up and returns the port. Raises StartError, ModelRefused, InvalidArgument or WorkerLost."""
        return_large()
        sys.setswitchinterval(SWITCH_SECONDS)
        config = self._config.engine
        config.check()
        check_address(self._config.host, self._config.port)
        if self._config.model_name is not None:
            check_model_name(self._config.model_name)
        tokenizer = await self._load_tokenizer(config)
        control = Control(config, await self._fleet.reserve(config))
        # without a limit of its own the model is bounded by the pool alone
        self._engine = Engine(control, config, tokenizer.checkpoint.max_positions or UNLIMITED)
        await self._fleet.launch(config, control.invitations, control.lost)
        readies = await self._engine.start()
        self.notes = tuple(dict.fromkeys(note for ready in readies for note in ready.notes))
        self._loop = asyncio.create_task(self._engine.run())
        model = self._describe(self._engine, tokenizer, readies[0])
        describe = partial(self._engine.cluster, model, self._config.launcher)
        self._use_cases = UseCases(self._engine, tokenizer, describe)
        self._server = Server(self._use_cases, config.unread_timeout)
        return await self._server.start(self._config.host, self._config.port)

    async def _load_tokenizer(self, config: EngineConfig) -> Tokenizer:
        """Raises ModelRefused, and StartError when it takes longer than `start_timeout`."""
        loading = asyncio.to_thread(Tokenizer.load, Path(config.model), self._renderer.split)
        try:
            return await asyncio.wait_for(loading, config.start_timeout)
        except TimeoutError:
            raise StartError(f"the tokenizer was not loaded within {human_seconds(config.start_timeout)}") from None

    def _describe(self, engine: Engine, tokenizer: Tokenizer, ready: Ready) -> ModelInfo:
        checkpoint = tokenizer.checkpoint
        model = ModelInfo(
            name=self._config.shown_name,
            architecture=checkpoint.architecture,
            dtype=ready.dtype,
            vocabulary_size=checkpoint.vocabulary_size,
            has_chat_template=checkpoint.chat_template is not None,
            kv_dtype=ready.kv_dtype,
        )
        return engine.positions.describe_model(model)

    async def wait(self) -> None:
        """Returns when the service was stopped; raises what ended it, for instance WorkerLost."""
        assert self._loop is not None
        await asyncio.shield(self._loop)

    async def stop(self) -> None:
        """Tells open calls, then ranks, then reaps all processes."""
        self._renderer.stop()
        if self._engine is not None:
            self._engine.end_streams()
        if self._server is not None:
            await self._server.stop(GRACE_SECONDS)
        if self._use_cases is not None:
            await self._use_cases.close()
        if self._engine is not None:
            await self._engine.close()
        await self._fleet.shutdown()
        if self._loop is not None:
            await asyncio.gather(self._loop, return_exceptions=True)
