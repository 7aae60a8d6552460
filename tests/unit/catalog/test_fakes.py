"""The catalog in memory does what tests need beyond what a catalog does."""

import asyncio

import pytest

from coordinator.catalog.fakes import FakeCatalog
from coordinator.catalog.records import Change
from longleaf.errors import StorageUnavailable, Unavailable
from tests.support.catalog import document


async def test_a_failing_commit_leaves_nothing() -> None:
    catalog = FakeCatalog()
    catalog.failures.append(StorageUnavailable("the disk is full"))
    with pytest.raises(StorageUnavailable, match="the disk is full"):
        await catalog.commit(document("a", 0))
    assert not catalog.changes and not catalog.kept.contexts
    await catalog.commit(document("a", 0))
    assert [each.id for each in (await catalog.load()).contexts] == ["a"]


async def test_what_is_held_back_is_done_in_the_order_of_the_calls_also_when_nobody_waits() -> None:
    catalog = FakeCatalog()
    catalog.hold()
    calls = [asyncio.create_task(catalog.commit(document("a", number))) for number in range(3)]
    await asyncio.sleep(0)
    calls[0].cancel()
    await asyncio.sleep(0)
    assert not catalog.changes and not any(call.done() for call in calls[1:])
    catalog.release()
    assert [committed.segments for committed in await asyncio.gather(*calls[1:])] == [(0,), (1,)]
    assert [change.segments[0].id for change in catalog.changes] == [0, 1, 2]
    await catalog.close()
    with pytest.raises(Unavailable, match="stopping"):
        await catalog.commit(Change())
