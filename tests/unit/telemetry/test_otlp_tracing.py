"""Spans of generations with every kind of end, and with an exporter that is unavailable."""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from coordinator.engine_messages import Admitted, Ended, Event, Tokens
from coordinator.telemetry.observers import CallRecord
from coordinator.telemetry.otlp_errors import ExportErrors
from coordinator.telemetry.otlp_tracing import OtlpTraces, provider_of_environment
from coordinator.telemetry.telemetry import Telemetry
from longleaf.errors import InvalidArgument, NotFinite
from longleaf.service_settings import TelemetryConfig
from longleaf.types import Progress, Recovering
from tests.support.service import tokens

OTHER = logging.getLogger("opentelemetry.exporter.otlp")


def memory(exporter: SpanExporter) -> TracerProvider:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


def ended(sample: int = 0, reason: str = "length", completion: int = 2) -> Ended:
    return Ended(reason, 10, 4, completion, 0.1, 0.2, 0.3, sample)  # type: ignore[arg-type]


async def seen(events: Sequence[Event], error: BaseException | None = None) -> dict[str, list[ReadableSpan]]:
    """The spans of a generation, by name."""
    exporter = InMemorySpanExporter()
    traces = OtlpTraces("lookup", lambda: memory(exporter))
    await traces.start()
    with nullcontext() if error is None else pytest.raises(type(error)), traces.generation("acme/one", "acme") as emit:
        for event in events:
            emit(event)
        if error is not None:
            raise error
    await traces.stop()
    spans: dict[str, list[ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        spans.setdefault(span.name, []).append(span)
    return spans


BEGIN = [Admitted(10, 4, 2), Admitted(10, 4, 1), Admitted(10, 4), Progress(6, 10), Progress(10, 10)]


async def test_generation_is_a_span_with_its_phases() -> None:
    spans = await seen([*BEGIN, Tokens(0, tokens((1,))), Tokens(1, tokens((2,)), 0, (), 7, 1), ended()])
    (whole,) = spans.pop("text_completion lookup")
    assert {name: len(found) for name, found in spans.items()} == {"queue": 1, "prefill": 1, "decode": 1}
    queue, prefill, decode = (spans[name][0] for name in ("queue", "prefill", "decode"))
    assert [span.parent for span in (queue, prefill, decode)] == [whole.get_span_context()] * 3
    assert whole.start_time <= queue.start_time <= queue.end_time <= prefill.start_time  # type: ignore[operator]
    assert prefill.end_time <= decode.start_time <= decode.end_time <= whole.end_time  # type: ignore[operator]
    assert [dict(event.attributes or {}) for event in prefill.events] == [
        {"longleaf.tokens": 6, "longleaf.of": 10},
        {"longleaf.tokens": 10, "longleaf.of": 10},
    ]
    assert dict(whole.attributes or {}) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "longleaf",
        "gen_ai.request.model": "lookup",
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.response.finish_reasons": ("length",),
        "longleaf.tenant": "acme",
        "longleaf.request": "one",
        "longleaf.cached_tokens": 4,
        "longleaf.drafted_tokens": 7,
        "longleaf.accepted_tokens": 1,
    }
    assert whole.status.status_code == StatusCode.UNSET


async def test_preempted_generation_has_further_queue_and_prefill_spans() -> None:
    again = [Admitted(10, 4, 1), Admitted(10, 4), Recovering(3, 0, 3), Tokens(1, tokens((2,))), ended()]
    spans = await seen([*BEGIN, Tokens(0, tokens((1,))), *again])
    assert {name: len(found) for name, found in spans.items()} == {
        "queue": 2,
        "prefill": 2,
        "decode": 2,
        "text_completion lookup": 1,
    }
    assert [event.name for event in spans["prefill"][1].events] == ["recovering"]


async def test_each_sample_has_a_finish_reason() -> None:
    """The engine is not notified of a sample that a stop string ends."""
    events = [*BEGIN, *(Tokens(0, tokens((5,)), sample) for sample in (2, 1, 0)), ended(2), ended(0, "end_token")]
    (whole,) = (await seen(events))["text_completion lookup"]
    assert whole.attributes is not None
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("stop", "stop", "length")
    assert whole.attributes["gen_ai.usage.output_tokens"] == 5


async def test_work_after_a_call_is_not_part_of_its_span() -> None:
    exporter = InMemorySpanExporter()
    traces = OtlpTraces("lookup", lambda: memory(exporter))
    await traces.start()
    for name in ("one", "two"):
        with traces.call(CallRecord(f"/longleaf.v1.X/{name}", "ipv4:1.1.1.1:1", {}, code="OK")):
            pass
    with traces.generation("held", "default"):
        pass
    await traces.stop()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    names = ("longleaf.v1.X/one", "longleaf.v1.X/two", "text_completion lookup")
    assert [spans[name].parent for name in names] == [None] * 3


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (asyncio.CancelledError(), "cancelled"),
        (GeneratorExit(), "cancelled"),
        (NotFinite("a secret"), "NotFinite"),
        (KeyError("a secret"), "KeyError"),
    ],
)
@pytest.mark.parametrize("count", [0, 1, 3, 5])
async def test_all_spans_end_with_any_end_of_a_generation(error: BaseException, reason: str, count: int) -> None:
    spans = await seen(BEGIN[:count], error)
    (whole,) = spans.pop("text_completion lookup")
    last = max((span for found in spans.values() for span in found), key=lambda span: span.start_time or 0)
    for span in (whole, last):
        assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, reason)
        assert "secret" not in span.to_json()
        assert not [event for event in span.events if event.name == "exception"]


