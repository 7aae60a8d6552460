"""Streams that are read without end, and their pace."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import NamedTuple

from bench.production.services import Running
from longleaf.client import AsyncClient
from longleaf.errors import LongleafError
from longleaf.types import Delta

STREAMS = 16
STREAM_TOKENS = 4096
"""A stream restarts after this many tokens, so that a token costs the same at the end of a turn as at its beginning."""
FLOW_SECONDS = 60.0
"""How long the first tokens of all streams may take."""
PAUSE_SECONDS = 0.02
"""The delay before a failed stream restarts."""


class Pace(NamedTuple):
    """The throughput and the CPU time during a measurement."""

    tokens_per_s: float
    service_cpu_s: float
    """CPU seconds of the coordinator."""
    client_cpu_s: float
    """CPU seconds of this process."""
    seconds: float

    @property
    def service_us(self) -> float:
        """CPU microseconds of the coordinator per token, if it did nothing else."""
        return self.service_cpu_s / (self.tokens_per_s * self.seconds) * 1e6

    @property
    def client_us(self) -> float:
        """The same of this process."""
        return self.client_cpu_s / (self.tokens_per_s * self.seconds) * 1e6


class Streams:
    """Reads `num` generations at once over one connection."""

    def __init__(self, client: AsyncClient, num: int) -> None:
        self._client = client
        self._num = num
        self._num_tokens = 0
        self.errors: Counter[str] = Counter()
        """By kind."""

    @asynccontextmanager
    async def flowing(self) -> AsyncIterator[None]:
        """They are read while the block runs, which begins after the first token of each. Raises TimeoutError."""
        begun = [asyncio.Event() for _ in range(self._num)]
        async with asyncio.TaskGroup() as group:
            readers = [group.create_task(self._read(number, event)) for number, event in enumerate(begun)]
            try:
                async with asyncio.timeout(FLOW_SECONDS):
                    for event in begun:
                        await event.wait()
                yield
            finally:
                for reader in readers:
                    reader.cancel()

    async def _read(self, number: int, begun: asyncio.Event) -> None:
        while True:
            try:
                requested = self._client.generate([65 + number % 26], max_tokens=STREAM_TOKENS, ignore_end_token=True)
                async for event in requested:
                    if isinstance(event, Delta):
                        self._num_tokens += len(event.token_ids)
                        begun.set()
            except LongleafError as error:
                self.errors[type(error).__name__] += 1
                await asyncio.sleep(PAUSE_SECONDS)

    async def pace(self, service: Running, work: Awaitable[object]) -> Pace:
        """That of all together while `work` is done."""
        cpu, own, tokens, began = service.cpu_seconds, time.process_time(), self._num_tokens, time.perf_counter()
        await work
        seconds = time.perf_counter() - began
        rate = (self._num_tokens - tokens) / seconds
        return Pace(rate, service.cpu_seconds - cpu, time.process_time() - own, seconds)


async def first_token(client: AsyncClient) -> float:
    """Seconds from a short question to its first token."""
    began = time.perf_counter()
    first = 0.0
    async for event in client.generate([65, 66, 67], max_tokens=1, ignore_end_token=True):
        if isinstance(event, Delta):
            first = first or time.perf_counter() - began
    return first
