"""Contexts move from one service to another over real sockets, whose connections break."""

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from msgspec.structs import replace

from coordinator.handlers.transfer.imports import ImportSessions
from longleaf import codec
from longleaf.client import AsyncClient, Client, Retries
from longleaf.codec.status import decode_error
from longleaf.errors import (
    AlreadyExists,
    CheckpointChanged,
    FailedPrecondition,
    InvalidArgument,
    LongleafError,
    NotFound,
    StorageUnavailable,
    Unavailable,
)
from longleaf.fingerprint import Fingerprint
from longleaf.types import ArchiveChunk, ExportContext, ExportedArchive, ExportProgress, ImportHeader, ImportProgress
from longleaf.v1 import context_service_pb2 as context_pb
from longleaf.v1.context_service_pb2_grpc import ContextServiceStub
from tests.support.archives import packable
from tests.support.fakes.transfer_engine import FakeTransferEngine
from tests.support.network.proxy import breaking
from tests.support.service import FakeEngine, serving
from tests.support.transfer_engines import empty_transfer_engine, transfer_engine_of

pytestmark = pytest.mark.timeout(60)

MOBY = packable(piece_bytes=700_000, vocabulary=256)
WHOLE = MOBY.packed()
QUICK = Retries(first_delay=0.0)


@pytest.fixture
async def old(tmp_path: Path) -> AsyncIterator[tuple[FakeTransferEngine, str]]:
    """A service with the context, and its address."""
    transfers = transfer_engine_of(MOBY)
    async with serving(FakeEngine(), tmp_path / "old", transfers=transfers) as (_, address):
        yield transfers, address


@pytest.fixture
async def new(tmp_path: Path) -> AsyncIterator[tuple[FakeTransferEngine, str]]:
    """A service without contexts, and its address."""
    transfers = empty_transfer_engine()
    async with serving(FakeEngine(), tmp_path / "new", transfers=transfers) as (_, address):
        yield transfers, address


def keys_of(transfers: FakeTransferEngine, name: str = "moby") -> list[bytes]:
    """The stored objects of a context, in order."""
    stored = transfers.contexts[name]
    manifests = [stored.manifests[segment.id] for segment in stored.segments if segment.id in stored.manifests]
    return [transfers.objects[name] for manifest in manifests for name in manifest.objects]


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


async def test_context_is_transferred_between_services(
    old: tuple[FakeTransferEngine, str], new: tuple[FakeTransferEngine, str], tmp_path: Path
) -> None:
    path, seen, arrived = tmp_path / "moby.context", list[ExportProgress](), list[ImportProgress]()
    async with AsyncClient(old[1]) as client:
        archive = await client.export_context("moby", path, on_progress=seen.append)
    assert (path.read_bytes(), archive.num_bytes) == (WHOLE, len(WHOLE))
    assert files_of(tmp_path) == ["moby.context"]
    assert (seen[-1], len(seen) > 10) == (ExportProgress(len(WHOLE), archive), True)
    async with AsyncClient(new[1]) as client:
        context = await client.import_context(path, "dick", on_progress=arrived.append)
    assert (context.id, context.tokens, context.display_name, context.state) == ("dick", 11, "Moby-Dick", "evicted")
    assert (arrived[-1].key_tokens, arrived[-1].received_bytes) == (11, len(WHOLE))
    assert keys_of(new[0], "dick") == list(MOBY.objects.values()) == keys_of(old[0])
    assert (old[0].num_open, new[0].num_imports) == (0, 0)


async def test_synchronous_client_transfers_contexts(
    old: tuple[FakeTransferEngine, str], new: tuple[FakeTransferEngine, str], tmp_path: Path
) -> None:
    def move() -> None:
        with Client(old[1]) as client:
            client.export_context("moby", tmp_path / "moby", with_keys=False, on_progress=seen.append)
        with Client(new[1]) as client:
            client.import_context(tmp_path / "moby", on_progress=arrived.append)

    seen, arrived = list[ExportProgress](), list[ImportProgress]()
    await asyncio.to_thread(move)
    assert (len(seen), arrived[-1].key_tokens, new[0].objects) == (1, 0, {})


