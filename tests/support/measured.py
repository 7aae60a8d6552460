"""A whole service with metrics, of two tenants and an operator, and calls that leave something in each of them."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from coordinator.cluster.local_fleet import LocalFleet
from coordinator.service import Service
from longleaf.config import DataConfig, EngineConfig
from longleaf.service_settings import SecurityConfig, ServiceConfig, TelemetryConfig
from tests.support.fakes.workers import EchoMain
from tests.support.scraping import Scraped, scrape
from tests.support.service import write_model
from tests.support.tenants import ACME, BOLT, OPS, Caller, credentials, request_of

CONTEXT, REQUEST_ID, TEXT = "war-and-peace", "who-is-pierre", "Natasha danced at the ball until the morning"
"""Values that must not appear in metrics."""


@dataclass(frozen=True)
class Measured:
    """A service that runs."""

    service: Service
    channel: grpc.aio.Channel
    url: str
    """URL of its metrics."""

    async def scrape(self) -> Scraped:
        return await scrape(self.url)

    async def call(self, tenant: str | None, name: str, *requests: dict[str, Any]) -> grpc.StatusCode:
        code, _, _ = await Caller(self.channel, tenant).call(name, [request_of(name, **fields) for fields in requests])
        return code

    async def ingest(self, tenant: str, name: str = CONTEXT, text: str = TEXT) -> grpc.StatusCode:
        config = {"config": {"name": f"contexts/{name}"}}
        return await self.call(tenant, "IngestContext", config, {"text": text.encode()})

    async def generate(self, tenant: str | None, name: str = CONTEXT, count: int = 8, **more: Any) -> grpc.StatusCode:
        sampling = {"max_token_count": count, "ignore_end_token": True}
        request = {"context": f"contexts/{name}", "text": TEXT, "sampling": sampling, **more}
        return await self.call(tenant, "Generate", request)

    async def load(self, name: str = CONTEXT) -> None:
        """Calls of all kinds, that end well and otherwise, about a context of this name."""
        ok = grpc.StatusCode.OK
        for tenant in (ACME, BOLT):
            assert await self.ingest(tenant, name) is ok
            for _ in range(3):
                assert await self.generate(tenant, name) is ok
        assert await self.generate(ACME, name, request_id=REQUEST_ID) is ok
        assert await self.generate(ACME, "no-such-context") is grpc.StatusCode.NOT_FOUND
        assert await self.generate(None) is grpc.StatusCode.UNAUTHENTICATED
        assert await self.call(OPS, "GetCluster", {}) is ok


@asynccontextmanager
async def measured(folder: Path, model_name: str = "echo") -> AsyncGenerator[Measured, None]:
    """The service on two ranks that compute nothing."""
    credentials(folder)
    config = ServiceConfig(
        engine=EngineConfig(model=str(write_model(folder / "model")), world_size=2, block_size=16, chunk_size=64),
        port=0,
        launcher="local",
        model_name=model_name,
        data=DataConfig(data_dir=str(folder / "data"), snapshots="off"),
        security=SecurityConfig(credentials=str(folder / "credentials")),
        telemetry=TelemetryConfig(metrics_port=0),
    )
    service = Service(config, LocalFleet(EchoMain()))
    try:
        port = await service.start()
        [url] = [note.removeprefix("metrics are at ") for note in service.notes if note.startswith("metrics are at ")]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Measured(service, channel, url)
    finally:
        await service.stop()
