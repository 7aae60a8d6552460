"""The log of a service's calls: a line for each, and audit lines."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import StatusCode

from coordinator.telemetry.observers import Observers
from coordinator.telemetry.telemetry import Telemetry
from longleaf.errors import NotFinite, RankLost
from longleaf.service_settings import TelemetryConfig
from longleaf.types import Draining
from tests.support.open_calls import OpenCalls
from tests.support.parcels import packable
from tests.support.service import FakeEngine, ids, serving
from tests.support.tenants import ACME, METHODS, OPS, Caller, bearer, credential_of, credentials, request_of
from tests.support.transfer_engines import transfer_engine_of

SECRET = "the moby text"
REQUESTS: dict[str, list[dict[str, Any]]] = {
    "Generate": [{"context": "contexts/book", "text": SECRET, "sampling": {"max_token_count": 1}}],
    "CancelGeneration": [{"request_id": "held"}],
    "IngestContext": [{"config": {"name": "contexts/new"}}, {"text": SECRET.encode()}],
    "CancelIngest": [{"name": "contexts/begun", "upload_id": "mine"}],
    "GetContext": [{"name": "contexts/book"}],
    "GetContextText": [{"name": "contexts/book", "token_range": {"start": 0, "end": 2}}],
    "ListContexts": [{}],
    "ForkContext": [{"name": "contexts/book", "new_name": "contexts/fork"}],
    "UpdateContext": [{"context": {"name": "contexts/book", "pinned": True}, "update_mask": {"paths": ["pinned"]}}],
    "RereadContext": [{"name": "contexts/old"}],
    "RereadContexts": [{}],
    "DeleteContext": [{"name": "contexts/book"}],
    "ExportContext": [{"name": "contexts/book"}],
    "ImportContext": [{"config": {"name": "contexts/came", "total_size_bytes": 5}}],
    "CountTokens": [{"text": SECRET}],
    "Tokenize": [{"text": SECRET}],
    "Detokenize": [{"token_ids": {"ids": [65]}}],
    "GetCluster": [{}],
    "WatchCluster": [{}],
    "VerifyCluster": [{}],
    "Drain": [{}],
    "RefillSlots": [{}],
}
CONTEXTS = {
    **dict.fromkeys(
        ("Generate", "GetContext", "GetContextText", "UpdateContext", "DeleteContext", "ExportContext"), "book"
    ),
    "IngestContext": "new",
    "CancelIngest": "begun",
    "ForkContext": "fork",
    "RereadContext": "old",
    "ImportContext": "came",
}
AUDITED = {"DeleteContext": "deletion of a context", "Drain": "drain", "RefillSlots": "refill of slots"}


async def drained(_: bool) -> Draining:
    return Draining(open_calls=0, limit=0.0)


@asynccontextmanager
async def watched(folder: Path, engine: FakeEngine, **telemetry: Any) -> AsyncGenerator[grpc.aio.Channel, None]:
    """A channel to a service with credentials; acme has a book in it."""
    engine.contexts[f"{ACME}/book"] = list(ids("book"))
    engine.earlier = {f"{ACME}/old": list(ids("old"))}
    watching = Telemetry(
        TelemetryConfig(**{"log_format": "json", "log_level": "info"} | telemetry), "fake", "local", False
    )
    calls = OpenCalls()
    observers = Observers((calls, await watching.start()))
    options = {"authenticator": credentials(folder), "drain": drained, "refill": lambda: 1, "observers": observers}
    transfers = transfer_engine_of(packable(name=f"{ACME}/book"))
    try:
        async with (
            serving(engine, folder / "model", transfers=transfers, **options) as (_, address),
            grpc.aio.insecure_channel(address) as channel,
        ):
            yield channel
            await calls.wait()
    finally:
        await watching.stop()


class LogOutput:
    """The log objects on standard error, where the client's library also writes, bypassing Python."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.text = ""

    def of(self, logger: str) -> list[dict[str, Any]]:
        self.text += self._capsys.readouterr().err
        lines = [json.loads(line) for line in self.text.splitlines()]
        return [line for line in lines if line["logger"] == logger]


@pytest.fixture
def log_output(capsys: pytest.CaptureFixture[str]) -> LogOutput:
    return LogOutput(capsys)


def test_every_method_is_called_below() -> None:
    assert set(REQUESTS) == set(METHODS)


@pytest.mark.parametrize("name", sorted(METHODS))
async def test_every_call_has_one_line(tmp_path: Path, log_output: LogOutput, name: str) -> None:
    engine = FakeEngine()
    engine.answer = (ids("hi"),)
    tenant = OPS if name in ("VerifyCluster", "Drain", "RefillSlots") else ACME
    async with watched(tmp_path, engine) as channel:
        if name == "CancelGeneration":
            fields = {"text": "a", "request_id": "held", "resume_duration": {"seconds": 60}}
            request = request_of("Generate", **fields, sampling={"max_token_count": 1})
            await Caller(channel, tenant).call("Generate", [request])
            log_output.of("")
            log_output.text = ""
        requests = [request_of(name, **fields) for fields in REQUESTS[name]]
        code, *_ = await Caller(channel, tenant).call(name, requests)
    (line,) = log_output.of("coordinator.auth")
    assert line["method"].endswith(f"/{name}")
    assert line["code"] == ("CANCELLED" if name == "WatchCluster" else code.name)  # its reader disconnected
    assert (line["level"], line["tenant"]) == ("info", tenant)
    assert line["host"].startswith(("ipv4:127.0.0.1", "ipv6:"))
    assert 0 <= line["seconds"] < 60
    assert line.get("context") == CONTEXTS.get(name)
    assert ("request" in line) == (name in ("Generate", "CancelGeneration"))
    audited = [(each["level"], each["message"], each["tenant"]) for each in log_output.of("coordinator.audit")]
    assert audited == ([("warning", AUDITED[name], tenant)] if name in AUDITED else [])
    for secret in (SECRET, credential_of(tenant)):
        assert secret not in log_output.text


