"""Every call of every service: without credentials, as another tenant, as an admin, and as the tenant that owns the
named objects."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc import StatusCode
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from longleaf.errors import CheckpointChanged
from longleaf.types import Draining
from tests.support.archives import packable
from tests.support.service import FakeEngine, ids, serving
from tests.support.tenants import ACME, BOLT, METHODS, OPS, Caller, credentials, request_of, texts_in
from tests.support.transfer_engines import transfer_engine_of

SECRET = "the moby text"
OK, NOT_FOUND, DENIED = StatusCode.OK, StatusCode.NOT_FOUND, StatusCode.PERMISSION_DENIED


@dataclass
class Row:
    """The request of a call, with acme's names, and the codes that tenants get."""

    fields: dict[str, Any]
    acme: StatusCode = OK
    bolt: StatusCode = NOT_FOUND
    ops: StatusCode = NOT_FOUND
    more: tuple[dict[str, Any], ...] = ()
    """Further requests of a stream."""


def free(fields: dict[str, Any] | None = None, code: StatusCode = OK) -> Row:
    """A call that every authenticated caller may make."""
    return Row(fields or {}, code, code, code)


BOOK = {"name": "contexts/book"}
SAMPLING = {"max_token_count": 1}
ADMINS = Row({}, DENIED, DENIED, OK)
ROWS: dict[str, Row] = {
    "Generate": Row({"context": "contexts/book", "text": "who?", "sampling": SAMPLING}),
    "CancelGeneration": Row({"request_id": "held"}),
    "IngestContext": Row({"config": BOOK | {"append": True}}, more=({"text": b"more"},)),
    "CancelIngest": free(BOOK | {"upload_id": "mine"}, NOT_FOUND),
    "GetContext": Row(BOOK),
    "GetContextText": Row(BOOK | {"token_range": {"start": 0, "end": 2}}),
    "ListContexts": free(),
    "ForkContext": Row(BOOK | {"new_name": "contexts/fork"}),
    "UpdateContext": Row({"context": BOOK | {"pinned": True}, "update_mask": {"paths": ["pinned"]}}),
    "RecomputeContext": Row({"name": "contexts/old"}),
    "RecomputeContexts": free(),
    "DeleteContext": Row(BOOK),
    "ExportContext": Row(BOOK),
    "ImportContext": free({"config": {"total_size_bytes": 5}}, StatusCode.INVALID_ARGUMENT),
    "CountTokens": free({"text": "a"}),
    "Tokenize": free({"text": "a"}),
    "Detokenize": free({"token_ids": {"ids": [65]}}),
    "GetCluster": free(),
    "WatchCluster": free(),
    "VerifyCluster": ADMINS,
    "Drain": ADMINS,
    "ResetSlots": ADMINS,
}


async def drained(_: bool) -> Draining:
    return Draining(open_calls=0, limit=0.0)


@pytest.fixture
async def address(tmp_path: Path) -> AsyncIterator[str]:
    """A service in which acme has a book, a stale context and a retained generation."""
    engine = FakeEngine()
    engine.answer = (ids("hi"),)
    engine.contexts["acme/book"] = list(ids(SECRET))
    engine.earlier = {"acme/old": list(ids("old")), "acme/gone": CheckpointChanged("contexts/acme/gone", "all of it")}
    transfers = transfer_engine_of(packable(name="acme/book"))
    options = {"authenticator": credentials(tmp_path), "drain": drained, "reset_slots": lambda: 1}
    async with serving(engine, tmp_path / "model", transfers=transfers, **options) as (_, address):
        async with grpc.aio.insecure_channel(address) as channel:
            fields = {"text": "a", "request_id": "held", "resume_duration": {"seconds": 60}, "sampling": SAMPLING}
            code, *_ = await Caller(channel, ACME).call("Generate", [request_of("Generate", **fields)])
            assert code == OK
        yield address


def requests_of(name: str) -> Sequence[Message]:
    row = ROWS[name]
    return [request_of(name, **fields) for fields in (row.fields, *row.more)]


def test_every_method_has_a_row() -> None:
    assert set(ROWS) == set(METHODS)


@pytest.mark.parametrize("name", sorted(METHODS))
async def test_each_role_gets_its_expected_code(address: str, name: str) -> None:
    row = ROWS[name]
    wanted = {None: StatusCode.UNAUTHENTICATED, BOLT: row.bolt, OPS: row.ops, ACME: row.acme}
    async with grpc.aio.insecure_channel(address) as channel:
        for tenant, code in wanted.items():
            found, responses, details = await Caller(channel, tenant).call(name, requests_of(name))
            assert found == code, (tenant, details)
            text = f"{texts_in(responses)}\n{details}"
            assert "acme/" not in text, "ids have no tenant prefix"
            if tenant != ACME:
                assert "acme" not in text


@pytest.mark.parametrize("name", sorted(name for name, row in ROWS.items() if row.bolt == NOT_FOUND))
async def test_object_of_another_tenant_looks_like_a_missing_one(address: str, name: str) -> None:
    """Bolt names an object of acme, then one that does not exist."""

    def as_missing(message: Message) -> Message:
        text = message.SerializeToString()
        for name in (b"book", b"held", b"old"):
            text = text.replace(name, b"x" * len(name))
        return type(message).FromString(text)

    async with grpc.aio.insecure_channel(address) as channel:
        bolt = Caller(channel, BOLT)
        code, _, details = await bolt.call(name, requests_of(name))
        other_code, _, other_reported = await bolt.call(name, list(map(as_missing, requests_of(name))))
    assert code == other_code
    for known in ("book", "held", "old"):
        details = details.replace(known, "x" * len(known))
    assert details == other_reported


@pytest.mark.parametrize("change", [lambda text: text.upper(), lambda text: text + "x", lambda _: ""])
async def test_invalid_credentials_are_rejected(address: str, change: Callable[[str], str]) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        caller = Caller(channel, ACME)
        caller._metadata = (("authorization", change(caller._metadata[0][1])),)
        for name in METHODS:
            code, responses, _ = await caller.call(name, requests_of(name))
            assert (code, responses) == (StatusCode.UNAUTHENTICATED, []), name


async def test_probing_for_objects_reveals_nothing(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        stream = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream.read()
    assert refused.value.code() == StatusCode.UNIMPLEMENTED