async def test_setting_without_the_extra_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "coordinator.telemetry.otlp_tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    watching = Telemetry(TelemetryConfig(traces=True), "lookup", "local", True)
    try:
        with pytest.raises(InvalidArgument, match=r"traces: .*pip install 'longleaf\[otel\]'"):
            await watching.start()
    finally:
        await watching.stop()


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_EXPORTER_OTLP_TIMEOUT", "secret"), ("OTEL_EXPORTER_OTLP_COMPRESSION", "secret")]
)
async def test_invalid_environment_variable_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgument) as refused:
        provider_of_environment()
    assert (refused.value.field, "secret" in str(refused.value)) == ("traces", False)


@pytest.mark.parametrize(("given", "wanted"), [(None, "longleaf"), ("mine", "mine")])
def test_service_name_is_taken_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, given: str | None, wanted: str
) -> None:
    if given is not None:
        monkeypatch.setenv("OTEL_SERVICE_NAME", given)
    provider = provider_of_environment()
    provider.shutdown()
    assert provider.resource.attributes["service.name"] == wanted


class BlockingExporter(SpanExporter):
    """Accepts spans and does not return until it is released."""

    def __init__(self) -> None:
        self.is_called, self.may_answer = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.is_called.set()
        self.may_answer.wait(60)
        return SpanExportResult.SUCCESS


async def test_unresponsive_collector_delays_the_end_by_a_limited_time() -> None:
    exporter = BlockingExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    traces = OtlpTraces("lookup", lambda: provider, stop_seconds=0.2)
    await traces.start()
    with traces.generation("one", "default"):
        pass
    began = time.monotonic()
    try:
        await traces.stop()
        assert 0.2 <= time.monotonic() - began < 10
        assert exporter.is_called.is_set()
    finally:
        exporter.may_answer.set()


async def test_pending_spans_are_sent_at_the_end() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1e6))
    traces = OtlpTraces("lookup", lambda: provider)
    await traces.start()
    with traces.generation("one", "default"):
        pass
    assert not exporter.get_finished_spans()
    await traces.stop()
    assert len(exporter.get_finished_spans()) == 2


def test_library_warnings_are_limited_to_one_per_minute(caplog: pytest.LogCaptureFixture) -> None:
    times = [50.0, *[51.0] * 1000, 109.9, 110.1]
    errors = ExportErrors(iter(times).__next__)
    errors.set_up()
    try:
        for _ in times:
            OTHER.error("failed to export to %s", "host:4317")
    finally:
        errors.take_down()
    assert [record.getMessage() for record in caplog.records] == [
        "traces: failed to export to host:4317",
        "traces: failed to export to host:4317 (1,001 more since the last line)",
    ]
    assert {record.name for record in caplog.records} == {"coordinator.telemetry.otlp_errors"}
    assert logging.getLogger("opentelemetry").propagate


async def test_invalid_headers_are_not_printed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "a secret")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    traces = OtlpTraces("lookup")
    try:
        await traces.start()
    finally:
        await traces.stop()
    assert [record.getMessage() for record in caplog.records] == ["traces: opentelemetry.util.re"]


@pytest.mark.parametrize("endpoint", ["garbage", "http://", "http://a b:1", "https://collector:port", "http://x:99999"])
def test_invalid_collector_address_is_refused(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    with pytest.raises(InvalidArgument, match="OTEL_EXPORTER_OTLP_ENDPOINT must be http://HOST:PORT"):
        provider_of_environment()


@pytest.mark.parametrize("endpoint", ["", "http://[::1]:4317", "https://collector", "collector:4317", "unix:/run/otel"])
def test_valid_collector_addresses_are_accepted(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    provider_of_environment().shutdown()
