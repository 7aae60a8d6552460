"""The memory of a long document's upload, on both sides of a real socket.

The service is a separate process with the real server, tokenizer, engine and scheduler, on fake ranks that finish every
chunk immediately. Memory in bytes.
"""

import asyncio
import ctypes
import gc
import hashlib
import multiprocessing
from array import array
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import psutil
import pytest

from bench.harness.memory import parse
from coordinator.engine.engine import Engine
from coordinator.grpc_server.request_limiter import MAX_PIECE_BYTES
from coordinator.grpc_server.server import GrpcServer
from coordinator.handlers.application import Application
from coordinator.speculation.ngram_index import MAX_BYTES
from coordinator.text.template import DirectRenderer
from coordinator.text.tokenizer import Tokenizer
from longleaf.client import AsyncClient
from longleaf.config import MAX_REQUEST_BYTES, EngineConfig, embedded_model
from longleaf.rank_protocol.step import Prefill, StepPlan, StepResult
from longleaf.types import IngestProgress, ModelInfo
from longleaf.v1 import context_service_pb2 as ingest_pb
from longleaf.v1.context_service_pb2_grpc import ContextServiceStub
from tests.support.fakes.ranks import FakeRanks
from tests.support.running import running

MIB = 1 << 20
PIECE = 64_000
ID = 4.5
"""Bytes of an id, including the spare capacity of a growing array."""
ELSE = 72 * MIB
"""Allowance for other memory: the tokenizer's window, messages in flight, and memory that the allocator retains."""
AT_ONCE = 64 * MIB
"""As above for a text in one message, which is whole in the tokenizer's window."""
GIVEN_BACK = 20 * MIB
"""The memory that may remain after the deletion of a document: less than its ids."""
TRIM = "trim"
BLOCK = "Whales: Grüße, 鯨 and 🐋 sang of amber-12 = 4711.\n".encode() * 10_000


class Hasher(FakeRanks):
    """Ranks that store only a hash of the tokens that they read."""

    def __init__(self) -> None:
        super().__init__(num_blocks=1 << 18)
        self.hash = hashlib.sha256()

    async def step(self, plan: StepPlan) -> StepResult:
        result = await super().step(plan)
        self.plans.clear()
        assert isinstance(plan.work, Prefill)
        self.hash.update(array("I", plan.work.token_ids))
        return result


def serve(pipe: Connection) -> None:
    """Entry point of the service process."""
    asyncio.run(serve_on(Hasher(), pipe))


async def serve_on(ranks: Hasher, pipe: Connection) -> None:
    config = EngineConfig(model=str(embedded_model()), chunk_size=1 << 16, block_size=1024)
    engine, model = Engine(ranks, config, max_positions=1 << 28), ModelInfo(name="embedded")
    async with running(engine):
        tokenizer = Tokenizer.load(embedded_model(), DirectRenderer())
        application = Application(engine, tokenizer, lambda: engine.cluster(model, "local"))
        server = GrpcServer(application)
        pipe.send(f"127.0.0.1:{await server.start('127.0.0.1', 0)}")
        while await asyncio.to_thread(pipe.recv) == TRIM:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            pipe.send(None)
        pipe.send(ranks.hash.hexdigest())
        await server.stop()
        await application.close()


