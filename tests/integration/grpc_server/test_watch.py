"""Watching the cluster over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from longleaf.client import AsyncClient
from longleaf.errors import InvalidArgument, Unavailable
from longleaf.types import Cluster
from tests.support.fuzz.target import fuzzed
from tests.support.service import Served

pytestmark = pytest.mark.timeout(60)


async def test_cluster_state_is_sent_initially_and_after_each_change(service: Served) -> None:
    async with aclosing(service.client.watch_cluster(min_interval=0.01)) as changes:
        assert (await anext(changes)) == service.engine.describe()
        service.engine.running = 7
        service.engine.changes.note()
        assert (await anext(changes)).running == 7


async def test_watch_ends_with_the_service(service: Served) -> None:
    async with aclosing(service.client.watch_cluster(min_interval=3600)) as changes:
        await anext(changes)
        service.engine.error = Unavailable("the service is stopping")
        service.engine.changes.end()
        with pytest.raises(Unavailable, match="the service is stopping"):
            await anext(changes)


@pytest.mark.parametrize("interval", [0.0, -1.0, 3601.0, float("nan"), float("inf")])
async def test_invalid_intervals_are_refused(service: Served, interval: float) -> None:
    with pytest.raises(InvalidArgument, match="min_interval_duration"):
        await anext(service.client.watch_cluster(min_interval=interval))


async def test_engine_changes_are_reported(tmp_path: Path) -> None:
    async with (
        fuzzed(tmp_path) as target,
        AsyncClient(target.address) as client,
        aclosing(client.watch_cluster(min_interval=0.01)) as changes,
    ):
        assert sum(worker.tokens for worker in (await anext(changes)).workers) == 0
        watching = asyncio.create_task(_wait_stored_tokens(changes, 20))
        await client.ingest("moby", tuple(range(20)))
        await watching
        watching = asyncio.create_task(_wait_stored_tokens(changes, 0))
        await client.delete_context("moby")
        await watching


async def _wait_stored_tokens(changes: AsyncIterator[Cluster], tokens: int) -> None:
    async for cluster in changes:
        if sum(worker.tokens for worker in cluster.workers) == tokens and not cluster.running:
            return


async def test_all_watchers_share_one_description(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[int] = []
    cluster = service.engine.cluster

    def count() -> object:
        described.append(1)
        return cluster()

    monkeypatch.setattr(service.engine, "cluster", count)
    watching = [service.client.watch_cluster(min_interval=0.01) for _ in range(20)]
    assert {seen.running for seen in await asyncio.gather(*map(anext, watching))} == {3}
    service.engine.running = 7
    service.engine.changes.note()
    assert {seen.running for seen in await asyncio.gather(*map(anext, watching))} == {7}
    assert len(described) < len(watching)
    for changes in watching:
        await changes.aclose()
