"""Spans of calls and generations, sent over OTLP. Requires the extra `otel`, so it is imported only on demand."""

import asyncio
import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from urllib.parse import urlsplit

import grpc
from opentelemetry import context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    NoOpTracer,
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from coordinator.telemetry.generation_spans import CANCELLED, GenerationSpans
from coordinator.telemetry.observers import CallRecord, EventSink
from coordinator.telemetry.otlp_errors import ExportErrors
from longleaf.errors import InvalidArgument
from longleaf.tenants import name_of

STOP_SECONDS = 5.0
"""Seconds that shutdown may wait for a collector that does not respond."""
UNNAMED = "unknown_service"
"""Start of the default name that the library gives a service."""


def _is_address(endpoint: str) -> bool:
    """Whether the library can send to the endpoint. With an invalid one, it would retry forever without a message. gRPC
    checks endpoints without http or https, such as `unix:`."""
    try:
        parts = urlsplit(endpoint)
        is_web = parts.scheme in ("http", "https")
        is_one = bool(parts.hostname) and parts.port != 0 if is_web else ":" in endpoint
    except ValueError:
        return False
    return not endpoint or (is_one and " " not in endpoint)


def provider_of_environment() -> TracerProvider:
    """Creates the tracer provider that the OTEL_* variables configure. Raises InvalidArgument if they are invalid."""
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        if not _is_address(os.environ.get(name, "")):
            raise InvalidArgument("traces", f"{name} must be http://HOST:PORT or https://HOST:PORT")
    try:
        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith(UNNAMED):
            resource = resource.merge(Resource({SERVICE_NAME: "longleaf"}))
        made = TracerProvider(resource=resource, shutdown_on_exit=False)
        made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    except Exception as error:  # the message is omitted, because it may quote a header
        raise InvalidArgument("traces", f"invalid OTEL_* variable: {type(error).__name__}") from None
    return made


class OtlpTraces:
    """An observer that records a span of each call and generation, for the model that clients see as `model`.
    `make_provider` raises InvalidArgument."""

    def __init__(
        self,
        model: str,
        make_provider: Callable[[], TracerProvider] = provider_of_environment,
        stop_seconds: float = STOP_SECONDS,
    ) -> None:
        self._model, self._make_provider, self._stop_seconds = model, make_provider, stop_seconds
        self._provider: TracerProvider | None = None
        self._tracer: Tracer = NoOpTracer()
        self._errors = ExportErrors()
        self._propagator = TraceContextTextMapPropagator()

    async def start(self) -> None:
        """Raises InvalidArgument."""
        self._errors.set_up()
        self._provider = self._make_provider()
        self._tracer = self._provider.get_tracer("longleaf")

    async def stop(self) -> None:
        """Sends the remaining spans, and drops those that are not sent within the time limit."""
        if self._provider is not None:
            ending = threading.Thread(target=self._provider.shutdown, name="end-of-traces", daemon=True)
            ending.start()
            await asyncio.to_thread(ending.join, self._stop_seconds)
        self._errors.take_down()

    @contextmanager
    def call(self, record: CallRecord) -> Generator[None, None, None]:
        """Records the span of a call. If the client sent a trace context, the span joins its trace."""
        span = self._tracer.start_span(
            record.method.lstrip("/"),
            self._propagator.extract(record.metadata, context.Context()),
            kind=SpanKind.SERVER,
            attributes=_attributes_of(record),
        )
        if (about := span.get_span_context()).is_valid:
            record.trace = format_trace_id(about.trace_id)
        inside = context.attach(set_span_in_context(span))
        try:
            yield
        finally:
            context.detach(inside)
            _end(span, record)

    @contextmanager
    def generation(self, request_id: str, tenant: str) -> Generator[EventSink, None, None]:
        """Records the spans of a generation, as children of the call that began it."""
        spans = GenerationSpans(self._tracer, self._model, request_id, tenant)
        try:
            yield spans.take
        except BaseException as error:
            is_cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit)
            spans.fail(CANCELLED if is_cancelled else type(error).__name__)
            raise
        spans.finish()


def _attributes_of(record: CallRecord) -> dict[str, str]:
    service, _, method = record.method.strip("/").partition("/")
    host = record.host.partition(":")[2].strip("[]")
    return {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method, "client.address": host}


def _end(span: Span, record: CallRecord) -> None:
    for name, value in (
        ("longleaf.tenant", record.tenant),
        ("longleaf.request", name_of(record.request_id)),
        ("longleaf.context", name_of(record.context)),
    ):
        if value:
            span.set_attribute(name, value)
    if record.code:
        span.set_attribute("rpc.grpc.status_code", grpc.StatusCode[record.code].value[0])
    if record.code not in ("", "OK"):
        reason = CANCELLED if record.code == "CANCELLED" else record.error or record.code
        span.set_attribute("error.type", reason)
        span.set_status(Status(StatusCode.ERROR, reason))
    span.end()
