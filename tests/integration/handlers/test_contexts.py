"""Contexts over real sockets, with a scripted engine."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.engine.views import view_context
from coordinator.kv_cache.contexts import NamedContext
from longleaf import codec
from longleaf.client import AsyncClient
from longleaf.errors import (
    AlreadyExists,
    InvalidArgument,
    NotFound,
    RankLost,
)
from longleaf.types import ContextSettings, IngestProgress
from longleaf.v1 import context_service_pb2 as ingest_pb
from longleaf.v1.context_service_pb2_grpc import ContextServiceStub
from tests.support.fuzz.target import fuzzed
from tests.support.service import BYTES, TEXT, Served, collect, ids


async def test_document_split_inside_characters_arrives_whole(service: Served) -> None:
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


async def test_append_has_no_document_prefix(service: Served, tmp_path: Path) -> None:
    await service.client.ingest("moby", "one")
    before = list(service.engine.contexts["moby"])
    path = tmp_path / "two.txt"
    path.write_text("two")
    await service.client.ingest("contexts/moby", path, append=True)
    assert service.engine.contexts["moby"] == [*before, *ids("two")]


async def test_token_ids_are_ingested_unchanged(service: Served) -> None:
    await service.client.ingest("moby", (3, 1, 2))
    assert service.engine.contexts["moby"] == [3, 1, 2]


@pytest.mark.parametrize(
    ("document", "field", "message"),
    [
        ("", "text", "empty"),
        (b"abc\xff", "text", "byte 3"),
        (b"abc\xe4\xb8", "text", "byte 3"),
        (iter([b"ab\xe4", b"\xb8", b"x"]), "text", "byte 2"),
        ((1, 10**6), "token_ids.ids[1]", "vocabulary"),
        (tuple([1] * 5000), "token_ids", "4,096"),
        (b"a" * 200_000, "config.total_size_bytes", "4,096"),
        (iter([b"a" * 100_000] * 2), "text", "4,096"),
        (Path("/nowhere/to/be/found"), "file", "/nowhere"),
    ],
)
async def test_invalid_documents_name_the_field(service: Served, document: Any, field: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        await service.client.ingest("moby", document)
    assert caught.value.field == field
    assert not service.engine.contexts


async def test_failing_source_leaves_no_context_and_raises_its_error(service: Served) -> None:
    def broken() -> Iterator[bytes]:
        yield b"some text"
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        await service.client.ingest("moby", broken())
    assert not service.engine.contexts


async def test_long_upload_refused_midway_gets_the_reason(service: Served) -> None:
    with pytest.raises(InvalidArgument, match="byte 3"):
        await service.client.ingest("moby", iter([b"abc\xff", *[b"a" * 300_000] * 8]))


async def test_names_are_checked_before_the_text_is_sent(service: Served) -> None:
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
async def test_invalid_request_sequences_are_refused(
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


async def test_cancelled_ingest_closes_the_engine_stream(service: Served) -> None:
    service.engine.is_endless = True
    ingest = asyncio.create_task(service.client.ingest("moby", "some text"))
    await service.engine.opened.wait()
    ingest.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ingest
    await service.engine.streams[0].closed.wait()
    assert not service.engine.contexts


async def test_lost_worker_fails_an_ingest_with_its_rank(service: Served) -> None:
    service.engine.late_error = RankLost(2, "killed")
    with pytest.raises(RankLost, match="rank 2 was lost: killed"):
        await service.client.ingest("moby", "some text")


async def test_contexts_are_read_listed_by_page_and_deleted(service: Served, channel: grpc.aio.Channel) -> None:
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
async def test_invalid_pages_are_refused(channel: grpc.aio.Channel, request_: Any, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=field) as caught:
        await ContextServiceStub(channel).ListContexts(ingest_pb.ListContextsRequest(**request_))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def update(*paths: str, name: str = "contexts/moby", **fields: Any) -> ingest_pb.UpdateContextRequest:
    return ingest_pb.UpdateContextRequest(context={"name": name, **fields}, update_mask={"paths": paths})


async def test_context_display_name_pin_and_expiry_are_updated(service: Served, channel: grpc.aio.Channel) -> None:
    service.engine.contexts["moby"] = [1]
    stub = ContextServiceStub(channel)
    changed = await stub.UpdateContext(update(display_name="The whale", pinned=True, ttl={"seconds": 60}))
    assert service.engine.settings["moby"] == ContextSettings(display_name="The whale", is_pinned=True, ttl=60.0)
    assert (changed.display_name, changed.pinned) == ("The whale", True)
    changed = await stub.UpdateContext(update("pinned", "expire_time", display_name="?", expire_time={"seconds": 99}))
    assert service.engine.settings["moby"] == ContextSettings(is_pinned=False, expires=99.0)
    assert codec.decode_context(changed).expires == 99.0


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (update("token_count"), "update_mask"),
        (update("name"), "update_mask"),
        (update("x" * 60_000), "update_mask"),
        (update(ttl={"seconds": -1}), "context.ttl"),
        (update("ttl", ttl={}), "context.ttl"),
        (update(ttl={"nanos": 10**9}), "context.ttl"),
        (update(ttl={"seconds": 10**18}), "context.ttl"),
        (update(ttl={"seconds": 1}, expire_time={"seconds": 1}), "context.ttl"),
        (update("*", ttl={"seconds": 1}, expire_time={"seconds": 1}), "context.ttl"),
        (update("ttl", "expire_time"), "context.ttl"),
        (update(expire_time={"seconds": 1 << 60}), "context.expire_time"),
        (update(expire_time={"nanos": -1}), "context.expire_time"),
        (update(display_name="x" * 257), "context.display_name"),
        (update(name="moby"), "context.name"),
        (ingest_pb.UpdateContextRequest(), "context.name"),
    ],
    ids=str,
)
async def test_invalid_changes_are_refused(
    channel: grpc.aio.Channel, request_: ingest_pb.UpdateContextRequest, field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ContextServiceStub(channel).UpdateContext(request_)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith(field + ": ")


async def test_missing_context_cannot_be_changed(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="contexts/moby") as caught:
        await ContextServiceStub(channel).UpdateContext(update(pinned=True))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def ingest_with(channel: grpc.aio.Channel, text: bytes | None, **config: Any) -> ingest_pb.IngestContextResponse:
    async def upward() -> AsyncIterator[ingest_pb.IngestContextRequest]:
        yield ingest_pb.IngestContextRequest(config={"name": "contexts/moby", **config})
        if text is not None:
            yield ingest_pb.IngestContextRequest(text=text)

    return [answer async for answer in ContextServiceStub(channel).IngestContext(upward())][-1]


async def test_ingest_may_set_display_name_pin_and_expiry(service: Served, channel: grpc.aio.Channel) -> None:
    last = await ingest_with(channel, b"text", display_name="The whale", pinned=True, ttl={"seconds": 60})
    assert service.engine.settings["moby"] == ContextSettings(display_name="The whale", is_pinned=True, ttl=60.0)
    assert last.context.display_name == "The whale"


async def test_priority_client_and_deadline_of_an_ingest_reach_the_engine(
    service: Served, channel: grpc.aio.Channel
) -> None:
    before = time.monotonic()
    await service.client.ingest("one", "text", priority=-7, client="me", timeout=500)
    await service.client.ingest("two", "text", upload_id="mine", timeout=500)
    await ingest_with(channel, b"text")
    given, resumable, default = service.engine.claims
    assert (given.priority, given.client) == (-7, "me")
    assert given.deadline is not None
    assert before + 400 < given.deadline < time.monotonic() + 505  # gRPC rounds it up for sending
    assert resumable.deadline is None
    assert (default.priority, default.client, default.deadline) == (0, "ipv4:127.0.0.1", None)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"priority": 101}, "config.priority"),
        ({"priority": -(2**31)}, "config.priority"),
        ({"client_id": "x" * 257}, "config.client_id"),
        ({"append": True, "pinned": True}, "config.pinned"),
        ({"append": True, "ttl": {"seconds": 1}}, "config.ttl"),
        ({"ttl": {"seconds": 1}, "expire_time": {"seconds": 1}}, "config.ttl"),
        ({"ttl": {"nanos": -1}}, "config.ttl"),
        ({"ttl": {"seconds": 253402300700}}, "config.ttl"),
        ({"expire_time": {"seconds": 1}}, "config.expire_time"),
        ({"display_name": "x" * 257}, "config.display_name"),
    ],
)
async def test_invalid_settings_are_refused_before_the_text_is_sent(
    channel: grpc.aio.Channel, config: dict[str, Any], field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ingest_with(channel, None, **config)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith(field + ": ")


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the contexts whose runs the engine walks."""
    found: list[str] = []

    def look(context: NamedContext, *rest: object) -> object:
        found.append(context.id)
        return view_context(context, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("coordinator.engine.engine.view_context", look)
    return found


async def test_list_reads_only_the_contexts_of_its_page(tmp_path: Path, looked_at: list[str]) -> None:
    async with fuzzed(tmp_path) as target, AsyncClient(target.address) as client:
        await client.ingest("c00", range(10))
        for number in range(1, 30):
            await client.fork_context("c00", f"c{number:02}")
        async with grpc.aio.insecure_channel(target.address) as channel:
            page, names = ingest_pb.ListContextsResponse(), list[str]()
            while not names or page.next_page_token:
                looked_at.clear()
                request = ingest_pb.ListContextsRequest(page_size=7, page_token=page.next_page_token)
                page = await ContextServiceStub(channel).ListContexts(request)
                names += [context.name for context in page.contexts]
                assert len(looked_at) <= 7 + 1, "the first entry of the next page shows that it exists"
        assert names == [f"contexts/c{number:02}" for number in range(30)]


async def test_question_does_not_walk_the_blocks_of_the_ranks(tmp_path: Path, looked_at: list[str]) -> None:
    async with fuzzed(tmp_path) as target, AsyncClient(target.address) as client:
        await client.ingest("book", range(10))
        looked_at.clear()
        await collect(client.ask("book", "x", max_tokens=2))
        assert looked_at == []
        await client.ingest("book", range(10), append=True)
        assert looked_at == ["book"], "once, for the response"
