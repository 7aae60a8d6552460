"""Spans of a whole service as a collector receives them, and a collector that is unreachable."""

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from longleaf.client import Client
from longleaf.launch import LISTENING
from tests.support import forked
from tests.support.command_line import end

TEXT = "Kestrelmoor"


class Collector(TraceServiceServicer):
    """Stores the received spans."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()

    def Export(self, request: Any, context: object) -> ExportTraceServiceResponse:
        for resource in request.resource_spans:
            attributes = resource.resource.attributes
            self.services |= {each.value.string_value for each in attributes if each.key == "service.name"}
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return ExportTraceServiceResponse()


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    """A collector and its address."""
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def serve_and_ask(checkpoint: Path, collector: str) -> str:
    """Runs a service for one answer; returns its standard error."""
    options = ("--model", str(checkpoint), "--world-size", "1", "--launcher", "local", "--kv-bytes", "8000000")
    process = forked.popen(
        [*forked.CLI, "serve", *options, "--port", "0", "--model-name", "small", "--traces"],
        env=os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{collector}", "OTEL_BSP_SCHEDULE_DELAY": "60000"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(LISTENING)
        with Client(line.removeprefix(LISTENING).strip()) as client:
            assert list(client.generate(TEXT, max_tokens=3, ignore_end_token=True))
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0
        return errors
    finally:
        end(process)
        process.communicate()


def test_collector_receives_all_spans_before_the_service_exits(checkpoint: Path) -> None:
    with collecting() as (collector, address):
        serve_and_ask(checkpoint, address)
    names = [span.name for span in collector.spans if not span.name.endswith("/GetCluster")]
    assert sorted(names) == [
        "decode",
        "longleaf.v1.GenerationService/Generate",
        "prefill",
        "queue",
        "text_completion small",
    ]
    (whole,) = [span for span in collector.spans if span.name == "text_completion small"]
    reported = {each.key: each.value for each in whole.attributes}
    assert reported["gen_ai.usage.output_tokens"].int_value == 3
    assert reported["gen_ai.response.finish_reasons"].array_value.values[0].string_value == "length"
    assert collector.services == {"longleaf"}
    assert TEXT not in "".join(map(str, collector.spans))


@pytest.mark.extended
@pytest.mark.timeout(120)
def test_unreachable_collector_is_logged_once_and_stops_nothing(checkpoint: Path) -> None:
    with collecting() as (_, address):
        pass
    errors = serve_and_ask(checkpoint, address)
    lines = [line for line in errors.splitlines() if line.startswith("traces: ")]
    assert len(lines) == 1, errors
    assert "UNAVAILABLE" in lines[0]
