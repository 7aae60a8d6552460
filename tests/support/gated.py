"""A service on a real engine, behind a real socket, whose ranks compute arithmetic results and run only permitted
steps.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from coordinator.auth.authenticator import Authenticator
from coordinator.engine.engine import Engine
from coordinator.grpc_server.server import ANYBODY, GrpcServer
from coordinator.handlers.application import Application
from longleaf.config import EngineConfig
from longleaf.rank_protocol.step import StepPlan, StepResult
from tests.support.fakes.ranks import FakeRanks
from tests.support.running import running
from tests.support.service import load_tokenizer, write_model

VOCAB = 128
"""Single bytes of ASCII: each token is one character."""


class GatedRanks(FakeRanks):
    """Ranks that execute as many steps as `allow` permits, and report `seconds_per_token` per token."""

    def __init__(self, seconds_per_token: float = 1e-6) -> None:
        super().__init__(num_blocks=256, vocab=VOCAB)
        self._seconds_per_token = seconds_per_token
        self._steps = asyncio.Semaphore(0)
        self.has_step = asyncio.Event()

    def allow(self, steps: int) -> None:
        for _ in range(steps):
            self._steps.release()

    async def step(self, plan: StepPlan) -> StepResult:
        self.has_step.set()
        await self._steps.acquire()
        result = await super().step(plan)
        return msgspec.structs.replace(result, seconds=self._seconds_per_token * plan.num_tokens)


@asynccontextmanager
async def serving(
    ranks: FakeRanks,
    folder: Path,
    clock: Callable[[], float] = time.monotonic,
    authenticator: Authenticator = ANYBODY,
    **settings: Any,
) -> AsyncGenerator[tuple[Engine, str], None]:
    """The engine, whose clock may be the test's, and the address of its service."""
    small: dict[str, Any] = {"block_size": 4}
    config = EngineConfig(model="none", **(small | settings))
    engine = Engine(ranks, config, max_positions=4096, clock=clock)
    async with running(engine):
        tokenizer = load_tokenizer(write_model(folder))
        application = Application(engine, tokenizer, engine.cluster)
        server = GrpcServer(application, config.unread_timeout, authenticator=authenticator)
        try:
            yield engine, f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
        finally:
            await server.stop(None)
            await application.close()


async def comes_to(engine: Engine, condition: Callable[[], bool]) -> None:
    """Waits until the engine's own changes make `condition` true."""
    while not condition():
        await engine.changes.after(engine.changes.count)