async def test_export_resumes_over_a_new_connection(old: tuple[FakeTransferEngine, str], tmp_path: Path) -> None:
    for target in (tmp_path / "moby", io.BytesIO()):
        async with breaking(old[1]) as (proxy, address), AsyncClient(address, retries=QUICK) as client:
            drops = [1 << 20, 3 << 20]

            def drop(progress: ExportProgress, drops: list[int] = drops, proxy: Any = proxy) -> None:
                if drops and progress.received_bytes > drops[0]:
                    del drops[0]
                    proxy.drop()

            await client.export_context("moby", target, on_progress=drop)
            assert not drops
        assert (target.read_bytes() if isinstance(target, Path) else target.getvalue()) == WHOLE


async def test_later_export_call_resumes_from_the_file(old: tuple[FakeTransferEngine, str], tmp_path: Path) -> None:
    path, offsets = tmp_path / "moby", list[int]()
    part = tmp_path / "moby.part"

    def fail(progress: ExportProgress) -> None:
        raise RuntimeError("the machine goes down")

    async with AsyncClient(old[1]) as client:
        with pytest.raises(RuntimeError):
            await client.export_context("moby", path, on_progress=fail)
        retained = part.stat().st_size
        assert 0 < retained < len(WHOLE)
        await client.export_context(
            "moby", path, resume=True, on_progress=lambda each: offsets.append(each.received_bytes)
        )
    assert path.read_bytes() == WHOLE
    assert offsets[0] > retained
    assert files_of(tmp_path) == ["moby"]


async def test_export_file_of_a_changed_context_is_not_resumed(
    old: tuple[FakeTransferEngine, str], tmp_path: Path
) -> None:
    path = tmp_path / "moby"

    def fail(progress: ExportProgress) -> None:
        raise RuntimeError("the machine goes down")

    async with AsyncClient(old[1]) as client:
        with pytest.raises(RuntimeError):
            await client.export_context("moby", path, on_progress=fail)
        record = old[0].contexts["moby"].context
        old[0].contexts["moby"] = old[0].contexts["moby"]._replace(context=replace(record, capacity=5000))
        with pytest.raises(FailedPrecondition, match="contexts/moby: it has changed"):
            await client.export_context("moby", path, resume=True)
        assert not path.exists()
        await client.export_context("moby", path)  # exported again
    assert path.exists()
    assert not (tmp_path / "moby.part").exists()


async def test_files_are_not_overwritten(old: tuple[FakeTransferEngine, str], tmp_path: Path) -> None:
    (tmp_path / "moby").write_text("mine")
    async with AsyncClient(old[1]) as client:
        with pytest.raises(InvalidArgument, match="file: .*moby exists"):
            await client.export_context("moby", tmp_path / "moby")
        with pytest.raises(InvalidArgument, match="resume: there is no .*dick.part to continue"):
            await client.export_context("moby", tmp_path / "dick", resume=True)
        with pytest.raises(InvalidArgument, match="file: cannot be written: No such file"):
            await client.export_context("moby", tmp_path / "none" / "dick")
    assert (tmp_path / "moby").read_text() == "mine"


async def test_export_raises_the_error_of_the_service(old: tuple[FakeTransferEngine, str]) -> None:
    async with AsyncClient(old[1], retries=0) as client:
        with pytest.raises(NotFound, match="contexts/dick"):
            await client.export_context("dick", io.BytesIO())
        old[0].failures = [StorageUnavailable("away")]
        with pytest.raises(StorageUnavailable, match="away"):
            await client.export_context("moby", io.BytesIO())
    async with AsyncClient(old[1], retries=QUICK) as client:
        old[0].failures = [StorageUnavailable("away")] * 2
        target = io.BytesIO()
        await client.export_context("moby", target)
        assert target.getvalue() == WHOLE


