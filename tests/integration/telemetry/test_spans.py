"""The spans of calls with every kind of end, through a real server."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, format_trace_id
from opentelemetry.trace import StatusCode as SpanStatus

from coordinator.telemetry.access_log import AccessLog
from coordinator.telemetry.observers import Observers
from coordinator.telemetry.otlp_tracing import OtlpTraces
from longleaf.errors import NotFinite
from tests.support.open_calls import OpenCalls
from tests.support.service import FakeEngine, ids, serving
from tests.support.tenants import ACME, Caller, bearer, credential_of, credentials, request_of

SECRET = "the moby text"
GENERATE = "/longleaf.v1.GenerationService/Generate"
SPAN = GENERATE.lstrip("/")
WHOLE = "text_completion lookup"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLING = {"max_token_count": 1}


@asynccontextmanager
async def traced(folder: Path, engine: FakeEngine) -> AsyncGenerator[tuple[grpc.aio.Channel, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traces = OtlpTraces("lookup", lambda: provider)
    await traces.start()
    calls = OpenCalls()
    options = {"authenticator": credentials(folder), "observers": Observers((calls, AccessLog(), traces))}
    try:
        async with (
            serving(engine, folder / "model", **options) as (_, address),
            grpc.aio.insecure_channel(address) as channel,
        ):
            yield channel, exporter
            await calls.wait()
    finally:
        await traces.stop()


def generate(channel: grpc.aio.Channel, *metadata: tuple[str, str], **fields: Any) -> Any:
    untyped: Any = channel
    stub = untyped.unary_stream(GENERATE, request_serializer=lambda message: message.SerializeToString())
    request = request_of("Generate", text=SECRET, sampling=SAMPLING, **fields)
    return stub(request, metadata=(*bearer(ACME), *metadata))


async def code_of(call: Any) -> StatusCode:
    """The status of a call that is read to its end."""
    with suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    return await call.code()


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    spans = exporter.get_finished_spans()
    found = {span.name: span for span in spans}
    assert len(found) == len(spans)
    for span in spans:
        answer = span.to_json()
        assert SECRET not in answer and credential_of(ACME) not in answer
    return found


def parent_of(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


@pytest.mark.parametrize(
    ("traceparent", "goes_on"),
    [(f"00-{TRACE}-{PARENT}-01", True), (f"00-{TRACE}-{'0' * 16}-01", False), ("nonsense", False), (None, False)],
)
async def test_generation_span_belongs_to_its_call_and_the_trace_of_the_client(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, traceparent: str | None, goes_on: bool
) -> None:
    caplog.set_level("INFO", "coordinator.auth")
    engine = FakeEngine()
    engine.answer = (ids("hi"),)
    async with traced(tmp_path, engine) as (channel, exporter):
        headers = [] if traceparent is None else [("traceparent", traceparent)]
        assert await code_of(generate(channel, *headers, request_id="mine")) == StatusCode.OK
    spans = by_name(exporter)
    assert set(spans) == {SPAN, WHOLE, "queue", "prefill", "decode"}
    rpc, whole = spans[SPAN], spans[WHOLE]
    trace = format_trace_id(rpc.get_span_context().trace_id)
    assert (trace == TRACE) == goes_on
    assert {format_trace_id(span.get_span_context().trace_id) for span in spans.values()} == {trace}
    assert (f"{parent_of(rpc):016x}" == PARENT) if goes_on else (rpc.parent is None)
    assert parent_of(whole) == rpc.get_span_context().span_id
    assert {parent_of(spans[name]) for name in ("queue", "prefill", "decode")} == {whole.get_span_context().span_id}
    assert (rpc.kind, rpc.status.status_code) == (SpanKind.SERVER, SpanStatus.UNSET)
    assert dict(rpc.attributes or {}) == {
        "rpc.system": "grpc",
        "rpc.service": "longleaf.v1.GenerationService",
        "rpc.method": "Generate",
        "rpc.grpc.status_code": 0,
        "client.address": "127.0.0.1",
        "longleaf.tenant": ACME,
        "longleaf.request": "mine",
    }
    (line,) = [record for record in caplog.records if record.name == "coordinator.auth"]
    assert line.trace == trace  # type: ignore[attr-defined]


async def test_cancelled_call_ends_all_its_spans_as_cancelled(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.is_endless = True
    async with traced(tmp_path, engine) as (channel, exporter):
        call = generate(channel)
        await call.read()
        call.cancel()
    spans = by_name(exporter)
    assert set(spans) == {SPAN, WHOLE, "queue", "prefill"}
    for name in (SPAN, WHOLE, "prefill"):
        status = spans[name].status
        assert (status.status_code, status.description) == (SpanStatus.ERROR, "cancelled"), name
    assert (spans[SPAN].attributes or {})["rpc.grpc.status_code"] == StatusCode.CANCELLED.value[0]
    assert all(span.end_time for span in spans.values())


async def test_failed_call_ends_all_its_spans_and_names_the_error(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.late_error = NotFinite(SECRET)
    async with traced(tmp_path, engine) as (channel, exporter):
        assert await code_of(generate(channel)) == StatusCode.DATA_LOSS
    spans = by_name(exporter)
    assert set(spans) == {SPAN, WHOLE, "queue", "prefill"}
    for name in (SPAN, WHOLE, "prefill"):
        status = spans[name].status
        assert (status.status_code, status.description) == (SpanStatus.ERROR, "NotFinite"), name
        assert (spans[name].attributes or {})["error.type"] == "NotFinite"


async def test_refused_caller_has_a_span_without_a_tenant(tmp_path: Path) -> None:
    async with traced(tmp_path, FakeEngine()) as (channel, exporter):
        await Caller(channel, None).call("GetCluster", [request_of("GetCluster")])
    (span,) = exporter.get_finished_spans()
    assert (span.status.description, span.status.status_code) == ("Unauthenticated", SpanStatus.ERROR)
    assert "longleaf.tenant" not in (span.attributes or {})


async def test_retained_generation_continues_without_its_call_and_keeps_its_parent_span(tmp_path: Path) -> None:
    """The first reader disconnects. The span keeps the parent of the first call and covers the work for the second
    one."""
    engine = FakeEngine()
    engine.is_endless = True
    async with traced(tmp_path, engine) as (channel, exporter):
        first = generate(channel, request_id="held", resume_duration={"seconds": 60})
        await first.read()
        first.cancel()
        cancel = [request_of("CancelGeneration", request_id="held")]
        code, *_ = await Caller(channel, ACME).call("CancelGeneration", cancel)
        assert code == StatusCode.OK
    spans = by_name(exporter)
    assert parent_of(spans[WHOLE]) == spans[SPAN].get_span_context().span_id
    assert spans[WHOLE].status.description == "cancelled"
    assert (spans["longleaf.v1.GenerationService/CancelGeneration"].attributes or {})["longleaf.request"] == "held"
