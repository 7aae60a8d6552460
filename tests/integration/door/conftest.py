"""A gateway over real sockets, in front of a service with a scripted engine."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from longleaf.client import AsyncClient
from tests.support.doors import opened
from tests.support.houses import empty_house
from tests.support.service import FakeEngine, Served, ids, serving


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Served]:
    engine = FakeEngine()
    engine.answer = (ids("Grü"), ids("ße"))
    serving_it = serving(engine, tmp_path / "model", house=empty_house())
    async with serving_it as (server, address), AsyncClient(address) as client:
        yield Served(engine, server, address, client)


@pytest.fixture
async def url(service: Served) -> AsyncIterator[str]:
    async with opened(service.address) as url:
        yield url