async def test_import_resumes_over_a_new_connection(new: tuple[FakeTransferEngine, str], tmp_path: Path) -> None:
    path = tmp_path / "moby"
    path.write_bytes(WHOLE)
    for name, source in (("file", path), ("pipe", io.BytesIO(WHOLE))):
        seen = list[int]()
        async with breaking(new[1], 1_500_000, 1_200_000) as (proxy, address), AsyncClient(address) as client:
            context = await client.import_context(
                source, name, on_progress=lambda each, seen=seen: seen.append(each.received_bytes)
            )
            assert proxy.num_dropped == 2
        assert keys_of(new[0], context.id) == list(MOBY.objects.values())
        assert sorted(seen) == seen, "received data is not sent again"


async def test_expired_import_is_sent_again_from_a_rereadable_source(
    new: tuple[FakeTransferEngine, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "moby").write_bytes(WHOLE)
    monkeypatch.setattr(ImportSessions, "_find", lambda *_: None)
    calls, answer = iter(range(1000)), new[0].answer

    async def failing() -> None:
        if next(calls) == 4:
            raise StorageUnavailable("away")
        await answer()

    monkeypatch.setattr(new[0], "answer", failing)
    async with AsyncClient(new[1], retries=QUICK) as client:
        await client.import_context(tmp_path / "moby", "file")
        calls = iter(range(1000))
        with pytest.raises(Unavailable, match="has lost acknowledged parts .* cannot be read again"):
            await client.import_context(io.BytesIO(WHOLE), "pipe")
    assert keys_of(new[0], "file") == list(MOBY.objects.values())


async def test_import_survives_unavailable_storage(new: tuple[FakeTransferEngine, str]) -> None:
    async with AsyncClient(new[1], retries=QUICK) as client:
        new[0].failures = [StorageUnavailable("away")] * 3
        await client.import_context(io.BytesIO(WHOLE))
    assert keys_of(new[0]) == list(MOBY.objects.values())


async def test_completed_import_is_acknowledged_again(new: tuple[FakeTransferEngine, str]) -> None:
    async with AsyncClient(new[1]) as client:
        first = await client.import_context(io.BytesIO(WHOLE), upload_id="mine")
        assert await client.import_context(io.BytesIO(WHOLE), upload_id="mine") == first
        with pytest.raises(AlreadyExists, match="contexts/moby"):
            await client.import_context(io.BytesIO(WHOLE), upload_id="yours")


DAMAGED = WHOLE[:2_000_000] + b"?" + WHOLE[2_000_001:]


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"", InvalidArgument, "archive: it is truncated"),
        (b"Call me Ishmael. " * 9, InvalidArgument, "archive: this is not an exported context"),
        (WHOLE[:-1], InvalidArgument, "archive: it is truncated"),
        (WHOLE + b"\0", InvalidArgument, "archive: it has extra bytes after its end"),
        (DAMAGED, InvalidArgument, "archive: the content of 'piece' is damaged"),
    ],
    ids=["empty", "text", "cut", "longer", "damaged"],
)
async def test_invalid_archive_is_reported_and_leaves_nothing(
    new: tuple[FakeTransferEngine, str], data: bytes, error: type[LongleafError], message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(data)
    async with AsyncClient(new[1]) as client:
        for source in (tmp_path / "file", io.BytesIO(data)):
            with pytest.raises(error, match=message):
                await client.import_context(source)
    assert (new[0].contexts, new[0].objects, new[0].num_imports) == ({}, {}, 0)


async def test_archive_of_another_model_is_refused_before_all_is_sent(new: tuple[FakeTransferEngine, str]) -> None:
    given, seen = packable(piece_bytes=700_000, vocabulary=256), list[int]()
    given.head = replace(given.head, fingerprint=Fingerprint("cd" * 32, {"config.json": "02"}))
    async with AsyncClient(new[1]) as client:
        with pytest.raises(CheckpointChanged, match=r"contexts/moby .* they differ in config.json, model.safetensors"):
            await client.import_context(
                io.BytesIO(given.packed()), on_progress=lambda each: seen.append(each.received_bytes)
            )
    assert seen == [0]


async def test_service_without_transfers_refuses_them(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path / "model") as (_, address), AsyncClient(address) as client:
        with pytest.raises(FailedPrecondition, match="does not support export and import"):
            await client.export_context("moby", io.BytesIO())
        with pytest.raises(FailedPrecondition, match="does not support export and import"):
            await client.import_context(io.BytesIO(WHOLE))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"name": "moby"}, "name"),
        ({"name": "contexts/moby", "offset": -1}, "offset"),
        ({"name": "contexts/moby", "offset": 1}, "digest"),
        ({"name": "contexts/moby", "digest": "x" * 200}, "digest"),
    ],
)
async def test_invalid_export_requests_name_the_field(
    old: tuple[FakeTransferEngine, str], request_: dict[str, Any], field: str
) -> None:
    async with grpc.aio.insecure_channel(old[1]) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in ContextServiceStub(channel).ExportContext(context_pb.ExportContextRequest(**request_))]
    error = decode_error(caught.value, old[1])
    assert isinstance(error, InvalidArgument)
    assert error.field == field


