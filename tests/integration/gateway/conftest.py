"""A gateway over real sockets, in front of a service with a scripted engine."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from longleaf.client import AsyncClient
from tests.support.gateways import opened
from tests.support.service import FakeEngine, Served, ids, serving
from tests.support.transfer_engines import empty_transfer_engine


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Served]:
    engine = FakeEngine()
    engine.answer = (ids("Grü"), ids("ße"))
    serving_it = serving(engine, tmp_path / "model", transfers=empty_transfer_engine())
    async with serving_it as (server, address), AsyncClient(address) as client:
        yield Served(engine, server, address, client)


@pytest.fixture
async def url(service: Served) -> AsyncIterator[str]:
    async with opened(service.address) as url:
        yield url
