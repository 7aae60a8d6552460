"""Who waits for changes is woken by each of them, and looks no oftener."""

import asyncio
from contextlib import aclosing

import pytest

from coordinator.change_feed import ChangeCounter, CoalescingWatch
from longleaf.errors import ResourceExhausted, Unavailable

pytestmark = pytest.mark.timeout(60)


async def test_all_who_wait_are_woken_by_one_change() -> None:
    changes = ChangeCounter()
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
    changes = ChangeCounter()
    changes.note()
    await changes.after(0)


async def test_a_pause_ends_with_the_service() -> None:
    changes = ChangeCounter()
    pause = asyncio.create_task(changes.pause(3600))
    await asyncio.sleep(0)
    changes.end()
    await pause
    await changes.pause(3600)


async def test_a_watch_shows_what_differs_and_joins_what_came_meanwhile() -> None:
    changes, seen, looks = ChangeCounter(), [1], asyncio.Semaphore(0)

    def look() -> int:
        looks.release()
        return seen[0]

    async with aclosing(CoalescingWatch(look, changes).values(0.001)) as values:
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
    changes, failure = ChangeCounter(), []

    def look() -> int:
        if failure:
            raise failure[0]
        return 1

    async with aclosing(CoalescingWatch(look, changes).values(3600)) as values:
        await anext(values)
        following = asyncio.ensure_future(anext(values))
        await asyncio.sleep(0)
        failure.append(Unavailable("stopping"))
        changes.end()
        with pytest.raises(Unavailable, match="stopping"):
            await following


async def test_one_look_serves_all_who_watch() -> None:
    changes, looks, watchers = ChangeCounter(), [0], 100

    def look() -> int:
        looks[0] += 1
        return changes.count

    watch = CoalescingWatch(look, changes, spacing=0.00001)
    values = [watch.values(0.001) for _ in range(watchers)]
    assert await asyncio.gather(*map(anext, values)) == [0] * watchers
    following = [asyncio.ensure_future(anext(value)) for value in values]
    changes.note()
    assert await asyncio.gather(*following) == [1] * watchers
    assert looks == [2], "once at the start, and once after the change"
    for value in values:
        await value.aclose()


async def test_the_more_watch_the_less_often_each_is_told() -> None:
    now, changes = [0.0], ChangeCounter()
    watch = CoalescingWatch(lambda: changes.count, changes, spacing=3600.0, clock=lambda: now[0])
    first, second = watch.values(0.001), watch.values(0.001)
    assert await anext(first) == 0
    changes.note()
    now[0] = 2.5 * 3600
    assert await anext(second) == 1, "two of them are told once in two hours"
    changes.note()
    third = watch.values(0.001)
    now[0] += 3.5 * 3600
    assert await anext(third) == 2
    changes.note()
    fourth = watch.values(0.001)
    now[0] += 3.5 * 3600
    assert await anext(fourth) == 2, "four of them are told once in four hours"
    for values in (first, second, third, fourth):
        await values.aclose()


async def test_those_who_watch_have_a_limit() -> None:
    watch = CoalescingWatch(lambda: 1, ChangeCounter(), max_watchers=1)
    async with aclosing(watch.values(1.0)) as first:
        assert await anext(first) == 1
        with pytest.raises(ResourceExhausted, match="watchers: 1 watches are open") as caught:
            await anext(watch.values(1.0))
        assert caught.value.retry_seconds
    async with aclosing(watch.values(1.0)) as second:
        assert await anext(second) == 1