@pytest.mark.parametrize(
    ("requests", "field"),
    [
        ([], "config"),
        ([{"chunk": {"data": b"x"}}], "config"),
        ([{}], "payload"),
        ([{"config": {"name": "moby"}}], "config.name"),
        ([{"config": {"upload_id": "x" * 129}}], "config.upload_id"),
        ([{"config": {}}, {"config": {}}], "config"),
        ([{"config": {}}, {"chunk": {"offset": 7, "data": b"x"}}], "chunk.offset"),
        ([{"config": {}}, {"chunk": {"offset": -7, "data": b"x"}}], "chunk.offset"),
        ([{"config": {"total_size_bytes": 3}}, {"chunk": {"data": b"long"}}], "config.total_size_bytes"),
        ([{"config": {"total_size_bytes": -1}}], "config.total_size_bytes"),
        ([{"config": {}}, {"chunk": {"data": bytes(2 << 20)}}], "request"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_invalid_imports_name_the_field(
    new: tuple[FakeTransferEngine, str], requests: list[dict[str, Any]], field: str
) -> None:
    async def upward() -> AsyncIterator[context_pb.ImportContextRequest]:
        for each in requests:
            yield context_pb.ImportContextRequest(**each)

    async with grpc.aio.insecure_channel(new[1]) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in ContextServiceStub(channel).ImportContext(upward())]
    error = decode_error(caught.value, new[1])
    assert isinstance(error, InvalidArgument)
    assert error.field == field


async def test_service_that_keeps_interrupting_is_not_retried_forever(new: tuple[FakeTransferEngine, str]) -> None:
    quick = Retries(limit=2, first_delay=0.0)
    async with breaking(new[1], *[100] * 50) as (_, address), AsyncClient(address, retries=quick) as client:
        with pytest.raises(Unavailable):
            await client.import_context(io.BytesIO(WHOLE))
        with pytest.raises(Unavailable):
            await client.export_context("moby", io.BytesIO())


@pytest.mark.parametrize(
    ("encode", "decode", "message"),
    [
        (codec.encode_export, codec.decode_export, ExportContext(context="a", offset=3, digest="d", with_keys=False)),
        (codec.encode_exported, codec.decode_exported, ExportedArchive(1 << 40, "d")),
        (codec.encode_exported, codec.decode_exported, b"bytes"),
        (codec.encode_import_piece, codec.decode_import_piece, ImportHeader(context="a", upload_id="b", total_bytes=0)),
        (codec.encode_import_piece, codec.decode_import_piece, ImportHeader()),
        (codec.encode_import_piece, codec.decode_import_piece, ArchiveChunk(1 << 40, b"x")),
        (codec.encode_import_progress, codec.decode_import_progress, ImportProgress(received_bytes=1, key_tokens=0)),
        (codec.encode_import_progress, codec.decode_import_progress, ImportProgress(received_bytes=0)),
    ],
)
def test_messages_are_transferred(encode: Any, decode: Any, message: object) -> None:
    assert decode(encode(message)) == message
