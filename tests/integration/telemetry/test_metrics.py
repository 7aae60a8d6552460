"""Metrics of whole services: real sockets, real processes, ranks that compute nothing."""

import asyncio
import socket
import subprocess
import sys
from contextlib import aclosing
from importlib import metadata
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from prometheus_client import CollectorRegistry, generate_latest

from coordinator.handlers.application import Application
from coordinator.service import Service
from coordinator.telemetry.observers import Observers
from coordinator.telemetry.request_metrics import RequestMetrics
from longleaf.config import EngineConfig
from longleaf.errors import StartError
from longleaf.sampling import SamplingParams
from longleaf.service_settings import ServiceConfig, TelemetryConfig
from longleaf.types import Generate
from tests.support.fakes.ranks import FakeFleet
from tests.support.measured import CONTEXT, REQUEST_ID, TEXT, measured
from tests.support.scraping import Scraped, scrape
from tests.support.service import FakeEngine, collect, ids, load_tokenizer, write_model
from tests.support.tenants import ACME, BOLT, credential_of, write_credentials

pytestmark = pytest.mark.timeout(60)


async def test_client_activity_is_counted_by_tenant(tmp_path: Path) -> None:
    async with measured(tmp_path) as found:
        await found.load()
        seen = await found.scrape()
        # each character is a token, and the template adds one token on each side
        for tenant, answers in ((ACME, 4), (BOLT, 3)):
            assert seen.value("longleaf_generated_tokens_total", tenant=tenant) == 8 * answers
            for name in (
                "time_to_first_token_seconds",
                "request_queue_seconds",
                "request_prefill_seconds",
                "request_decode_seconds",
                "e2e_request_latency_seconds",
            ):
                assert seen.value(f"longleaf_{name}_count", tenant=tenant) == answers, name
            # the context, and questions that were asked before
            assert seen.value("longleaf_cached_prompt_tokens_total", tenant=tenant) >= answers * (len(TEXT) + 2)
            assert seen.value("longleaf_prompt_tokens_total", tenant=tenant) >= 2 * answers * len(TEXT)
            calls = {"tenant": tenant, "kind": "Generate", "outcome": "ok", "code": "OK"}
            assert seen.value("longleaf_requests_total", **calls) == answers
        lost = {"tenant": ACME, "kind": "Generate", "outcome": "refused", "code": "NOT_FOUND"}
        assert seen.value("longleaf_requests_total", **lost) == 1
        strange = {"tenant": "", "kind": "Generate", "outcome": "refused", "code": "UNAUTHENTICATED"}
        assert seen.value("longleaf_requests_total", **strange) == 1
        assert seen.value("longleaf_refused_credentials_total") == 1
        assert seen.value("longleaf_contexts") == 2
        assert seen.value("longleaf_ranks") == 2
        assert [seen.value("longleaf_kv_cache_tokens", rank=rank) > 0 for rank in "01"] == [True, True]
        assert seen.value("longleaf_steps_total", kind="decode") > 0
        assert seen.value("longleaf_requests_running") == seen.value("longleaf_requests_waiting") == 0


async def test_client_texts_and_names_are_not_exported(tmp_path: Path) -> None:
    async with measured(tmp_path) as found:
        await found.load()
        text = (await found.scrape()).text
        for secret in (CONTEXT, REQUEST_ID, credential_of(ACME), *TEXT.split()):
            if len(secret) > 3:
                assert secret.lower() not in text.lower()
        labels = {"model", "tenant", "rank", "kind", "code", "outcome", "file", "le", "version"}
        assert (await found.scrape()).label_names <= labels | {"torch", "launcher"}


async def test_unauthenticated_methods_add_no_series(tmp_path: Path) -> None:
    async with measured(tmp_path) as found:
        for number in range(5):
            method: Any = found.channel.unary_unary(f"/longleaf.v1.GenerationService/Nonsense{number}")
            with pytest.raises(grpc.aio.AioRpcError):
                await method(b"")
            assert await found.generate(f"stranger{number}") is StatusCode.UNAUTHENTICATED
        calls = [labels for name, labels in (await found.scrape()).samples if name == "longleaf_requests_total"]
        expected = {"code": "UNAUTHENTICATED", "kind": "Generate", "outcome": "refused", "tenant": ""}
        assert [dict(labels) for labels in calls] == [expected]


