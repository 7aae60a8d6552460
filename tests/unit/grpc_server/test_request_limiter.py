"""The limits on requests before they are parsed, and the queue for large ones."""

import asyncio
import threading
import weakref
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from google.protobuf.message import DecodeError

from coordinator.auth.caller import CALLER, Caller
from coordinator.grpc_server.request_limiter import EOF, MAX_FIELDS, MAX_PIECE_BYTES, MAX_SMALL_BYTES, RequestLimiter
from coordinator.telemetry.observers import CURRENT, CallRecord
from longleaf.codec import has_more_fields
from longleaf.config import MAX_REQUEST_BYTES
from longleaf.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted
from longleaf.v1 import context_service_pb2 as ingest_pb

GENERATE = "/longleaf.v1.GenerationService/Generate"
INGEST = "/longleaf.v1.ContextService/IngestContext"
HOST = "ipv4:10.0.0.1"
GET = "/longleaf.v1.ContextService/GetContext"
LARGE = b"\x12\x80\x80\x08" + bytes(1 << 17)  # one field, `text`


class Parser:
    """A handler that records the data that it is given to parse."""

    def __init__(self) -> None:
        self.parsed: list[bytes] = []

    def request_deserializer(self, data: bytes) -> bytes:
        self.parsed.append(data)
        if data == b"\xff":
            raise DecodeError("no message")
        return data


def call(*requests: bytes) -> SimpleNamespace:
    """A call with these requests."""
    waiting = list(requests)

    async def read() -> object:
        return waiting.pop(0) if waiting else EOF

    return SimpleNamespace(read=read)


async def refused(method: str, data: bytes) -> str:
    """The reason for a refusal. The parser must not have been called, neither for a single request nor in a stream."""
    parser = Parser()
    with RequestLimiter().admit(method, parser, HOST) as incoming:
        with pytest.raises(InvalidArgument) as caught:
            await incoming.read_one(call(data))
        with pytest.raises(InvalidArgument):
            [_ async for _ in incoming.read_all(call(data))]
    assert parser.parsed == [] and caught.value.field == "request"
    return caught.value.description


async def test_each_method_has_its_limit() -> None:
    message = await refused(GET, bytes(MAX_SMALL_BYTES + 1))
    assert message == f"has {MAX_SMALL_BYTES + 1:,} bytes; the limit of GetContext is {MAX_SMALL_BYTES:,}"
    assert f"Generate is {MAX_REQUEST_BYTES:,}" in await refused(GENERATE, bytes(MAX_REQUEST_BYTES + 1))
    assert f"IngestContext is {MAX_PIECE_BYTES:,}" in await refused(INGEST, bytes(MAX_PIECE_BYTES + 1))


