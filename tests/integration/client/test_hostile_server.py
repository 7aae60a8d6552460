"""A server that sends arbitrary answers: the client raises typed errors within its timeout and leaves nothing
behind."""

import asyncio
import io
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from longleaf.client import AsyncClient, Retries
from longleaf.codec.status import DETAILS_KEY
from longleaf.errors import DeadlineExceeded, LongleafError
from longleaf.v1 import context_service_pb2 as ingest_pb
from tests.support.fuzz.messages import edges_of, methods, paths, with_value

QUICK = Retries(limit=2, first_delay=0.001, longest_delay=0.002)
SECONDS = 20.0
NUM_MIXED = 40
"""Messages with several odd fields, beside those with one."""
Call = Callable[[AsyncClient, float], Awaitable[Any]]
Answer = Callable[[grpc.aio.ServicerContext], AsyncIterator[bytes]]


async def drained(stream: AsyncIterator[Any]) -> None:
    async for _ in stream:
        pass


CALLS: dict[str, Call] = {
    "Generate": lambda client, seconds: drained(client.generate("x", timeout=seconds)),
    "CancelGeneration": lambda client, seconds: client.cancel_generation("x", timeout=seconds),
    "IngestContext": lambda client, seconds: client.ingest("x", "some text", timeout=seconds),
    "CancelIngest": lambda client, seconds: client.cancel_ingest("x", "y", timeout=seconds),
    "GetContext": lambda client, seconds: client.get_context("x", timeout=seconds),
    "GetContextText": lambda client, seconds: client.get_context_text("x", 0, 5, timeout=seconds),
    "ListContexts": lambda client, seconds: client.list_contexts(timeout=seconds),
    "UpdateContext": lambda client, seconds: client.update_context("x", ttl=5, timeout=seconds),
    "ForkContext": lambda client, seconds: client.fork_context("x", "y", timeout=seconds),
    "RecomputeContext": lambda client, seconds: client.recompute_context("x", timeout=seconds),
    "RecomputeContexts": lambda client, seconds: client.recompute_contexts(timeout=seconds),
    "DeleteContext": lambda client, seconds: client.delete_context("x", timeout=seconds),
    "ExportContext": lambda client, seconds: client.export_context("x", io.BytesIO(), timeout=seconds),
    "ImportContext": lambda client, seconds: client.import_context(io.BytesIO(b"x"), timeout=seconds),
    "CountTokens": lambda client, seconds: client.count_tokens("x", timeout=seconds),
    "Tokenize": lambda client, seconds: client.tokenize("x", timeout=seconds),
    "Detokenize": lambda client, seconds: client.detokenize([1], timeout=seconds),
    "GetCluster": lambda client, seconds: client.cluster(timeout=seconds),
    "WatchCluster": lambda client, seconds: drained(client.watch_cluster(timeout=seconds)),
    "Drain": lambda client, seconds: client.drain(timeout=seconds),
    "ResetSlots": lambda client, seconds: client.reset_slots(timeout=seconds),
    "VerifyCluster": lambda client, seconds: client.verify(timeout=seconds),
}
UPLOADS = ("IngestContext", "ImportContext")
OTHERS = {"Health": lambda client, seconds: client.is_healthy(timeout=seconds)}
TYPES: dict[str, Descriptor] = {method.name: method.output_type for method in methods()}


