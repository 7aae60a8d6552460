"""Who waits for changes is woken by each of them, and looks no oftener."""

import asyncio
from contextlib import aclosing

import pytest

from coordinator.changes import Changes, watch
from longleaf.errors import Unavailable


async def test_all_who_wait_are_woken_by_one_change() -> None:
    changes = Changes()
    waiting = [asyncio.create_task(changes.after(0)) for _ in range(3)]
    late = asyncio.create_task(changes.after(1))
    await asyncio.sleep(0)
    changes.note()
    await asyncio.gather(*waiting)
    assert not late.done()
    changes.note()
    await late
    assert changes.count == 2


async def test_what_has_changed_already_is_not_waited_for() -> None:
    changes = Changes()
    changes.note()
    await changes.after(0)


async def test_a_pause_ends_with_the_service() -> None:
    changes = Changes()
    pause = asyncio.create_task(changes.pause(3600))
    await asyncio.sleep(0)
    changes.end()
    await pause
    await changes.pause(3600)


async def test_a_watch_shows_what_differs_and_joins_what_came_meanwhile() -> None:
    changes, seen, looks = Changes(), [1], asyncio.Semaphore(0)

    def look() -> int:
        looks.release()
        return seen[0]

    async with aclosing(watch(look, changes, 0.001)) as values:
        assert await anext(values) == 1
        following = asyncio.ensure_future(anext(values))
        for value in (2, 3, 4):  # all before the watch can look again
            seen[0] = value
            changes.note()
        assert await following == 4
        await looks.acquire(), await looks.acquire()
        assert looks.locked(), "it looked twice"
        following = asyncio.ensure_future(anext(values))
        changes.note()  # a change of something else is not shown
        await looks.acquire()
        seen[0] = 5
        changes.note()
        assert await following == 5


async def test_a_watch_ends_with_what_look_raises() -> None:
    changes, failure = Changes(), []

    def look() -> int:
        if failure:
            raise failure[0]
        return 1

    async with aclosing(watch(look, changes, 3600)) as values:
        await anext(values)
        following = asyncio.ensure_future(anext(values))
        await asyncio.sleep(0)
        failure.append(Unavailable("stopping"))
        changes.end()
        with pytest.raises(Unavailable, match="stopping"):
            await following
