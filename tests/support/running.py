"""An engine that runs, on ranks of any kind. Nothing of it is left after the block."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import psutil

from coordinator.cluster.local_fleet import LocalFleet
from coordinator.cluster.ports import Fleet, OnDeath
from coordinator.cluster.rank_manager import RankManager
from coordinator.engine.engine import Engine
from longleaf.config import EngineConfig
from longleaf.errors import Unavailable
from longleaf.rank_protocol.group_messages import Ready
from longleaf.rank_protocol.rank_spec import ConnectInfo


@dataclass(frozen=True)
class Running:
    """A started engine, the ready messages of its ranks, and its loop, which ends with the engine's error."""

    engine: Engine
    readies: tuple[Ready, ...]
    loop: asyncio.Task[None]


class WatchedFleet(LocalFleet):
    """Knows the processes that it launched."""

    children: Sequence[psutil.Process] = ()

    async def launch(self, config: EngineConfig, invitations: Sequence[ConnectInfo], on_death: OnDeath) -> None:
        await super().launch(config, invitations, on_death)
        pids = [place.process.pid for place in self._places.values()]
        self.children = [psutil.Process(pid) for pid in pids if pid is not None and psutil.pid_exists(pid)]


@asynccontextmanager
async def running(engine: Engine) -> AsyncGenerator[Running, None]:
    """Starts the engine and its loop. After the block its laws hold, unless something ended it."""
    loop: asyncio.Task[None] | None = None
    try:
        readies = await engine.start()
        loop = asyncio.create_task(engine.run())
        yield Running(engine, readies, loop)
        with suppress(Unavailable):
            engine.audit()
    finally:
        await engine.close()
        if loop is not None:
            await asyncio.gather(loop, return_exceptions=True)


@asynccontextmanager
async def running_on(
    fleet: Fleet, control: RankManager, config: EngineConfig, max_positions: int = 100_000
) -> AsyncGenerator[Running, None]:
    """An engine whose ranks are processes."""
    engine = Engine(control, config, max_positions)
    try:
        await fleet.launch(config, control.invitations, control.lost)
        async with running(engine) as found:
            yield found
    finally:
        await engine.close()
        await fleet.shutdown()
