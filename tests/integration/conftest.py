"""The service over real sockets, with a scripted engine."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from longleaf.client import AsyncClient
from tests.support.service import FakeEngine, Served, serving
from tests.support.transfer_engines import empty_transfer_engine


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Served]:
    engine = FakeEngine()
    serving_it = serving(engine, tmp_path / "model", transfers=empty_transfer_engine())
    async with serving_it as (server, address), AsyncClient(address) as client:
        yield Served(engine, server, address, client)


@pytest.fixture
async def channel(service: Served) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(service.address) as channel:
        yield channel
