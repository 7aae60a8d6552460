"""Attempts of a tenant to reach another tenant's objects, or to learn of them."""

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import StatusCode

from coordinator.auth.credentials import Credentials
from longleaf.tenants import DEFAULT_TENANT
from tests.support.archives import packable
from tests.support.fakes.transfer_engine import FakeTransferEngine
from tests.support.service import FakeEngine, ids, serving
from tests.support.tenants import ACME, BOLT, Caller, request_of, texts_in, write_credentials
from tests.support.transfer_engines import transfer_engine_of

ATTACKERS = (BOLT, DEFAULT_TENANT)
"""Internal names of the default tenant have no prefix: its ids must not be read as another tenant's."""
NAMES = (
    "contexts/acme/book",
    "contexts/acme%2Fbook",
    "contexts/bolt/../acme/book",
    "acme/book",
    "contexts//acme/book",
    "contexts/acme∕book",  # DIVISION SLASH, in which regular expressions see no slash
    "contexts/аcme/book",
    "contexts/acme/book\n",
    "contexts/book\n",
    "contexts/book\0",
    "contexts/*",
    "contexts/",
    "",
)
REQUEST_IDS = ("acme/held", "bolt/../acme/held", "acme%2Fheld", "held\n", "a" * 129, "hëld")
NAMED: dict[str, tuple[str, ...]] = {
    "GetContext": ("name",),
    "GetContextText": ("name",),
    "DeleteContext": ("name",),
    "CancelIngest": ("name",),
    "ExportContext": ("name",),
    "RecomputeContext": ("name",),
    "ForkContext": ("name", "new_name"),
}


@pytest.fixture
def transfers() -> FakeTransferEngine:
    return transfer_engine_of(packable(name="acme/book"))


