"""An honest client that records the latency of its stream and its requests."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bench.hostile.heartbeat import longest_gap
from longleaf.client import AsyncClient
from longleaf.errors import LongleafError
from longleaf.types import Delta

CONTEXT, NAME = "honest", "honest"
STREAM_TOKENS = 50_000
"""More than come in one turn."""
PAUSE_SECONDS = 0.02
"""Between two small requests, and before one that failed is made again."""


class Honest:
    """One long stream, and small requests one after another. Times are of `time.monotonic`, in seconds."""

    def __init__(self, client: AsyncClient, answer_timeout: float) -> None:
        """`client` must not retry. A small request times out after `answer_timeout` seconds."""
        self._client = client
        self._answer_timeout = answer_timeout
        self._arrivals: list[float] = []
        self._answers: list[float] = []
        """Seconds of each small request from its first attempt to its answer."""
        self.errors: Counter[str] = Counter()
        """Errors of stream and small requests, by kind."""
        self.was_answered = True
        """No small request timed out."""

    @asynccontextmanager
    async def streaming(self) -> AsyncIterator[None]:
        """While the block runs a stream is read; the block begins after its first token."""
        flowing = asyncio.Event()
        reading = asyncio.create_task(self._read(flowing))
        try:
            waiting = asyncio.create_task(flowing.wait())
            await asyncio.wait([reading, waiting], return_when=asyncio.FIRST_COMPLETED, timeout=self._answer_timeout)
            waiting.cancel()
            yield
        finally:
            reading.cancel()
            await asyncio.wait([reading])

    async def _read(self, flowing: asyncio.Event) -> None:
        options = {"max_tokens": STREAM_TOKENS, "ignore_end_token": True, "client": NAME}
        try:
            async for event in self._client.generate([65], context=CONTEXT, **options):
                if isinstance(event, Delta):
                    self._arrivals.append(time.monotonic())
                    flowing.set()
        except LongleafError as error:
            self.errors[f"stream: {type(error).__name__}"] += 1

    def longest_gap(self, began: float, ended: float) -> float:
        """Longest gap of the stream; for a broken stream, up to `ended`."""
        return longest_gap(self._arrivals, began, ended)

    async def ask_until(self, stop: asyncio.Event) -> float:
        """Makes small requests until `stop`, and one more; how long the longest of them took."""
        self._answers.clear()
        while not stop.is_set():
            await self._ask()
            await asyncio.sleep(PAUSE_SECONDS)
        await self._ask()
        return max(self._answers)

    async def _ask(self) -> None:
        began = time.monotonic()
        left = self._answer_timeout
        while left > 0:
            try:
                options = {"max_tokens": 4, "ignore_end_token": True, "client": NAME, "timeout": left}
                async for _ in self._client.generate("How are you?", **options):
                    pass
                break
            except LongleafError as error:
                self.errors[type(error).__name__] += 1
            await asyncio.sleep(PAUSE_SECONDS)
            left = began + self._answer_timeout - time.monotonic()
        else:
            self.was_answered = False
        self._answers.append(time.monotonic() - began)
