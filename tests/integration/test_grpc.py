"""The service over real sockets, on an engine that says what it is told."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from coordinator.server import SERVICES, Server
from coordinator.tokenizer import Tokenizer
from longleaf.client import AsyncClient, Client
from longleaf.errors import (
    AlreadyExists,
    InvalidArgument,
    LongleafError,
    NotFound,
    ResourceExhausted,
    StartError,
    Unavailable,
    WorkerLost,
)
from longleaf.messages import Delta, Event, Finished, IngestProgress, Started, Usage
from longleaf.status import DETAILS_KEY
from longleaf.v1 import context_service_pb2 as ingest_pb
from longleaf.v1 import generation_service_pb2 as service_pb
from longleaf.v1.context_service_pb2_grpc import ContextServiceStub
from longleaf.v1.generation_service_pb2_grpc import GenerationServiceStub
from tests.service import FakeEngine, byte_tokenizer, serving, write_model

TEXT = "Grüße, 世界! 🦙 e\u0301"
BYTES = byte_tokenizer()


def ids(text: str) -> tuple[int, ...]:
    return tuple(BYTES.encode(text).ids)


async def collect(events: AsyncIterator[Event]) -> tuple[str, Finished]:
    text, last = "", None
    async for event in events:
        text += event.text if isinstance(event, Delta) else ""
        last = event
    assert isinstance(last, Finished)
    return text, last


class Service:
    def __init__(self, engine: FakeEngine, server: Server, address: str, client: AsyncClient) -> None:
        self.engine, self.server, self.address, self.client = engine, server, address, client


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    engine = FakeEngine()
    async with serving(engine, tmp_path / "model") as (server, address), AsyncClient(address) as client:
        yield Service(engine, server, address, client)


@pytest.fixture
async def channel(service: Service) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(service.address) as channel:
        yield channel


# Generations


async def test_an_answer_streams_whole_characters_and_all_its_tokens(service: Service) -> None:
    service.engine.answer = tuple((token_id,) for token_id in ids(TEXT))
    events = [event async for event in service.client.generate("hello", max_tokens=99)]
    assert isinstance(events[0], Started)
    deltas = [event for event in events if isinstance(event, Delta)]
    assert "".join(delta.text for delta in deltas) == TEXT
    assert "\ufffd" not in TEXT
    assert tuple(i for delta in deltas for i in delta.token_ids) == ids(TEXT)
    starts = [sum(len(other.token_ids) for other in deltas[:n]) for n in range(len(deltas))]
    assert [delta.index for delta in deltas] == starts
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.usage.completion_tokens) == ("length", len(ids(TEXT)))
    assert finished.timings.first_token_seconds == 1.5


async def test_a_prompt_goes_through_the_chat_template(service: Service) -> None:
    await collect(service.client.generate("<|end|>"))
    prompt = service.engine.prompts[0]
    begin, user, model = (BYTES.token_to_id(name) for name in ("<|begin|>", "<|user|>", "<|model|>"))
    plain = tuple(BYTES.token_to_id(c) for c in "<|end|>")
    assert prompt.token_ids == (begin, user, *plain, model)
    assert prompt.end_tokens == {BYTES.token_to_id("<|end|>")}


async def test_sampling_arrives_and_defaults_are_filled_in(service: Service) -> None:
    await collect(service.client.generate([1, 2], temperature=0.5, top_k=7, seed=2**64 - 1, stop=["a", "b"]))
    await collect(service.client.generate([1, 2]))
    given, default = (prompt.sampling for prompt in service.engine.prompts)
    assert (given.temperature, given.top_k, given.seed, given.stop) == (0.5, 7, 2**64 - 1, ("a", "b"))
    assert (default.temperature, default.top_p, default.max_tokens, default.stop) == (0.0, 1.0, 128, ())
    assert service.engine.prompts[0].token_ids == (1, 2)


async def test_a_stop_string_across_tokens_ends_the_engines_stream(service: Service) -> None:
    service.engine.answer = tuple((token_id,) for token_id in ids("one END two"))
    service.engine.is_endless = True
    text, finished = await collect(service.client.generate("x", stop=["END"]))
    assert text == "one "
    assert (finished.reason, finished.matched_stop) == ("stop", "END")
    assert finished.usage == Usage(finished.usage.prompt_tokens, 0, len(ids("one END")))
    await service.engine.streams[0].closed.wait()


async def test_the_end_token_counts_but_shows_nothing(service: Service) -> None:
    end = BYTES.token_to_id("<|end|>")
    service.engine.answer, service.engine.reason = ((*ids("ok"), end),), "end_token"
    events = [event async for event in service.client.generate("x")]
    deltas = [event for event in events if isinstance(event, Delta)]
    assert "".join(delta.text for delta in deltas) == "ok"
    assert sum(len(delta.token_ids) for delta in deltas) == 3


async def test_leaving_an_answer_closes_the_engines_stream(service: Service) -> None:
    service.engine.answer, service.engine.is_endless = (ids("a"),), True
    async with aclosing(service.client.generate("x")) as events:
        async for event in events:
            if isinstance(event, Delta):
                break
    await service.engine.streams[0].closed.wait()


async def test_a_client_that_vanishes_while_nothing_comes_closes_the_stream(service: Service) -> None:
    service.engine.is_endless = True
    reading = asyncio.create_task(collect(service.client.generate("x")))
    await service.engine.opened.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await service.engine.streams[0].closed.wait()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"temperature": -1.0}, "sampling.temperature"),
        ({"temperature": float("nan")}, "sampling.temperature"),
        ({"top_p": 0.0}, "sampling.top_p"),
        ({"top_k": -1}, "sampling.top_k"),
        ({"max_tokens": 0}, "sampling.max_token_count"),
        ({"max_tokens": 2**40}, "sampling.max_token_count"),
        ({"seed": -1}, "sampling.seed"),
        ({"stop": [""]}, "sampling.stop"),
        ({"stop": ["x"] * 17}, "sampling.stop"),
    ],
)
async def test_wrong_sampling_names_its_field(service: Service, options: Any, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await collect(service.client.generate("x", **options))
    assert caught.value.field == field
    assert not service.engine.prompts


@pytest.mark.parametrize(
    ("prompt", "context", "field"),
    [
        ("", None, "text"),
        ("", "moby", "text"),
        ([], None, "token_ids"),
        ([1, 10**6], None, "token_ids.ids[1]"),
        ([-1], None, "token_ids.ids[0]"),
        ([2**40], None, "token_ids"),
        ("x", "Not A Name", "context"),
        ("\ud800", None, "text"),
        ("x", "\ud800", "context"),
    ],
)
async def test_wrong_input_names_its_field(service: Service, prompt: Any, context: str | None, field: str) -> None:
    service.engine.contexts["moby"] = [1]
    with pytest.raises(InvalidArgument) as caught:
        await collect(service.client.generate(prompt, context=context))
    assert caught.value.field == field


async def test_a_request_without_input_is_refused(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await GenerationServiceStub(channel).Generate(service_pb.GenerateRequest()).read()
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


# Errors

ERRORS = [
    (InvalidArgument("text", "too long"), grpc.StatusCode.INVALID_ARGUMENT, [error_details_pb2.BadRequest]),
    (NotFound("contexts/x"), grpc.StatusCode.NOT_FOUND, [error_details_pb2.ResourceInfo]),
    (AlreadyExists("contexts/x"), grpc.StatusCode.ALREADY_EXISTS, [error_details_pb2.ResourceInfo]),
    (
        ResourceExhausted("pool", "full", 2.5),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        [error_details_pb2.QuotaFailure, error_details_pb2.RetryInfo],
    ),
    (ResourceExhausted("pool", "full"), grpc.StatusCode.RESOURCE_EXHAUSTED, [error_details_pb2.QuotaFailure]),
    (WorkerLost(3, "gone ✝"), grpc.StatusCode.UNAVAILABLE, [error_details_pb2.ErrorInfo]),
    (Unavailable("starting"), grpc.StatusCode.UNAVAILABLE, [error_details_pb2.ErrorInfo]),
]


@pytest.mark.parametrize(("error", "code", "details"), ERRORS, ids=lambda value: type(value).__name__)
async def test_every_error_has_its_status_and_details(
    service: Service, channel: grpc.aio.Channel, error: LongleafError, code: grpc.StatusCode, details: list[Any]
) -> None:
    service.engine.error = error
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await GenerationServiceStub(channel).Generate(service_pb.GenerateRequest(text="x")).read()
    assert (caught.value.code(), caught.value.details()) == (code, str(error))
    trailers = dict(caught.value.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailers[DETAILS_KEY])
    assert [packed.Is(kind.DESCRIPTOR) for packed, kind in zip(status.details, details, strict=True)]


@pytest.mark.parametrize("error", [error for error, _, _ in ERRORS], ids=repr)
async def test_the_client_raises_the_same_error_again(service: Service, error: LongleafError) -> None:
    service.engine.late_error = error
    with pytest.raises(type(error)) as caught:
        await collect(service.client.generate("x"))
    assert type(caught.value) is type(error)
    assert vars(caught.value) == vars(error)
    assert str(caught.value) == str(error)


async def test_an_unforeseen_error_is_internal_and_tells_no_secrets(
    service: Service, channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    service.engine.error = RuntimeError("a secret")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await GenerationServiceStub(channel).Generate(service_pb.GenerateRequest(text="x")).read()
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in (caught.value.details() or "")
    assert "a secret" in caplog.text


async def test_text_that_is_not_utf8_in_a_string_is_an_invalid_argument(channel: grpc.aio.Channel) -> None:
    call = channel.unary_stream("/longleaf.v1.GenerationService/Generate")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"\x12\x02\xff\xfe").read()
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_server_that_is_not_there_is_unavailable_and_named() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
            await client.cluster()


async def test_a_server_that_stops_in_the_middle_is_unavailable(service: Service) -> None:
    service.engine.is_endless = True
    reading = asyncio.create_task(collect(service.client.generate("x")))
    await service.engine.opened.wait()
    await service.server.stop()
    with pytest.raises(Unavailable):
        await reading
    assert service.engine.streams[0].closed.is_set()


async def test_a_taken_port_is_named(service: Service, tmp_path: Path) -> None:
    port = int(service.address.rpartition(":")[2])
    engine = FakeEngine()
    other = Server(engine, Tokenizer.load(write_model(tmp_path / "other")), engine.describe)
    with pytest.raises(StartError, match=f"{port}: Address already in use"):
        await other.start("127.0.0.1", port)
    with pytest.raises(StartError, match=r"192\.0\.2\.1:0: Cannot assign"):
        await other.start("192.0.2.1", 0)
    with pytest.raises(StartError, match="not a host:0: Name or service not known"):
        await other.start("not a host", 0)
    await other.stop()


# Contexts


async def test_a_document_cut_inside_characters_arrives_whole(service: Service) -> None:
    seen: list[IngestProgress] = []

    def bytewise() -> Iterator[bytes]:
        yield from (bytes([byte]) for byte in TEXT.encode())

    context = await service.client.ingest("moby", bytewise(), on_progress=seen.append)
    begin, user = BYTES.token_to_id("<|begin|>"), BYTES.token_to_id("<|user|>")
    assert service.engine.contexts["moby"] == [begin, user, *ids(TEXT)]
    assert (context.id, context.tokens, context.created) == ("moby", len(ids(TEXT)) + 2, 1.5)
    phases = list(dict.fromkeys(progress.phase for progress in seen))
    assert phases == ["receiving", "tokenizing", "prefilling", "ready"]
    assert seen[-1].processed == seen[-1].total == context.tokens
    assert seen[-1].received_bytes == len(TEXT.encode())


async def test_an_append_carries_no_opening(service: Service, tmp_path: Path) -> None:
    await service.client.ingest("moby", "one")
    before = list(service.engine.contexts["moby"])
    path = tmp_path / "two.txt"
    path.write_text("two")
    await service.client.ingest("contexts/moby", path, append=True)
    assert service.engine.contexts["moby"] == [*before, *ids("two")]


async def test_token_ids_are_ingested_as_they_are(service: Service) -> None:
    await service.client.ingest("moby", (3, 1, 2))
    assert service.engine.contexts["moby"] == [3, 1, 2]


@pytest.mark.parametrize(
    ("document", "field", "told"),
    [
        ("", "text", "empty"),
        (b"abc\xff", "text", "byte 3"),
        (b"abc\xe4\xb8", "text", "byte 3"),
        (iter([b"ab\xe4", b"\xb8", b"x"]), "text", "byte 2"),
        ((1, 10**6), "token_ids.ids[1]", "vocabulary"),
        (tuple([1] * 5000), "token_ids", "4096"),
        (b"a" * 200_000, "config.total_size_bytes", "4096"),
        (iter([b"a" * 100_000] * 2), "text", "4096"),
        (Path("/nowhere/to/be/found"), "file", "/nowhere"),
    ],
)
async def test_wrong_documents_name_the_field(service: Service, document: Any, field: str, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told) as caught:
        await service.client.ingest("moby", document)
    assert caught.value.field == field
    assert not service.engine.contexts


async def test_a_source_that_breaks_leaves_nothing_behind_and_says_why(service: Service) -> None:
    def broken() -> Iterator[bytes]:
        yield b"some text"
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        await service.client.ingest("moby", broken())
    assert not service.engine.contexts


async def test_a_long_upload_that_is_refused_in_its_middle_says_why(service: Service) -> None:
    with pytest.raises(InvalidArgument, match="byte 3"):
        await service.client.ingest("moby", iter([b"abc\xff", *[b"a" * 300_000] * 8]))


async def test_names_are_checked_before_the_text_is_sent(service: Service) -> None:
    service.engine.contexts["moby"] = [1]
    with pytest.raises(AlreadyExists, match="contexts/moby"):
        await service.client.ingest("moby", "x")
    with pytest.raises(NotFound, match="contexts/none"):
        await service.client.ingest("none", "x", append=True)
    with pytest.raises(InvalidArgument, match=r"config\.name"):
        await service.client.ingest("../etc", "x")


@pytest.mark.parametrize(
    ("requests", "field"),
    [
        ([ingest_pb.IngestContextRequest(text=b"x")], "config"),
        ([], "config"),
        ([{"name": "contexts/a"}, {"name": "contexts/a"}], "config"),
        ([{"name": "contexts/a"}, ingest_pb.IngestContextRequest()], "payload"),
        ([{"name": "contexts/a", "total_size_bytes": -1}], "config.total_size_bytes"),
        ([{"name": "contexts/a"}, ingest_pb.IngestContextRequest(text=b"x"), {"token_ids": [1]}], "token_ids"),
    ],
)
async def test_wrong_sequences_of_requests_are_refused(
    channel: grpc.aio.Channel, requests: list[Any], field: str
) -> None:
    async def upward() -> AsyncIterator[ingest_pb.IngestContextRequest]:
        for request in requests:
            match request:
                case {"token_ids": token_ids}:
                    yield ingest_pb.IngestContextRequest(token_ids={"ids": token_ids})
                case dict():
                    yield ingest_pb.IngestContextRequest(config=request)
                case _:
                    yield request

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in ContextServiceStub(channel).IngestContext(upward()):
            pass
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith(field)


async def test_a_cancelled_ingest_closes_the_engines_stream(service: Service) -> None:
    service.engine.is_endless = True
    ingest = asyncio.create_task(service.client.ingest("moby", "some text"))
    await service.engine.opened.wait()
    ingest.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ingest
    await service.engine.streams[0].closed.wait()
    assert not service.engine.contexts


async def test_a_lost_worker_breaks_an_ingest_with_its_rank(service: Service) -> None:
    service.engine.late_error = WorkerLost(2, "killed")
    with pytest.raises(WorkerLost, match="rank 2 was lost: killed"):
        await service.client.ingest("moby", "some text")


async def test_contexts_are_read_listed_by_page_and_deleted(service: Service, channel: grpc.aio.Channel) -> None:
    service.engine.contexts = {f"c{number:04}": [1] * number for number in range(1, 251)}
    assert (await service.client.get_context("c0007")).tokens == 7
    assert len(await service.client.list_contexts()) == 250
    stub = ContextServiceStub(channel)
    page = await stub.ListContexts(ingest_pb.ListContextsRequest(page_size=249))
    assert len(page.contexts) == 249
    rest = await stub.ListContexts(ingest_pb.ListContextsRequest(page_token=page.next_page_token))
    assert ([context.name for context in rest.contexts], rest.next_page_token) == (["contexts/c0250"], "")
    await service.client.delete_context("c0007")
    with pytest.raises(NotFound, match="contexts/c0007"):
        await service.client.get_context("c0007")
    with pytest.raises(NotFound):
        await service.client.delete_context("c0007")


@pytest.mark.parametrize(("request_", "field"), [({"page_size": -1}, "page_size"), ({"page_token": "ä"}, "page_token")])
async def test_wrong_pages_are_refused(channel: grpc.aio.Channel, request_: Any, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=field) as caught:
        await ContextServiceStub(channel).ListContexts(ingest_pb.ListContextsRequest(**request_))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


# The client without an event loop


async def test_the_sync_client_streams_stops_and_closes(service: Service) -> None:
    def use() -> tuple[str, str]:
        with Client(service.address) as client:
            client.ingest("moby", "some text")
            left = client.ask("moby", "who?")
            first = next(event for event in left if isinstance(event, Delta))
            left.close()
            forgotten = client.ask("moby", "who?")
            next(forgotten)
            assert client.get_context("moby").id == client.list_contexts()[0].id == "moby"
            assert client.is_healthy()
            with pytest.raises(NotFound):
                client.delete_context("none")
        forgotten.close()  # after its client: nothing to end any more
        client.close()
        return first.text, client.server

    service.engine.answer = tuple((token_id,) for token_id in ids("two words"))
    assert await asyncio.to_thread(use) == ("t", service.address)


# The rest


async def test_tokens_are_counted_and_messages_may_be_large(service: Service) -> None:
    assert await service.client.count_tokens(TEXT) == len(ids(TEXT))
    many = [200] * (3 << 20)  # two bytes each: over the library's own limit of 4 MiB
    _, finished = await collect(service.client.generate(many))
    assert finished.usage.prompt_tokens == len(many)
    with pytest.raises(ResourceExhausted):
        await service.client.count_tokens("a" * (65 << 20))


async def test_the_cluster_is_described(service: Service) -> None:
    cluster = await service.client.cluster()
    assert cluster == service.engine.describe()
    assert cluster.workers[0].pid == 4711


async def test_health_follows_the_service(service: Service) -> None:
    assert await service.client.is_healthy()
    assert all([await service.client.is_healthy(name) for name in SERVICES])
    await service.server.set_serving(False)
    assert not await service.client.is_healthy("longleaf.v1.GenerationService")
    with pytest.raises(LongleafError):
        await service.client.is_healthy("no.such.Service")


async def test_reflection_lists_the_services(channel: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)

    async def upward() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    async for answer in stub.ServerReflectionInfo(upward()):
        names = {found.name for found in answer.list_services_response.service}
    assert names >= {*SERVICES, "grpc.health.v1.Health"}