async def test_lost_rank_is_exported(tmp_path: Path) -> None:
    async with measured(tmp_path) as found:
        await found.ingest(ACME, text="many words " * 40)
        before = await found.scrape()
        assert before.value("longleaf_ranks_lost_total") == 0
        assert found.service._control is not None
        await found.service._fleet.kill(1)
        while (seen := await found.scrape()).value("longleaf_recomputed_tokens_total") == 0:
            assert await found.generate(ACME) is StatusCode.OK
        assert seen.value("longleaf_ranks_lost_total") == 1
        assert seen.value("longleaf_epoch") > before.value("longleaf_epoch")


async def test_invalid_credentials_file_is_exported(tmp_path: Path) -> None:
    async with measured(tmp_path) as found:
        assert (await found.scrape()).value("longleaf_reload_failures_total", file="credentials") == 0
        (tmp_path / "credentials").write_text("nonsense")
        while (await found.scrape()).value("longleaf_reload_failures_total", file="credentials") == 0:
            assert await found.generate(ACME, "no-such-context") is StatusCode.NOT_FOUND
            await asyncio.sleep(0.05)  # the file is checked once a second
        assert (await found.scrape()).value("longleaf_file_unusable", file="credentials") == 1
        assert (await found.scrape()).value("longleaf_reload_failures_total", file="credentials") == 1
        write_credentials(tmp_path)
        seen = await found.scrape()
        while seen.value("longleaf_file_unusable", file="credentials"):  # without any call
            await asyncio.sleep(0.05)
            seen = await found.scrape()


async def test_metrics_are_served_before_the_model_loads_and_after_rank_loss(tmp_path: Path) -> None:
    async with measured(tmp_path) as found:
        seen = await found.scrape()
        build = {"launcher": "local", "version": "0.1.0", "torch": metadata.version("torch")}
        assert seen.value("longleaf_build_info", **build) == 1
        assert found.service._engine is not None
        found.service._engine.end_streams("over")
        seen = await found.scrape()
        assert "longleaf_ranks" not in seen.families
        assert seen.value("longleaf_ranks_lost_total") == 0
    with pytest.raises(OSError, match="refused"):
        await scrape(found.url)


def config_of(folder: Path, port: int | None) -> ServiceConfig:
    engine = EngineConfig(model=str(write_model(folder)), world_size=1)
    return ServiceConfig(engine=engine, port=0, launcher="local", telemetry=TelemetryConfig(metrics_port=port))


async def test_taken_metrics_port_prevents_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        service = Service(config_of(tmp_path, port), FakeFleet(1))
        with pytest.raises(StartError, match=f"metrics_port: cannot listen on 127.0.0.1:{port}: "):
            await service.start()
        await service.stop()


NOT_IMPORTED = """
import asyncio
import sys
from coordinator.service import Service
from coordinator.telemetry.telemetry import Telemetry
from longleaf.service_settings import TelemetryConfig

def start(port):
    asyncio.run(Telemetry(TelemetryConfig(metrics_port=port), "none", "local", True).start())

start(None)
assert not any(name.startswith("prometheus_client") for name in sys.modules)
start(0)
assert "prometheus_client" in sys.modules
"""


def test_service_without_metrics_does_not_import_prometheus() -> None:
    subprocess.run([sys.executable, "-c", NOT_IMPORTED], check=True)


async def test_answer_ended_by_a_stop_string_counts_as_completed(tmp_path: Path) -> None:
    engine, registry = FakeEngine(), CollectorRegistry()
    engine.answer, engine.is_endless = tuple(ids(each) for each in ("one", " two", " END", " three")), True
    tokenizer = load_tokenizer(write_model(tmp_path))
    observers = Observers([RequestMetrics(registry, "echo")])
    application = Application(engine, tokenizer, engine.describe, observers=observers)
    request = Generate(input="count", sampling=SamplingParams(max_tokens=100, stop=("END",)), tenant=ACME)
    async with aclosing(application.generation.run(request)) as answer:
        text, finished = await collect(answer)
    await application.close()
    assert (text, finished.reason) == ("one two ", "stop")
    seen = Scraped(generate_latest(registry).decode())
    assert seen.value("longleaf_e2e_request_latency_seconds_count", tenant=ACME) == 1
    assert seen.value("longleaf_request_decode_seconds_count", tenant=ACME) == 1
    assert seen.value("longleaf_prompt_tokens_total", tenant=ACME) == len(engine.prompts[0].token_ids)
    assert seen.value("longleaf_generated_tokens_total", tenant=ACME) == len("one two END")
