"""Uploads that are refused midway, over real sockets: every client gets the reason immediately, whether it continues to
send, pauses or ends."""

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from coordinator.grpc_server import request_limiter
from longleaf.client import AsyncClient, Client
from longleaf.errors import AlreadyExists, InvalidArgument
from longleaf.v1 import context_service_pb2 as ingest_pb
from longleaf.v1.context_service_pb2_grpc import ContextServiceStub
from tests.support.service import Served

pytestmark = pytest.mark.timeout(60)

CONFIG = ingest_pb.IngestContextRequest(config={"name": "contexts/moby"})
NUM_TIMES = 100
LONG = 1e6
"""Seconds, longer than a test: a test that waits for this fails."""
Goes = Callable[[threading.Event], Iterator[bytes]]


def sends_on(_: threading.Event) -> Iterator[bytes]:
    yield b"good, then \xff"
    yield from itertools.repeat(b"more " * 10_000)


def falls_silent(is_over: threading.Event) -> Iterator[bytes]:
    yield b"good, then \xff"
    is_over.wait()


async def in_turns(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Parts, one of which may be delayed."""
    for part in parts:
        yield part
        await asyncio.sleep(0)


async def silent_after(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
    await asyncio.Event().wait()


def refusal_of(error: grpc.RpcError) -> tuple[grpc.StatusCode, bool]:
    return error.code(), "is not UTF-8 at byte 11" in (error.details() or "")


WRONG = (grpc.StatusCode.INVALID_ARGUMENT, True)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    def wait(quiet: float, drain: float) -> None:
        monkeypatch.setattr(request_limiter, "QUIET_SECONDS", quiet)
        monkeypatch.setattr(request_limiter, "DISCARD_SECONDS", drain)

    return wait


@pytest.mark.parametrize("is_silent", [False, True])
async def test_client_gets_the_refusal_immediately(
    service: Served, waits: Callable[[float, float], None], is_silent: bool
) -> None:
    def shape() -> AsyncIterator[bytes]:
        return silent_after(b"good, then \xff") if is_silent else in_turns(sends_on(threading.Event()))

    waits(LONG, LONG)
    async with AsyncClient(service.address, retries=0) as client:
        for _ in range(NUM_TIMES):
            with pytest.raises(InvalidArgument, match="text: is not UTF-8 at byte 11"):
                await client.ingest("moby", shape())


@pytest.mark.parametrize("goes", [sends_on, falls_silent])
async def test_synchronous_client_gets_the_refusal_immediately(
    service: Served, waits: Callable[[float, float], None], goes: Goes
) -> None:
    waits(LONG, LONG)

    def use() -> None:
        is_over = threading.Event()
        with Client(service.address, retries=0) as client:
            for _ in range(NUM_TIMES):
                with pytest.raises(InvalidArgument, match="text: is not UTF-8 at byte 11"):
                    client.ingest("moby", goes(is_over))
        is_over.set()

    await asyncio.to_thread(use)


@pytest.mark.parametrize("goes", [sends_on, falls_silent])
async def test_synchronous_stub_gets_the_refusal_immediately(
    service: Served, waits: Callable[[float, float], None], goes: Goes
) -> None:
    """Like stubs of other languages, whose libraries keep the status."""
    waits(LONG, LONG)

    def use() -> None:
        with grpc.insecure_channel(service.address) as channel:
            for _ in range(NUM_TIMES):
                is_over = threading.Event()
                pieces = (ingest_pb.IngestContextRequest(text=part) for part in goes(is_over))
                with pytest.raises(grpc.RpcError) as caught:
                    list(ContextServiceStub(channel).IngestContext(itertools.chain([CONFIG], pieces)))
                is_over.set()
                assert refusal_of(caught.value) == WRONG

    await asyncio.to_thread(use)


async def upward(num_more: int, *, ends: bool) -> AsyncIterator[ingest_pb.IngestContextRequest]:
    yield CONFIG
    yield ingest_pb.IngestContextRequest(text=b"good, then \xff")
    for _ in range(num_more):
        yield ingest_pb.IngestContextRequest(text=b"more " * 10_000)
    if not ends:
        await asyncio.Event().wait()


async def test_asyncio_stub_may_finish_sending(
    service: Served, channel: grpc.aio.Channel, waits: Callable[[float, float], None]
) -> None:
    """Its library turns a status that arrives during sending into INTERNAL."""
    waits(LONG, LONG)
    for _ in range(NUM_TIMES):
        with pytest.raises(grpc.RpcError) as caught:
            [_ async for _ in ContextServiceStub(channel).IngestContext(upward(20, ends=True))]
        assert refusal_of(caught.value) == WRONG


async def test_idle_asyncio_stub_gets_the_refusal_soon(
    service: Served, channel: grpc.aio.Channel, waits: Callable[[float, float], None]
) -> None:
    waits(0.05, LONG)

    async def use() -> None:
        with pytest.raises(grpc.RpcError) as caught:
            [_ async for _ in ContextServiceStub(channel).IngestContext(upward(0, ends=False))]
        assert refusal_of(caught.value) == WRONG

    await asyncio.gather(*[use() for _ in range(NUM_TIMES)])


async def test_reading_asyncio_stub_gets_the_reason(service: Served, channel: grpc.aio.Channel) -> None:
    """The service was reading when it refused the upload."""
    config = ingest_pb.IngestContextRequest(config={"name": "contexts/moby", "expire_time": soon(0.3)})

    async def silent() -> AsyncIterator[ingest_pb.IngestContextRequest]:
        yield config
        await asyncio.Event().wait()

    with pytest.raises(grpc.RpcError) as caught:
        [_ async for _ in ContextServiceStub(channel).IngestContext(silent())]
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "config.expire_time" in (caught.value.details() or "")


def soon(seconds: float) -> Timestamp:
    event = Timestamp()
    event.FromNanoseconds(time.time_ns() + int(seconds * 1e9))
    return event


async def test_asyncio_stub_that_never_ends_is_closed_eventually(
    service: Served, channel: grpc.aio.Channel, waits: Callable[[float, float], None]
) -> None:
    """Even if it cannot receive the reason."""
    waits(LONG, 0.2)
    with pytest.raises(grpc.RpcError):
        [_ async for _ in ContextServiceStub(channel).IngestContext(upward(10**9, ends=True))]


async def test_asyncio_stub_that_does_not_wait_gets_the_reason(
    service: Served, channel: grpc.aio.Channel, waits: Callable[[float, float], None]
) -> None:
    """It sends although its name is refused."""
    waits(LONG, LONG)
    service.engine.contexts = {"moby": [1]}
    for _ in range(NUM_TIMES):
        with pytest.raises(grpc.RpcError) as caught:
            [_ async for _ in ContextServiceStub(channel).IngestContext(upward(20, ends=True))]
        assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS


async def test_taken_name_is_refused_immediately(service: Served, waits: Callable[[float, float], None]) -> None:
    waits(LONG, LONG)
    service.engine.contexts = {"moby": [1]}
    with pytest.raises(AlreadyExists):
        await service.client.ingest("moby", silent_after())
