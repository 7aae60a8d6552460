"""Long texts over real sockets: tokenized in windows, only as far as they can fit, and only while their client is
connected."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer

from coordinator.grpc_server.server import GrpcServer
from coordinator.handlers.application import Application
from longleaf.client import AsyncClient
from longleaf.errors import InvalidArgument
from tests.support.service import FakeEngine, Served, collect, load_tokenizer, write_model

pytestmark = pytest.mark.timeout(60)

WINDOW = 1 << 16
LONG = 10_000
"""Length in characters from which a text is one window of a long text and waits at the gate."""
OTHER = "b" * (12 * WINDOW)
NUM_THREADS = 2


class Gate:
    """A tokenizer that counts the windows of long texts and blocks them until it is opened."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self._open = threading.Event()
        self.num_windows = Counter[str]()
        """Windows by the letter that a text consists of."""
        self.reached = threading.Semaphore(0)

    def open(self) -> None:
        self._open.set()

    def encode_batch(self, texts: list[str], **options: Any) -> list[Encoding]:
        if len(texts[0]) > LONG:
            self.num_windows[texts[0][-1]] += 1
            self.reached.release()
            assert self._open.wait(60)
        return self._tokenizer.encode_batch(texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class Gated(Served):
    """A service whose tokenizer has a gate."""

    gate: Gate


@pytest.fixture
async def gated(tmp_path: Path) -> AsyncIterator[Gated]:
    engine, tokenizer = FakeEngine(), load_tokenizer(write_model(tmp_path))
    engine.max_positions = engine.total_tokens = 1 << 23
    gate: Any = Gate(tokenizer._plain)
    tokenizer._plain = tokenizer._control = gate
    application = Application(engine, tokenizer, engine.describe)
    server = GrpcServer(application)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    async with AsyncClient(address, retries=0) as client:
        gated = Gated(engine, server, address, client)
        gated.gate = gate
        yield gated
    gate.open()
    await server.stop(None)
    await application.close()


async def generate(client: AsyncClient, text: str) -> object:
    return await collect(client.generate(text, max_tokens=1))


async def count(client: AsyncClient, text: str) -> object:
    return await client.count_tokens(text)


async def tokenize(client: AsyncClient, text: str) -> object:
    return await client.tokenize(text[: 1 << 20])


async def ingest(client: AsyncClient, text: str) -> object:
    return await client.ingest("moby", text)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("call", [generate, count, tokenize, ingest])
async def test_tokenization_stops_when_the_client_disconnects(
    gated: Gated, call: Callable[[AsyncClient, str], Awaitable[object]]
) -> None:
    gate = gated.gate
    async with AsyncClient(gated.address) as leaver:
        call_ = asyncio.ensure_future(call(leaver, "aa" * (12 * WINDOW)))
        assert await asyncio.to_thread(gate.reached.acquire, timeout=30)
        call_.cancel()
        await asyncio.wait([call_])
    for _ in range(5):
        assert await gated.client.count_tokens("short") == 5, "meanwhile a thread is free"
    gate.open()
    assert await count(gated.client, OTHER) == len(OTHER)
    assert gate.num_windows["a"] == 1, "while the other text was tokenized, nothing of this one was"
    assert not gated.engine.prompts
    assert not gated.engine.contexts


@pytest.mark.timeout(120)
async def test_abandoned_texts_delay_no_other_client(gated: Gated) -> None:
    gate = gated.gate
    async with AsyncClient(gated.address, retries=0) as leaver:
        calls = [asyncio.ensure_future(count(leaver, "aa" * (12 * WINDOW))) for _ in range(10)]
        for _ in range(NUM_THREADS):
            assert await asyncio.to_thread(gate.reached.acquire, timeout=30)
        for one in calls:
            one.cancel()
        await asyncio.wait(calls)
    other = asyncio.ensure_future(count(gated.client, OTHER))
    for _ in range(20):
        await gated.client.cluster()  # needs no thread: meanwhile the service notices disconnected clients
    gate.open()
    assert await other == len(OTHER)
    assert gate.num_windows["a"] == NUM_THREADS


async def test_only_as_much_text_as_fits_is_tokenized(gated: Gated) -> None:
    gated.gate.open()
    gated.engine.max_positions = 3 * WINDOW
    with pytest.raises(InvalidArgument, match="tokens do not fit in 196,608 tokens") as caught:
        await generate(gated.client, "a" * (30 * WINDOW))
    assert caught.value.field == "text"
    assert gated.gate.num_windows["a"] <= 5
    assert not gated.engine.prompts


@pytest.mark.timeout(120)
async def test_server_shutdown_does_not_wait_for_a_long_text(gated: Gated) -> None:
    counting = asyncio.ensure_future(count(gated.client, "aa" * (12 * WINDOW)))
    assert await asyncio.to_thread(gated.gate.reached.acquire, timeout=30)
    await gated.server.stop(None)
    gated.gate.open()
    (result,) = await asyncio.gather(counting, return_exceptions=True)
    assert isinstance(result, Exception)
    assert gated.gate.num_windows["a"] == 1
