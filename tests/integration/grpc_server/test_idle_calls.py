"""Calls without messages for a long time."""

import asyncio
from pathlib import Path

import pytest

from longleaf.client import AsyncClient, Retries
from longleaf.types import Started
from tests.support.service import FakeEngine, serving

SILENT_SECONDS = 200.0
"""Clients ping every 30 s; a service ends all calls of a client that seems to flood it."""


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_call_without_messages_for_minutes_continues(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.is_endless = True
    async with (
        serving(engine, tmp_path / "model") as (_, address),
        AsyncClient(address, retries=Retries(limit=0)) as client,
    ):
        events = client.generate("Who?", max_tokens=4)
        assert isinstance(await anext(events), Started)
        await anext(events)
        going = asyncio.ensure_future(anext(events))
        await asyncio.wait([going], timeout=SILENT_SECONDS)
        assert not going.done(), going.exception()
        going.cancel()
        await asyncio.wait([going])
