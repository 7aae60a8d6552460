"""The memory of a refused request is released immediately, without the garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from longleaf import codec
from longleaf.errors import LongleafError, Unavailable
from longleaf.types import Generate, IngestHeader
from longleaf.v1 import context_service_pb2 as ingest_pb
from longleaf.v1 import generation_service_pb2 as service_pb
from tests.support.fuzz.target import PLAIN, fuzzed
from tests.support.service import FakeStream, Served

RETAINING_TYPES = (grpc.aio.AbortError, LongleafError, RuntimeError, FrameType, Generate, IngestHeader)
"""Types that keep a request alive."""
GENERATE = "/longleaf.v1.GenerationService/Generate"
INGEST = "/longleaf.v1.ContextService/IngestContext"
CONTEXTS = "/longleaf.v1.ContextService"
INVALID, MISSING = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
HEADER = codec.encode_ingest_piece(IngestHeader("moby"))
RETAINED = {"request_id": "a", "resume_duration": {"seconds": 60}}
CASES: dict[str, tuple[grpc.StatusCode, str, tuple[Message | bytes, ...]]] = {
    "too long a text": (INVALID, GENERATE, (service_pb.GenerateRequest(text="x" * 100_000),)),
    "to be held": (INVALID, GENERATE, (service_pb.GenerateRequest(text="x" * 100_000, **RETAINED),)),
    "checked in a thread": (INVALID, GENERATE, (service_pb.GenerateRequest(token_ids={"ids": [5] * 99 + [4000]}),)),
    "too many tokens": (INVALID, GENERATE, (service_pb.GenerateRequest(token_ids={"ids": [5] * 299}),)),
    "wrong sampling": (INVALID, GENERATE, (service_pb.GenerateRequest(text="x", sampling={"top_p": 2}),)),
    "no context": (MISSING, GENERATE, (service_pb.GenerateRequest(text="x", context="contexts/none"),)),
    "no message": (INVALID, GENERATE, (b"\x12\x02\xff\xfe",)),
    "unary, missing": (MISSING, f"{CONTEXTS}/GetContext", (ingest_pb.GetContextRequest(name="contexts/none"),)),
    "unary, wrong": (INVALID, f"{CONTEXTS}/GetContext", (ingest_pb.GetContextRequest(name="x" * 9999),)),
    "unary, chained": (INVALID, f"{CONTEXTS}/ListContexts", (ingest_pb.ListContextsRequest(page_token="é"),)),
    "upload": (INVALID, INGEST, (HEADER, ingest_pb.IngestContextRequest(text=b"\xff" * 100))),
    "health": (MISSING, "/grpc.health.v1.Health/Check", (health_pb2.HealthCheckRequest(service="x" * 9999),)),
}


@pytest.fixture(autouse=True)
def _unlogged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")  # its records would keep the errors alive


@contextmanager
def garbage() -> Iterator[list[object]]:
    """Objects that are created inside the block and can only be freed by a full collection."""
    found: list[object] = []
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found.extend(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def code_of(channel: grpc.aio.Channel, method: str, requests: tuple[Message | bytes, ...]) -> grpc.StatusCode:
    """The status of a call made of bytes."""
    call = channel.stream_stream(method)()
    with suppress(grpc.aio.AioRpcError):
        for request in requests:
            await call.write(request if isinstance(request, bytes) else request.SerializeToString())
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code()


async def left_over(
    address: str, code: grpc.StatusCode, method: str, requests: tuple[Message | bytes, ...]
) -> list[str]:
    """Objects that three refused calls leave for the collector."""
    async with grpc.aio.insecure_channel(address) as channel:
        assert await code_of(channel, method, requests) == code
        with garbage() as found:
            for _ in range(3):
                await code_of(channel, method, requests)
        return sorted(
            {f"{type(thing).__name__}: {thing!r:.200}" for thing in found if isinstance(thing, RETAINING_TYPES)}
        )


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", CASES)
async def test_refused_request_is_freed(tmp_path: Path, case: str) -> None:
    async with fuzzed(tmp_path) as target:
        assert await left_over(target.address, *CASES[case]) == []


async def test_request_is_freed_after_an_unexpected_error(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(_: object) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(service.engine, "submit", submit)
    request = service_pb.GenerateRequest(token_ids={"ids": PLAIN})
    assert await left_over(service.address, grpc.StatusCode.INTERNAL, GENERATE, (request,)) == []


@pytest.mark.parametrize("fields", [{}, RETAINED], ids=["plain", "held"])
async def test_request_is_freed_after_a_late_failure(
    service: Served, monkeypatch: pytest.MonkeyPatch, fields: dict[str, object]
) -> None:
    monkeypatch.setattr(service.engine, "submit", lambda _: FakeStream([], Unavailable("a rank is lost"), False))
    request = service_pb.GenerateRequest(token_ids={"ids": PLAIN}, **fields)
    assert await left_over(service.address, grpc.StatusCode.UNAVAILABLE, GENERATE, (request,)) == []
