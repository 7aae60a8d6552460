"""Errors over real sockets: statuses, details, and the same exception at the client."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from coordinator.auth.credentials import Credentials
from coordinator.grpc_server.server import GrpcServer
from coordinator.handlers.application import Application
from longleaf.client import AsyncClient
from longleaf.codec.status import DETAILS_KEY
from longleaf.config import MAX_REQUEST_BYTES
from longleaf.credentials import CredentialEntry, Role, digest_of, line_of, new_credential
from longleaf.errors import (
    AlreadyExists,
    Cancelled,
    CheckpointChanged,
    ContextLost,
    DataLoss,
    DeadlineExceeded,
    InvalidArgument,
    LongleafError,
    NotFound,
    RankLost,
    ResourceExhausted,
    StartError,
    StorageUnavailable,
    Unavailable,
)
from longleaf.v1 import generation_service_pb2 as service_pb
from longleaf.v1.generation_service_pb2_grpc import GenerationServiceStub
from tests.support.service import FakeEngine, Served, collect, load_tokenizer, serving, write_model

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
    (DeadlineExceeded("too late"), grpc.StatusCode.DEADLINE_EXCEEDED, [error_details_pb2.ErrorInfo]),
    (Cancelled("generations/x was cancelled"), grpc.StatusCode.ABORTED, [error_details_pb2.ErrorInfo]),
    (RankLost(3, "gone ✝"), grpc.StatusCode.UNAVAILABLE, [error_details_pb2.ErrorInfo]),
    (Unavailable("starting"), grpc.StatusCode.UNAVAILABLE, [error_details_pb2.ErrorInfo]),
    (
        Unavailable("recovering, for 2.5 s more", 2.5),
        grpc.StatusCode.UNAVAILABLE,
        [error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo],
    ),
    (ContextLost("contexts/x", "no room ✝"), grpc.StatusCode.DATA_LOSS, [error_details_pb2.ErrorInfo]),
    (DataLoss("contexts/x", "no ids ✝"), grpc.StatusCode.DATA_LOSS, [error_details_pb2.ErrorInfo]),
    (
        CheckpointChanged("contexts/x", "other weights ✝"),
        grpc.StatusCode.FAILED_PRECONDITION,
        [error_details_pb2.ErrorInfo],
    ),
    (StorageUnavailable("full ✝"), grpc.StatusCode.UNAVAILABLE, [error_details_pb2.ErrorInfo]),
]


@pytest.mark.parametrize(("error", "code", "details"), ERRORS, ids=lambda value: type(value).__name__)
async def test_every_error_has_its_status_and_details(
    service: Served, channel: grpc.aio.Channel, error: LongleafError, code: grpc.StatusCode, details: list[Any]
) -> None:
    service.engine.error = error
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await GenerationServiceStub(channel).Generate(service_pb.GenerateRequest(text="x")).read()
    assert (caught.value.code(), caught.value.details()) == (code, str(error))
    trailers = dict(caught.value.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailers[DETAILS_KEY])
    assert [packed.Is(kind.DESCRIPTOR) for packed, kind in zip(status.details, details, strict=True)]


@pytest.mark.parametrize("error", [error for error, _, _ in ERRORS], ids=repr)
async def test_client_raises_the_same_error(service: Served, error: LongleafError) -> None:
    service.engine.late_error = error
    with pytest.raises(type(error)) as caught:
        await collect(service.client.generate("x"))
    assert type(caught.value) is type(error)
    assert vars(caught.value) == vars(error)
    assert str(caught.value) == str(error)


async def test_unexpected_error_is_internal_without_details(
    service: Served, channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    service.engine.error = RuntimeError("a secret")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await GenerationServiceStub(channel).Generate(service_pb.GenerateRequest(text="x")).read()
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in (caught.value.details() or "")
    assert "a secret" in caplog.text


async def test_non_utf8_string_is_an_invalid_argument(channel: grpc.aio.Channel) -> None:
    call = channel.unary_stream("/longleaf.v1.GenerationService/Generate")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"\x12\x02\xff\xfe").read()
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_unreachable_server_is_unavailable_and_named() -> None:
    async with AsyncClient("127.0.0.1:1", retries=0) as client:
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
            await client.cluster()


async def test_server_stopped_during_a_call_is_unavailable(service: Served) -> None:
    service.engine.is_endless = True
    reading = asyncio.create_task(collect(service.client.generate("x")))
    await service.engine.opened.wait()
    await service.server.stop()
    with pytest.raises(Unavailable):
        await reading
    assert service.engine.streams[0].closed.is_set()


async def test_taken_port_is_named(service: Served, tmp_path: Path) -> None:
    port = int(service.address.rpartition(":")[2])
    engine = FakeEngine()
    other = GrpcServer(Application(engine, load_tokenizer(write_model(tmp_path / "other")), engine.describe))
    with pytest.raises(StartError, match=f"{port}: Address already in use"):
        await other.start("127.0.0.1", port)
    with pytest.raises(StartError, match=r"192\.0\.2\.1:0: Cannot assign"):
        await other.start("192.0.2.1", 0)
    with pytest.raises(StartError, match="not a host:0: Name or service not known"):
        await other.start("not a host", 0)
    await other.stop()


@pytest.mark.parametrize("max_sent", [None, -1], ids=["client", "server"])
async def test_oversized_request_is_not_retryable(
    service: Served, max_sent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if max_sent is not None:
        monkeypatch.setattr("longleaf.client.channels.OPTIONS", (("grpc.max_send_message_length", max_sent),))
    async with AsyncClient(service.address) as client:
        with pytest.raises(
            InvalidArgument,
            match=rf"request: has {MAX_REQUEST_BYTES + 5:,} bytes; the limit for one message is {4 << 20:,}",
        ):
            await client.count_tokens("x" * MAX_REQUEST_BYTES)
    assert await service.client.count_tokens("x") == 1


PLACES = [
    StorageUnavailable("catalog /srv/data/catalog.db: the disk is full; free disk space"),
    StorageUnavailable("s3://bucket/folder cannot be read: timeout", 1.0),
    StorageUnavailable("/srv/data/journal/ab12: No space left on device"),
    DataLoss("catalog /srv/data/catalog.db", "it is damaged; restore its folder from a copy"),
    DataLoss("contexts/service/1/2.json", "its 5 bytes differ from those written to s3://bucket/folder"),
    CheckpointChanged(
        "contexts/x", "config.json in /srv/models/tiny changed after it was ingested; ingest the text again"
    ),
]


@pytest.mark.parametrize("error", PLACES, ids=str)
async def test_only_admins_see_storage_paths(
    error: LongleafError, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    credentials: dict[Role, str] = {"user": new_credential(), "admin": new_credential()}
    file = tmp_path / "credentials"
    entries = [
        CredentialEntry(tenant=f"the-{role}", role=role, digests=(digest_of(each),))
        for role, each in credentials.items()
    ]
    file.write_text("".join(f"{line_of(entry)}\n" for entry in entries))
    engine = FakeEngine()
    async with serving(engine, tmp_path / "model", authenticator=Credentials.from_file(str(file))) as (_, address):
        for role, credential in credentials.items():
            engine.error = error
            caplog.clear()
            async with AsyncClient(address, credential=credential, retries=0) as client:
                with pytest.raises(type(error)) as caught:
                    await collect(client.generate("x"))
            message = str(caught.value)
            assert (str(error) == message) == (role == "admin")
            if role == "user":
                assert not any(place in message for place in ("/srv", "s3:", "bucket"))
                assert str(error) in caplog.text
                assert getattr(caught.value, "retry_seconds", None) == getattr(error, "retry_seconds", None)
