"""A gateway over real sockets, in front of a service with a scripted engine."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from longleaf.client import AsyncClient
from tests.support.chat_templates import HERMES
from tests.support.gateways import opened
from tests.support.scripted_answers import Scripted, scripted
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


@pytest.fixture
async def hermes(tmp_path: Path) -> AsyncIterator[Scripted]:
    async with scripted(tmp_path / "model", HERMES) as found:
        yield found


@pytest.fixture
async def http(hermes: Scripted) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of the gateway of `hermes`."""
    async with httpx2.AsyncClient(base_url=hermes.url, timeout=60) as client:
        yield client