class Hollow:
    """The service process and its memory."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(theirs,))
        self._process.start()
        theirs.close()
        self.address: str = self._pipe.recv()

    @property
    def resident(self) -> int:
        return psutil.Process(self._process.pid).memory_info().rss

    def trim(self) -> int:
        """The memory after the allocator has returned free pages; the amount that it retains otherwise varies with the
        load."""
        self._pipe.send(TRIM)
        self._pipe.recv()
        return self.resident

    @property
    def peak(self) -> int:
        return parse(Path(f"/proc/{self._process.pid}/status").read_text(), "VmHWM")

    def end(self) -> str:
        """The hash of all ids that the ranks were given."""
        self._pipe.send(None)
        found: str = self._pipe.recv()
        self._process.join()
        return found


@pytest.fixture
def hollow() -> Iterator[Hollow]:
    hollow = Hollow()
    yield hollow
    hollow._process.kill()
    hollow._process.join()


def text_of(num_bytes: int) -> Iterator[bytes]:
    """UTF-8 in pieces that split characters."""
    resident = b""
    for number in range(0, num_bytes, len(BLOCK)):
        resident += f"Chapter {number}\n".encode() + BLOCK
        while len(resident) >= PIECE:
            yield resident[:PIECE]
            resident = resident[PIECE:]
    yield resident


class Watch:
    """The memory of both processes at each report, relative to the first one."""

    def __init__(self, hollow: Hollow) -> None:
        self._hollow, self._me = hollow, psutil.Process()
        self.here: list[int] = []
        self.there: list[float] = []
        """Without the ids. Nothing is indexed before it is read."""
        self._before: tuple[int, int] | None = None

    def __call__(self, progress: IngestProgress) -> None:
        here, there = self._me.memory_info().rss, self._hollow.resident
        self._before = self._before or (here, there)
        if progress.phase in ("receiving", "tokenizing"):
            self.here.append(here - self._before[0])
            self.there.append(there - self._before[1] - ID * progress.received_tokens)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "num_bytes",
    [
        pytest.param(6_000_000, marks=pytest.mark.extended),
        pytest.param(100_000_000, marks=pytest.mark.slow),
    ],
    ids=str,
)
async def test_long_text_is_stored_only_as_ids(hollow: Hollow, num_bytes: int) -> None:
    async with AsyncClient(hollow.address) as client:
        await client.ingest("short", text_of(len(BLOCK)))
        before = hollow.trim()
        await client.ingest("short-again", text_of(len(BLOCK)))
        watch = Watch(hollow)
        context = await client.ingest("long", text_of(num_bytes), on_progress=watch)
        assert context.tokens > num_bytes, "the model's tokens are bytes"
        assert len(watch.here) > 10
        assert max(watch.here) < ELSE
        assert max(watch.there) < ELSE
        most = ELSE + (2 * ID + MAX_BYTES) * context.tokens
        assert hollow.peak - before < most, "no more than the document, its segment, and the index of that"
        await client.delete_context("long")
        await client.delete_context("short-again")
        assert hollow.trim() - before < GIVEN_BACK, "all of it is released"
    assert hollow.end() == expected_hash(len(BLOCK), len(BLOCK), num_bytes)


def expected_hash(*sizes: int) -> str:
    """The hash of the ids of texts of these sizes, each tokenized as a whole."""
    opening = array("I", Tokenizer.load(embedded_model(), DirectRenderer()).document_encoder(is_first=True).token_ids)
    expected = hashlib.sha256()
    for size in sizes:
        expected.update(opening)
        for piece in text_of(size):
            ids = array("I")
            ids.extend(piece)  # an id is its byte
            expected.update(ids)
    return expected.hexdigest()


async def send_at_once(address: str, text: bytes) -> int:
    """Ingests a text as one message; the context's tokens."""
    async with grpc.aio.insecure_channel(address, (("grpc.max_send_message_length", -1),)) as channel:
        call = ContextServiceStub(channel).IngestContext()
        await call.write(ingest_pb.IngestContextRequest(config={"name": "contexts/whale"}))
        last = await call.read()
        await call.write(ingest_pb.IngestContextRequest(text=text))
        await call.done_writing()
        while (response := await call.read()) is not grpc.aio.EOF:
            last = response
        if (code := await call.code()) != grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), await call.details())
        return last.context.token_count


async def test_text_may_arrive_in_one_large_message(hollow: Hollow) -> None:
    text = (BLOCK * 2)[: MAX_PIECE_BYTES - 8].decode(errors="ignore").encode()
    before = hollow.resident
    assert await send_at_once(hollow.address, text) == len(text) + 1
    most = AT_ONCE + (3 + 2 * ID + MAX_BYTES) * len(text)
    assert hollow.peak - before < most, "the message, its text, the ids and their index"


async def test_oversized_piece_is_refused_with_its_limit(hollow: Hollow) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=f"{MAX_PIECE_BYTES:,}") as caught:
        await send_at_once(hollow.address, bytes(MAX_PIECE_BYTES + 1))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert await send_at_once(hollow.address, b"short") == 6, "the service continues and retains none of it"


async def test_oversized_message_is_refused_with_its_limit(hollow: Hollow) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=str(MAX_REQUEST_BYTES)) as caught:
        await send_at_once(hollow.address, bytes(MAX_REQUEST_BYTES + 1))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await send_at_once(hollow.address, b"short") == 6, "the service continues and retains none of it"
    assert hollow.peak < 64 * MAX_REQUEST_BYTES
