"""Many calls at once, and large requests, over real sockets."""

import asyncio
import gc
import threading
from collections import Counter
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from coordinator.grpc_server.request_limiter import MAX_SMALL_BYTES
from longleaf import codec
from longleaf.codec.status import DETAILS_KEY
from longleaf.config import MAX_REQUEST_BYTES
from longleaf.errors import InvalidArgument, ResourceExhausted
from longleaf.types import Generate, Started
from longleaf.v1 import generation_service_pb2 as service_pb
from longleaf.v1.generation_service_pb2_grpc import GenerationServiceStub
from tests.support.fuzz.messages import methods
from tests.support.service import Served

MANY = 2500
"""Calls; the gRPC library's own limit of calls that were not yet accepted is 1000."""
TEXTS = {"Generate", "IngestContext", "ImportContext", "CountTokens", "Tokenize", "Detokenize", "VerifyCluster"}


async def test_every_refused_call_has_a_retry_delay(service: Served, channel: grpc.aio.Channel) -> None:
    service.engine.error = ResourceExhausted("queue", "is full", 1.5)
    stub = GenerationServiceStub(channel)

    async def ask() -> tuple[grpc.StatusCode, tuple[str, ...]]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(service_pb.GenerateRequest(text="x")).read()
        data = dict(caught.value.trailing_metadata() or ()).get(DETAILS_KEY, b"")
        return caught.value.code(), tuple(packed.TypeName() for packed in status_pb2.Status.FromString(data).details)

    details = tuple(kind.DESCRIPTOR.full_name for kind in (error_details_pb2.QuotaFailure, error_details_pb2.RetryInfo))
    ends = Counter(await asyncio.gather(*(ask() for _ in range(MANY))))
    assert ends == {(grpc.StatusCode.RESOURCE_EXHAUSTED, details): MANY}


@pytest.mark.parametrize("method", methods(), ids=lambda method: method.name)
async def test_each_method_names_its_request_size_limit(channel: grpc.aio.Channel, method: object) -> None:
    """Of many fields, which take far longer to parse than many bytes, or for most methods of any large request."""
    name = method.name  # type: ignore[attr-defined]
    padding = b"\x7a\x00" * (MAX_SMALL_BYTES // 2 + 1)  # unknown fields
    call = channel.stream_stream(f"/{method.containing_service.full_name}/{name}")(iter([padding]))  # type: ignore[attr-defined]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    limit = "more than 4,096 fields" if name in TEXTS else f"{name} is {MAX_SMALL_BYTES:,}"
    assert f"request: has {len(padding):,} bytes" in caught.value.details() and limit in caught.value.details()


async def test_many_ids_are_converted_in_a_thread(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def decode(*arguments: Any) -> object:
        threads.append(threading.current_thread() is threading.main_thread())
        return decode_generate(*arguments)

    decode_generate = codec.decode_generate
    monkeypatch.setattr(codec, "decode_generate", decode)
    service.engine.max_positions = MAX_REQUEST_BYTES
    for count in (10, 100_000):
        async for event in service.client.generate([5] * count):
            assert not isinstance(event, Started) or event.prompt_tokens == count
    assert threads == [True, False]


async def test_late_invalid_id_is_named(service: Served) -> None:
    service.engine.max_positions = MAX_REQUEST_BYTES
    many = [5] * 140_000
    many[139_000] = 4000
    with pytest.raises(InvalidArgument, match=r"token_ids.ids\[139000\]: 4000 is not in the vocabulary"):
        await anext(service.client.generate(many))
    with pytest.raises(InvalidArgument, match=r"token_ids.ids\[139000\]: 4000 is not in the vocabulary"):
        await service.client.detokenize(many)


async def test_answer_does_not_retain_its_request(service: Served) -> None:
    service.engine.is_endless = True
    text = "a text that may be large"
    answer = service.client.generate(text)
    assert isinstance(await anext(answer), Started)
    assert not [thing for thing in gc.get_objects() if type(thing) is Generate and thing.input == text]
    await answer.aclose()