class Hostile(grpc.GenericRpcHandler):
    """Answers every call with `answer`."""

    def __init__(self) -> None:
        self.answer: Answer
        self.is_streaming: set[str] = {method.full_name for method in methods() if method.server_streaming}
        self.is_sent_to: set[str] = {method.full_name for method in methods() if method.client_streaming}

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler:
        name = handler_call_details.method.strip("/").replace("/", ".")

        async def stream(_: object, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
            async for message in self.answer(context):
                yield message

        async def unary(_: object, context: grpc.aio.ServicerContext) -> bytes:
            async for message in self.answer(context):
                return message
            return b""

        if name in self.is_sent_to:
            return grpc.stream_stream_rpc_method_handler(stream)
        return (
            grpc.unary_stream_rpc_method_handler(stream)
            if name in self.is_streaming
            else grpc.unary_unary_rpc_method_handler(unary)
        )


class Served:
    def __init__(self, hostile: Hostile, client: AsyncClient) -> None:
        self._hostile, self._client = hostile, client

    async def outcome(self, call: Call, answer: Answer, seconds: float = 5.0) -> LongleafError | None:
        """The error that the client raises, which must be typed."""
        self._hostile.answer = answer
        try:
            async with asyncio.timeout(SECONDS):
                await call(self._client, seconds)
        except LongleafError as error:
            return error
        return None


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    hostile = Hostile()
    server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
    server.add_generic_rpc_handlers((hostile,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncClient(f"127.0.0.1:{port}", retries=QUICK, on_retry=lambda _: None) as client:
        yield Served(hostile, client)
    await server.stop(None)


def answering(*messages: bytes, ends: bool = True) -> Answer:
    async def answer(_: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        for message in messages:
            yield message
        if not ends:
            await asyncio.Event().wait()

    return answer


def failing(code: grpc.StatusCode, details_text: str, details: bytes | None, *messages: bytes) -> Answer:
    async def answer(context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        for message in messages:
            yield message
        await context.abort(code, details_text, () if details is None else ((DETAILS_KEY, details),))

    return answer


def test_every_method_is_tested() -> None:
    assert set(CALLS) == set(TYPES)


@pytest.mark.parametrize("name", [*CALLS, *OTHERS])
async def test_malformed_message_raises_a_typed_error(served: Served, name: str) -> None:
    for message in (b"\xff", b"\x0a\xff\xff\xff\xff\x0f", random.Random(5).randbytes(3000)):
        assert await served.outcome((CALLS | OTHERS)[name], answering(message)) is not None


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", CALLS)
async def test_odd_messages_raise_only_typed_errors(served: Served, name: str) -> None:
    for message in odd(TYPES[name], random.Random(name)):
        await served.outcome(CALLS[name], answering(message.SerializeToString()))


def odd(descriptor: Descriptor, rng: random.Random) -> list[Message]:
    """Empty, each field at each of its edges, and several at once."""
    from google.protobuf.message_factory import GetMessageClass

    empty = GetMessageClass(descriptor)()
    choices = [(path, value) for path in paths(descriptor) for value in edges_of(path[-1])]
    made = [empty, *(with_value(empty, path, value) for path, value in choices)]
    for _ in range(NUM_MIXED):
        mixed = empty
        for path, value in rng.sample(choices, min(6, len(choices))):
            mixed = with_value(mixed, path, value)
        made.append(mixed)
    return rng.sample(made, min(len(made), 300))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("ends", [False, True], ids=["silent", "ends"])
async def test_silent_server_ends_at_the_timeout(served: Served, name: str, ends: bool) -> None:
    error = await served.outcome(CALLS[name], answering(ends=ends), 0.2)
    if not ends:
        assert type(error) is DeadlineExceeded


async def test_endless_pages_end_at_the_timeout(served: Served) -> None:
    async def pages(_: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        yield ingest_pb.ListContextsResponse(next_page_token=str(next(numbers))).SerializeToString()

    numbers = itertools.count(1)
    assert type(await served.outcome(CALLS["ListContexts"], pages, 0.2)) is DeadlineExceeded
    numbers = itertools.repeat(1)
    error = await served.outcome(CALLS["ListContexts"], pages)
    assert "same page again" in str(error)


async def test_oversized_message_raises_a_typed_error(served: Served) -> None:
    huge = answering(b"\x0a" + b"\xff\xff\xff\x7f" + bytes((1 << 26) + 1))
    for name in ("GetCluster", "Generate", "ExportContext", *UPLOADS):
        error = await served.outcome(CALLS[name], huge)
        assert error is not None
        assert "67108864" in str(error)


def packed(*details: Message, code: int = 13, message: str = "odd") -> bytes:
    status = status_pb2.Status(code=code, message=message)
    for detail in details:
        one = Packed()
        one.Pack(detail)
        status.details.append(one)
    return status.SerializeToString()


def odd_details() -> list[bytes | None]:
    broken = Packed(type_url="x/google.rpc.ErrorInfo", value=b"\xff")
    info, retry = error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo
    retries = [retry() for _ in range(5)]
    for one, (seconds, nanos) in zip(
        retries, ((-5, 0), (2**62, 0), (0, -1), (-(2**63), 2**31 - 1), (10**11, 0)), strict=True
    ):
        one.retry_delay.seconds, one.retry_delay.nanos = seconds, nanos
    return [
        None,
        b"",
        b"\xff\xff",
        random.Random(3).randbytes(200),
        *(packed(code=code) for code in (0, -1, 17, 2**31 - 1)),
        *(packed(detail, code=code) for detail in retries for code in (8, 14)),
        packed(info(reason="WORKER_LOST"), code=14),
        packed(info(reason="WORKER_LOST", metadata={"rank": "many", "reason": "x"}), code=14),
        packed(info(reason="WORKER_LOST", metadata={"rank": "9" * 5000}), code=14),
        packed(info(reason="\0", domain="\n"), code=9),
        packed(error_details_pb2.BadRequest(), code=3),
        packed(error_details_pb2.ResourceInfo(), code=5),
        packed(error_details_pb2.QuotaFailure(), code=8),
        status_pb2.Status(code=14, details=[broken]).SerializeToString(),
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", ["GetCluster", "CancelGeneration", "Generate", "IngestContext", "ExportContext", "ImportContext"]
)
async def test_every_status_raises_a_typed_error(served: Served, name: str) -> None:
    codes = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
    for code, details in [*((code, None) for code in codes), *((codes[0], details) for details in odd_details())]:
        for reported in ("", "x" * 3000, "ü\0\n"):
            assert await served.outcome(CALLS[name], failing(code, reported, details)) is not None
    for code in codes:
        error = await served.outcome(CALLS[name], failing(code, "later", None, b""))
        assert error is not None or name in ("GetCluster", "CancelGeneration")


@pytest.mark.parametrize("code", [code_pb2.OK, code_pb2.UNKNOWN])
def test_ok_code_in_error_details_does_not_hide_the_error(code: int) -> None:
    """Details with the code OK in an error do not change it: the call still fails."""
    from longleaf.codec.status import decode_error

    trailers = grpc.aio.Metadata((DETAILS_KEY, packed(code=code)))
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailers)
    assert isinstance(decode_error(error, "here"), LongleafError)