async def test_invalid_request_logs_the_field_without_its_value(tmp_path: Path, log_output: LogOutput) -> None:
    async with watched(tmp_path, FakeEngine(), log_level="debug") as channel:
        code, *_ = await Caller(channel, ACME).call("GetContext", [request_of("GetContext", name=SECRET)])
        assert code == StatusCode.INVALID_ARGUMENT
    (line,) = log_output.of("coordinator.auth")
    assert (line["code"], line["field"], line["message"]) == (
        "INVALID_ARGUMENT",
        "name",
        "call ended with InvalidArgument",
    )
    assert SECRET not in log_output.text


@pytest.mark.parametrize("error", [ValueError(SECRET), KeyError(SECRET)])
async def test_internal_error_logs_its_location_without_the_quoted_text(
    tmp_path: Path, log_output: LogOutput, error: Exception
) -> None:
    engine = FakeEngine()
    engine.error = error
    async with watched(tmp_path, engine, log_level="debug") as channel:
        request = request_of("Generate", text="a", sampling={"max_token_count": 1})
        code, *_ = await Caller(channel, ACME).call("Generate", [request])
        assert code == StatusCode.INTERNAL
    (line,) = log_output.of("coordinator.grpc_server.interceptors")
    assert (line["level"], line["tenant"], line["method"]) == (
        "error",
        ACME,
        "/longleaf.v1.GenerationService/Generate",
    )
    assert "in submit" in line["error"] and type(error).__name__ in line["error"]
    assert SECRET not in log_output.text


@pytest.mark.parametrize(
    ("error", "code"), [(NotFinite("token 3"), "DATA_LOSS"), (RankLost(1, "was killed"), "UNAVAILABLE")]
)
async def test_failed_generation_logs_its_error(
    tmp_path: Path, log_output: LogOutput, error: Exception, code: str
) -> None:
    engine = FakeEngine()
    engine.late_error = error  # type: ignore[assignment]
    async with watched(tmp_path, engine) as channel:
        request = request_of("Generate", text="a", sampling={"max_token_count": 1}, request_id="mine")
        await Caller(channel, ACME).call("Generate", [request])
    (line,) = log_output.of("coordinator.auth")
    assert (line["code"], line["request"]) == (code, "mine")
    assert line["message"] == f"call ended with {type(error).__name__}"


async def test_generation_of_a_disconnected_reader_is_logged_as_cancelled(
    tmp_path: Path, log_output: LogOutput
) -> None:
    engine = FakeEngine()
    engine.is_endless = True
    async with watched(tmp_path, engine) as channel:
        untyped: Any = channel
        call = untyped.unary_stream(
            "/longleaf.v1.GenerationService/Generate", request_serializer=lambda it: it.SerializeToString()
        )(request_of("Generate", text="a", sampling={"max_token_count": 1}), metadata=bearer(ACME))
        await call.read()
        call.cancel()
    (line,) = log_output.of("coordinator.auth")
    assert line["code"] == "CANCELLED"


async def test_refused_calls_are_audited(tmp_path: Path, log_output: LogOutput) -> None:
    async with watched(tmp_path, FakeEngine(), log_level="warning") as channel:
        await Caller(channel, None).call("GetCluster", [request_of("GetCluster")])
        await Caller(channel, ACME).call("Drain", [request_of("Drain")])
    lines = [(each["message"], each["code"], each.get("tenant", "")) for each in log_output.of("coordinator.audit")]
    assert lines == [("call refused", "UNAUTHENTICATED", ""), ("call refused", "PERMISSION_DENIED", ACME)]
    assert log_output.of("coordinator.auth") == []


async def test_flood_of_refused_calls_writes_few_lines(tmp_path: Path, log_output: LogOutput) -> None:
    async with watched(tmp_path, FakeEngine()) as channel:
        anonymous = Caller(channel, None)
        codes = await asyncio.gather(*(anonymous.call("GetCluster", [request_of("GetCluster")]) for _ in range(300)))
        assert {code for code, *_ in codes} == {StatusCode.UNAUTHENTICATED}
    refused = log_output.of("coordinator.audit")
    assert 2 <= len(refused) <= 20, len(refused)
    assert len(log_output.of("coordinator.auth")) <= 5


@pytest.mark.parametrize(("is_open", "telemetry"), [(True, {}), (False, {}), (True, {"log_level": "info"})])
async def test_calls_are_not_logged_by_default(is_open: bool, telemetry: dict[str, Any]) -> None:
    watching = Telemetry(TelemetryConfig(**telemetry), "fake", "local", is_open)
    observers = await watching.start()
    try:
        assert bool(observers._observers) == (not is_open or bool(telemetry))
    finally:
        await watching.stop()
        await watching.stop()
    assert logging.getLogger("coordinator").level == logging.NOTSET
