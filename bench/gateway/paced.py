"""A service whose answers cost nothing: every stream emits one token per fixed interval.

`python -m bench.gateway.paced` prints its address, and ends with its standard input.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from coordinator import engine_messages
from tests.support.service import FakeEngine, FakeStream, serving, tokens

SECONDS = 0.05
"""From one token to the next."""
TOKEN = 66


class PacedStream(FakeStream):
    """Emits the events of its script, then tokens at fixed intervals."""

    def __init__(self, script: Sequence[engine_messages.Event], most: int) -> None:
        super().__init__(script, None, is_endless=True)
        self._most = most
        self._index = 0
        self._next = 0.0

    async def __anext__(self) -> engine_messages.Event:
        if self._script:
            return await super().__anext__()
        loop = asyncio.get_running_loop()
        self._next = max(self._next + SECONDS, loop.time())
        await asyncio.sleep(self._next - loop.time())
        if self._index >= self._most:
            return engine_messages.Ended("length", 1, 0, self._index, 0.0, 0.0, 0.0)
        self._index += 1
        return engine_messages.Tokens(self._index - 1, tokens((TOKEN,)))


class PacedEngine(FakeEngine):
    """Answers every prompt so."""

    def submit(self, prompt: engine_messages.Prompt) -> FakeStream:
        return PacedStream([engine_messages.Admitted(len(prompt.token_ids), 0)], prompt.sampling.max_tokens)


async def _serve() -> None:
    with TemporaryDirectory(prefix="longleaf-bench-") as folder:
        async with serving(PacedEngine(), Path(folder) / "model") as (_, address):
            print(address, flush=True)
            await asyncio.to_thread(sys.stdin.read)  # until the parent process closes the pipe


if __name__ == "__main__":
    asyncio.run(_serve())
