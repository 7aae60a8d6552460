"""Streams that are read without end, over gRPC or through a gateway, and their pace."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import psutil

from longleaf.client import AsyncClient
from longleaf.types import Delta

STREAM_TOKENS = 2048
"""A stream restarts after this many tokens, so that a token costs the same at the end of a turn as at its beginning."""
FLOW_SECONDS = 120.0
"""How long the first tokens of all streams may take."""
PATH = "/v1/completions"
DATA, DONE = b"data: ", b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of every stream."""

    model: str
    token_id: int
    end_token: int
    """Which shall not come."""


@dataclass(slots=True)
class Count:
    """Deltas so far: over gRPC events, over HTTP chunks that have text."""

    deltas: int = 0


Read = Callable[[int, Count, asyncio.Event], Coroutine[Any, Any, None]]
"""Reads answers one after the other; the event is set when the first delta is there."""


def over_grpc(client: AsyncClient, prompt: Prompt) -> Read:
    """The client library, as its users have it."""

    async def read(number: int, count: Count, begun: asyncio.Event) -> None:
        del number
        bias = {prompt.end_token: -100.0}
        while True:
            async for event in client.generate([prompt.token_id], max_tokens=STREAM_TOKENS, logit_bias=bias):
                if isinstance(event, Delta):
                    count.deltas += 1
                    begun.set()

    return read


def through_gateway(url: str, prompt: Prompt) -> Read:
    """A client that looks at each chunk as far as it takes to know that it is one, over a connection of each stream."""
    body = {"model": prompt.model, "prompt": [prompt.token_id], "max_tokens": STREAM_TOKENS, "stream": True}
    body |= {"logit_bias": {str(prompt.end_token): -100.0}}

    async def read(number: int, count: Count, begun: asyncio.Event) -> None:
        del number
        while True:
            async with posted(url, PATH, body) as lines:
                async for line in lines:
                    if line.startswith(DATA) and not line.startswith(DONE):
                        count.deltas += 1
                        begun.set()

    return read


@asynccontextmanager
async def posted(url: str, path: str, body: object) -> AsyncIterator[AsyncIterator[bytes]]:
    """The lines of the response to a POST. Raises OSError."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: {place.netloc}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(data)}\r\nconnection: close\r\n\r\n".encode() + data)
        status = await reader.readline()
        if b" 200 " not in status:
            raise OSError(f"{status!r} {await reader.read(4096)!r}")
        yield reader
    finally:
        writer.close()


@dataclass(frozen=True, slots=True)
class Pace:
    """The throughput of a turn. Processor time in seconds."""

    deltas: int
    seconds: float
    gateway_cpu: float
    client_cpu: float

    @property
    def per_s(self) -> float:
        return self.deltas / self.seconds


async def pace(read: Read, num: int, seconds: float, gateway: psutil.Process | None) -> Pace:
    """That of `num` streams together, from when all have begun."""
    count, begun = Count(), [asyncio.Event() for _ in range(num)]
    async with asyncio.TaskGroup() as group:
        readers = [group.create_task(read(number, count, event)) for number, event in enumerate(begun)]
        async with asyncio.timeout(FLOW_SECONDS):
            for event in begun:
                await event.wait()
        before, cpu, own, began = count.deltas, _cpu(gateway), time.process_time(), time.perf_counter()
        await asyncio.sleep(seconds)
        took = time.perf_counter() - began
        found = Pace(count.deltas - before, took, _cpu(gateway) - cpu, time.process_time() - own)
        for reader in readers:
            reader.cancel()
    return found


def _cpu(process: psutil.Process | None) -> float:
    times = process.cpu_times() if process is not None else None
    return times.user + times.system if times is not None else 0.0


async def first_over_grpc(client: AsyncClient, prompt: Prompt) -> float:
    """Seconds to the first token, on a connection that is there."""
    began = time.perf_counter()
    async for event in client.generate([prompt.token_id], max_tokens=1, logit_bias={prompt.end_token: -100.0}):
        if isinstance(event, Delta):
            return time.perf_counter() - began
    raise AssertionError("an answer without a token")


async def first_through_gateway(url: str, prompt: Prompt) -> float:
    """Seconds to the first chunk with text, connecting included."""
    body = {"model": prompt.model, "prompt": [prompt.token_id], "max_tokens": 1, "stream": True}
    body |= {"logit_bias": {str(prompt.end_token): -100.0}}
    began = time.perf_counter()
    async with posted(url, PATH, body) as lines:
        async for line in lines:
            if line.startswith(DATA):
                return time.perf_counter() - began
    raise AssertionError("an answer without a token")