@pytest.fixture
async def channel(transfers: FakeTransferEngine, tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a service with a book and a retained generation of acme."""
    engine = FakeEngine()
    engine.answer = (ids("hi"),)
    engine.contexts["acme/book"] = list(ids("of acme"))
    authenticator = Credentials.from_file(str(write_credentials(tmp_path, DEFAULT_TENANT)))
    async with (
        serving(engine, tmp_path / "model", transfers=transfers, authenticator=authenticator) as (_, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        fields = {"text": "a", "request_id": "held", "sampling": {"max_token_count": 1}}
        assert await code_of(channel, ACME, "Generate", fields | {"resume_duration": {"seconds": 60}}) == StatusCode.OK
        yield channel


async def code_of(channel: grpc.aio.Channel, tenant: str, name: str, *requests: dict[str, Any]) -> StatusCode:
    """The status code of a call. Its details must not contain anything of acme's that the caller did not send."""
    given = [request_of(name, **fields) for fields in requests]
    code, responses, details = await Caller(channel, tenant).call(name, given)
    text = f"{texts_in(responses)}{details}"
    assert "of acme" not in text
    assert tenant == ACME or "acme" not in text or "acme" in texts_in(given)
    return code


@pytest.mark.parametrize("tenant", ATTACKERS)
@pytest.mark.parametrize("name", NAMES)
async def test_no_name_reaches_a_context_of_another_tenant(channel: grpc.aio.Channel, tenant: str, name: str) -> None:
    for call, fields in NAMED.items():
        for field in fields:
            given = dict.fromkeys(fields, "contexts/own") | {field: name}
            assert await code_of(channel, tenant, call, given) == StatusCode.INVALID_ARGUMENT, call
    document = {"config": {"name": name, "append": True}}, {"text": b"more"}
    assert await code_of(channel, tenant, "IngestContext", *document) == StatusCode.INVALID_ARGUMENT
    if name:
        prompt = {"context": name, "text": "?", "sampling": {"max_token_count": 1}}
        assert await code_of(channel, tenant, "Generate", prompt) == StatusCode.INVALID_ARGUMENT
    assert await code_of(channel, ACME, "GetContext", {"name": "contexts/book"}) == StatusCode.OK


@pytest.mark.parametrize("tenant", ATTACKERS)
@pytest.mark.parametrize("request_id", REQUEST_IDS)
async def test_no_id_reaches_a_generation_of_another_tenant(
    channel: grpc.aio.Channel, tenant: str, request_id: str
) -> None:
    for call, given in (("CancelGeneration", {}), ("Generate", {"resume_token_index": 0})):
        fields = given | {"request_id": request_id}
        assert await code_of(channel, tenant, call, fields) == StatusCode.INVALID_ARGUMENT, call


@pytest.mark.parametrize("tenant", ATTACKERS)
async def test_generation_id_of_another_tenant_is_free(channel: grpc.aio.Channel, tenant: str) -> None:
    """The id is neither found nor taken: the caller learns nothing and may use it."""
    resume = {"request_id": "held", "resume_token_index": 0}
    assert await code_of(channel, tenant, "Generate", resume) == StatusCode.NOT_FOUND
    assert await code_of(channel, tenant, "CancelGeneration", {"request_id": "held"}) == StatusCode.NOT_FOUND
    prompt = {"text": "b", "request_id": "held", "sampling": {"max_token_count": 1}}
    prompt |= {"resume_duration": {"seconds": 60}}
    assert await code_of(channel, tenant, "Generate", prompt) == StatusCode.OK
    assert await code_of(channel, tenant, "CancelGeneration", {"request_id": "held"}) == StatusCode.OK
    assert await code_of(channel, ACME, "Generate", resume) == StatusCode.OK


@pytest.mark.parametrize("tenant", ATTACKERS)
@pytest.mark.parametrize("after", ["", "acme/a", "acme/", "a", "../", "\0"])
async def test_no_page_lists_contexts_of_another_tenant(channel: grpc.aio.Channel, tenant: str, after: str) -> None:
    token = base64.urlsafe_b64encode(after.encode()).decode()
    request = request_of("ListContexts", page_token=token)
    code, [page], _ = await Caller(channel, tenant).call("ListContexts", [request])
    assert (code, list(page.contexts), page.next_page_token) == (StatusCode.OK, [], "")


@pytest.mark.parametrize("tenant", ATTACKERS)
async def test_upload_does_not_resume_an_interrupted_upload_of_another_tenant(
    channel: grpc.aio.Channel, tenant: str
) -> None:
    """With the same name and upload id."""
    config = {"name": "contexts/play", "upload_id": "mine", "total_size_bytes": 100}
    half = {"config": config}, {"text": b"secret" * 5}
    await Caller(channel, ACME).call("IngestContext", [request_of("IngestContext", **each) for each in half])
    for who, resident in ((tenant, 0), (ACME, 30)):
        requests = [request_of("IngestContext", config=config)]
        _, responses, _ = await Caller(channel, who).call("IngestContext", requests)
        assert responses[0].received_size_bytes == resident, who


@pytest.mark.parametrize("tenant", ATTACKERS)
@pytest.mark.parametrize("forged", ["acme/play", "acme/book", "../acme/play", "acme∕play", "", "play\n"])
async def test_forged_archive_name_creates_no_context_of_another_tenant(
    channel: grpc.aio.Channel, transfers: FakeTransferEngine, tenant: str, forged: str
) -> None:
    archive = packable(name=forged, vocabulary=200).packed()
    pieces = {"chunk": {"offset": 0, "data": archive}}
    before = set(transfers.contexts)
    assert await code_of(channel, tenant, "ImportContext", {"config": {}}, pieces) == StatusCode.INVALID_ARGUMENT
    assert set(transfers.contexts) == before
    named = {"config": {"name": "contexts/mine"}}
    assert await code_of(channel, tenant, "ImportContext", named, pieces) == StatusCode.OK
    own = "mine" if tenant == DEFAULT_TENANT else f"{tenant}/mine"
    assert set(transfers.contexts) == {*before, own}