@pytest.mark.parametrize(
    "field",
    [
        b"\x0a\x00",
        b"\x78\x01",
        b"\x7a\x00",
        b"\x7d0000",
        b"\x7900000000",
        b"\x7b\x7c",
        b"\x1a\x00",
        b"\x1a\x02\x08\x05",
    ],
    ids=["strings", "unknown numbers", "unknown bytes", "32 bits", "64 bits", "groups", "messages", "ids"],
)
async def test_many_fields_are_refused(field: bytes) -> None:
    assert f"more than {MAX_FIELDS:,} fields" in await refused(GENERATE, field * (MAX_SMALL_BYTES // len(field) + 1))


@pytest.mark.parametrize("field", [b"\x32\x00", b"\x62\x00", b"\x62\x02\x08\x05"], ids=["stops", "biases", "keys"])
async def test_many_fields_of_a_nested_message_are_refused(field: bytes) -> None:
    size = 1 << 17
    inside = field * (size // len(field))
    assert "fields" in await refused(GENERATE, b"\x2a\x80\x80\x08" + inside)
    assert "fields" in await refused(GENERATE, b"\x2a\x80\x80\x08" + inside + b"\x12\xff"), (
        "though its end is malformed"
    )


@pytest.mark.parametrize("data", [LARGE, b"", b"\x0a\x00" * MAX_FIELDS, b"\x80" * (MAX_SMALL_BYTES + 1)])
async def test_requests_within_the_limits_are_parsed(data: bytes) -> None:
    parser = Parser()
    with RequestLimiter().admit(GENERATE, parser, HOST) as incoming:
        assert await incoming.read_one(call(data)) == data
        assert [request async for request in incoming.read_all(call(data, b"x"))] == [data, b"x"]


async def test_missing_or_invalid_message_is_refused() -> None:
    with RequestLimiter().admit(GENERATE, Parser(), HOST) as incoming:
        with pytest.raises(InvalidArgument, match="request: is missing"):
            await incoming.read_one(call())
        with pytest.raises(InvalidArgument, match="request: is not a valid message"):
            await incoming.read_one(call(b"\xff"))


class SlowParser(Parser):
    """A parser that blocks in its thread until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.may_parse, self.has_begun = threading.Event(), threading.Event()

    def request_deserializer(self, data: bytes) -> bytes:
        if len(data) > MAX_SMALL_BYTES:
            self.has_begun.set()
            assert self.may_parse.wait(30)
        return super().request_deserializer(data)


async def test_parsing_a_large_request_does_not_block_the_event_loop() -> None:
    parser, requests = SlowParser(), RequestLimiter()

    async def read(data: bytes, host: str = HOST) -> None:
        CURRENT.set(CallRecord(GENERATE, host, {}))
        with requests.admit(GENERATE, parser, HOST) as incoming:
            await incoming.read_one(call(data))

    large = [asyncio.create_task(read(LARGE + bytes(number))) for number in range(4)]
    await asyncio.to_thread(parser.has_begun.wait, 30)
    await read(b"small")
    assert parser.parsed == [b"small"]
    other = asyncio.create_task(read(LARGE + b"other", "ipv4:127.0.0.2:1"))
    await asyncio.sleep(0)
    large[1].cancel()
    await asyncio.wait([large[1]])
    parser.may_parse.set()
    await asyncio.gather(other, *large, return_exceptions=True)
    parsed = [data[len(LARGE) :] for data in parser.parsed[1:]]
    assert sorted(parsed) == [b"", b"\0\0", b"\0\0\0", b"other"], "a call that was cancelled is not parsed"
    assert parsed.index(b"other") < 3, "hosts take turns"
    await requests.close()


async def test_tenant_has_one_turn_for_all_its_hosts() -> None:
    parser, requests = SlowParser(), RequestLimiter()

    async def read(tenant: str, host: int) -> None:
        CALLER.set(Caller(tenant=tenant, is_alone=False))
        CURRENT.set(CallRecord(GENERATE, f"ipv4:10.0.0.{host}:1", {}))
        with requests.admit(GENERATE, parser, HOST) as incoming:
            await incoming.read_one(call(LARGE + tenant.encode()))

    many = [asyncio.create_task(read("many", number)) for number in range(8)]
    await asyncio.to_thread(parser.has_begun.wait, 30)
    other = asyncio.create_task(read("other", 99))
    await asyncio.sleep(0)
    parser.may_parse.set()
    await asyncio.gather(other, *many)
    assert [data[len(LARGE) :] for data in parser.parsed].index(b"other") < 3
    await requests.close()


async def test_waiting_large_requests_are_limited() -> None:
    requests = RequestLimiter(max_pending_bytes=len(LARGE), share=1)
    with requests.admit(GENERATE, Parser(), HOST) as first, requests.admit(GENERATE, Parser(), HOST) as second:
        await first.read_one(call(LARGE))
        with pytest.raises(
            ResourceExhausted, match=f"with {len(LARGE):,} more bytes, .* limit of {len(LARGE):,}"
        ) as caught:
            await second.read_one(call(LARGE))
        assert caught.value.retry_seconds
        assert await second.read_one(call(b"small")) == b"small"
        first.release()
        assert await second.read_one(call(LARGE)) == LARGE
    with requests.admit(GENERATE, Parser(), HOST) as third:
        assert await third.read_one(call(LARGE)) == LARGE, "the end of a call releases its memory"


async def test_large_requests_of_one_tenant_do_not_exclude_others() -> None:
    requests = RequestLimiter(max_pending_bytes=4 * len(LARGE))

    async def hold(tenant: str, stack: ExitStack) -> None:
        CALLER.set(Caller(tenant=tenant, is_alone=False))
        incoming = stack.enter_context(requests.admit(GENERATE, Parser(), HOST))
        await incoming.read_one(call(LARGE))

    for _ in range(2):
        with ExitStack() as stack:
            for _ in range(3):
                await asyncio.create_task(hold("many", stack))
            with pytest.raises(
                ResourceExhausted, match=f"your pending requests .* limit of {3 * len(LARGE):,}"
            ) as caught:
                await asyncio.create_task(hold("many", stack))
            assert caught.value.retry_seconds
            await asyncio.create_task(hold("other", stack))
    await requests.close()


async def test_open_calls_are_limited() -> None:
    requests = RequestLimiter(max_calls=1)
    with (
        requests.admit(GENERATE, Parser(), HOST),
        pytest.raises(ResourceExhausted, match="calls: 1 are open") as caught,
        requests.admit(GENERATE, Parser(), HOST),
    ):
        pass
    assert caught.value.retry_seconds
    with requests.admit(GENERATE, Parser(), HOST):
        pass


async def test_one_host_cannot_use_all_calls() -> None:
    requests, most = RequestLimiter(max_calls=4), 3
    with ExitStack() as stack:
        for _ in range(most):
            stack.enter_context(requests.admit(GENERATE, Parser(), HOST))
        with (
            pytest.raises(ResourceExhausted, match="calls: 3 from your host are open"),
            requests.admit(GENERATE, Parser(), HOST),
        ):
            pass
        stack.enter_context(requests.admit(GENERATE, Parser(), "ipv4:10.0.0.2"))
    with requests.admit(GENERATE, Parser(), HOST):
        pass


class Weighty:
    """A stand-in for the bytes of a request and for the message parsed from them."""

    def __len__(self) -> int:
        return 1


async def test_pieces_are_freed_while_the_stream_is_silent() -> None:
    made: list[weakref.ref[Weighty]] = []
    requested = asyncio.Event()

    def make() -> Weighty:
        weighty = Weighty()
        made.append(weakref.ref(weighty))
        return weighty

    async def read() -> object:
        if made:
            requested.set()
            await asyncio.Event().wait()
        return make()

    with RequestLimiter().admit(INGEST, SimpleNamespace(request_deserializer=lambda data: make()), HOST) as incoming:
        requests = incoming.read_all(SimpleNamespace(read=read))
        assert isinstance(await anext(requests), Weighty)
        silent = asyncio.ensure_future(anext(requests))
        await requested.wait()
        assert [ref() for ref in made] == [None, None]
        silent.cancel()


async def test_call_without_a_request_times_out() -> None:
    never = SimpleNamespace(read=asyncio.Event().wait)
    with (
        RequestLimiter(arrival_seconds=0.001).admit(GENERATE, Parser(), HOST) as incoming,
        pytest.raises(DeadlineExceeded, match="no request came within"),
    ):
        await incoming.read_one(never)


def test_files_of_an_ingest_are_counted_separately() -> None:
    def request(num_files: int, padding: bytes = b"") -> bytes:
        config = ingest_pb.IngestConfig(files=[ingest_pb.IngestFile(name="a", byte_start=1)] * num_files)
        config.files.add().MergeFromString(padding)
        return ingest_pb.IngestContextRequest(config=config).SerializeToString()

    kind, apart = ingest_pb.IngestContextRequest.DESCRIPTOR, {"IngestFile": 30}
    assert not has_more_fields(request(9), kind, 4, apart)
    assert has_more_fields(request(10), kind, 4, apart)
    assert has_more_fields(request(0, b"\x7a\x00" * 40), kind, 4, apart)
    assert has_more_fields(request(9), kind, 4)
