"""The service's engine on real rank processes, without gRPC, and a recorder of its decode steps."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import psutil

from coordinator.cluster.local_fleet import LocalFleet
from coordinator.cluster.rank_manager import RankManager
from coordinator.engine.engine import Engine
from coordinator.engine_messages import DocumentPrompt, Prompt, Tokens
from longleaf.config import EngineConfig
from longleaf.rank_protocol.step import Decode, StepPlan, StepResult
from longleaf.sampling import SamplingParams
from workers.__main__ import main as worker_main

MAX_POSITIONS = 1 << 24


@dataclass(frozen=True, slots=True)
class Step:
    """A decode step: its sequences, and the bytes of keys and values that rank 0 read."""

    num_sequences: int
    kv_bytes_read: int


class DecodeSteps:
    """Records the keys that decode steps read."""

    def __init__(self) -> None:
        self._steps: list[Step] = []

    def note(self, plan: StepPlan, result: StepResult) -> None:
        if isinstance(plan.work, Decode):
            self._steps.append(Step(len(plan.work.rows), result.kv_bytes_read))

    def take(self) -> list[Step]:
        """Those since the last call."""
        steps, self._steps = self._steps, []
        return steps


class Generations:
    """Generations on an engine, and how long greedy ones take."""

    def __init__(self, engine: Engine, steps: DecodeSteps, pids: Sequence[int] = ()) -> None:
        """`pids` are the processes of the ranks."""
        self._engine = engine
        self._steps = steps
        self._ranks = [psutil.Process(pid) for pid in pids]

    @property
    def max_tokens(self) -> int:
        """Tokens that the pools of all ranks hold."""
        return self._engine.total_tokens

    async def ingest(self, context: str, ids: Sequence[int]) -> float:
        """Seconds of reading a document."""
        begin = time.perf_counter()
        async for _ in self._engine.ingest(DocumentPrompt(context=context, token_ids=ids)):
            pass
        return time.perf_counter() - begin

    async def delete(self, context: str) -> None:
        await self._engine.delete_context(context)

    async def decode(self, context: str, ids: tuple[int, ...], num_tokens: int) -> list[float]:
        """Generates greedily after a question; when each token was there."""
        sampling = SamplingParams(max_tokens=num_tokens, ignore_end_token=True)
        times: list[float] = []
        async for event in self._engine.submit(Prompt(context=context, token_ids=ids, sampling=sampling)):
            if isinstance(event, Tokens):
                times += [time.perf_counter()] * len(event.token_ids)
        return times

    async def answer(self, ids: tuple[int, ...], sampling: SamplingParams) -> tuple[int, ...]:
        """The token ids that follow a prompt."""
        found: list[int] = []
        async for event in self._engine.submit(Prompt(context=None, token_ids=ids, sampling=sampling)):
            if isinstance(event, Tokens):
                found += event.token_ids
        return tuple(found)

    def processor_seconds(self) -> float:
        """Processor time of all ranks so far. Unlike the time that passes, it hardly depends on other programs."""
        times = [rank.cpu_times() for rank in self._ranks]
        return sum(one.user + one.system for one in times)

    def take_steps(self) -> list[Step]:
        """The decode steps since the last call."""
        return self._steps.take()


@asynccontextmanager
async def running(config: EngineConfig) -> AsyncIterator[Generations]:
    """An engine and its ranks; they end with the block."""
    fleet = LocalFleet(worker_main)
    control, steps = RankManager(config, await fleet.reserve(config)), DecodeSteps()
    engine = Engine(control, config, MAX_POSITIONS, observe=steps.note)
    loop: asyncio.Task[None] | None = None
    try:
        await fleet.launch(config, control.invitations, control.on_process_exit)
        await engine.start()
        loop = asyncio.create_task(engine.run())
        yield Generations(engine, steps, [hello.pid for hello in control.hellos])
    finally:
        await engine.close()
        if loop is not None:
            await asyncio.wait([loop])
        await fleet.shutdown()
