"""Waiters for changes: each change notifies them, and watched values are read only once per change."""

import asyncio
from contextlib import aclosing

import pytest

from coordinator.change_feed import ChangeCounter, CoalescingWatch
from longleaf.errors import ResourceExhausted, Unavailable

pytestmark = pytest.mark.timeout(60)


async def test_one_change_notifies_all_waiters() -> None:
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


async def test_past_change_is_not_waited_for() -> None:
    changes = ChangeCounter()
    changes.note()
    await changes.after(0)


async def test_pause_ends_with_the_service() -> None:
    changes = ChangeCounter()
    pause = asyncio.create_task(changes.pause(3600))
    await asyncio.sleep(0)
    changes.end()
    await pause
    await changes.pause(3600)


async def test_watch_yields_changed_values_and_coalesces() -> None:
    changes, seen, reads = ChangeCounter(), [1], asyncio.Semaphore(0)

    def read_value() -> int:
        reads.release()
        return seen[0]

    async with aclosing(CoalescingWatch(read_value, changes).values(0.001)) as values:
        assert await anext(values) == 1
        following = asyncio.ensure_future(anext(values))
        for value in (2, 3, 4):  # all before the watch can read again
            seen[0] = value
            changes.note()
        assert await following == 4
        await reads.acquire(), await reads.acquire()
        assert reads.locked(), "it read twice"
        following = asyncio.ensure_future(anext(values))
        changes.note()  # a change of something else is not shown
        await reads.acquire()
        seen[0] = 5
        changes.note()
        assert await following == 5


async def test_watch_raises_the_error_of_its_reader() -> None:
    changes, failure = ChangeCounter(), []

    def read_value() -> int:
        if failure:
            raise failure[0]
        return 1

    async with aclosing(CoalescingWatch(read_value, changes).values(3600)) as values:
        await anext(values)
        following = asyncio.ensure_future(anext(values))
        await asyncio.sleep(0)
        failure.append(Unavailable("stopping"))
        changes.end()
        with pytest.raises(Unavailable, match="stopping"):
            await following


async def test_one_read_serves_all_watches() -> None:
    changes, reads, watchers = ChangeCounter(), [0], 100

    def read_value() -> int:
        reads[0] += 1
        return changes.count

    watch = CoalescingWatch(read_value, changes, spacing=0.00001)
    values = [watch.values(0.001) for _ in range(watchers)]
    assert await asyncio.gather(*map(anext, values)) == [0] * watchers
    following = [asyncio.ensure_future(anext(value)) for value in values]
    changes.note()
    assert await asyncio.gather(*following) == [1] * watchers
    assert reads == [2], "once at the start, and once after the change"
    for value in values:
        await value.aclose()


async def test_update_interval_grows_with_the_number_of_watches() -> None:
    now, changes = [0.0], ChangeCounter()
    watch = CoalescingWatch(lambda: changes.count, changes, spacing=3600.0, clock=lambda: now[0])
    first, second = watch.values(0.001), watch.values(0.001)
    assert await anext(first) == 0
    changes.note()
    now[0] = 2.5 * 3600
    assert await anext(second) == 1, "two watches are updated every two hours"
    changes.note()
    third = watch.values(0.001)
    now[0] += 3.5 * 3600
    assert await anext(third) == 2
    changes.note()
    fourth = watch.values(0.001)
    now[0] += 3.5 * 3600
    assert await anext(fourth) == 2, "four watches are updated every four hours"
    for values in (first, second, third, fourth):
        await values.aclose()


async def test_number_of_watches_is_limited() -> None:
    watch = CoalescingWatch(lambda: 1, ChangeCounter(), max_watchers=1)
    async with aclosing(watch.values(1.0)) as first:
        assert await anext(first) == 1
        with pytest.raises(ResourceExhausted, match="watchers: 1 watches are open") as caught:
            await anext(watch.values(1.0))
        assert caught.value.retry_seconds
    async with aclosing(watch.values(1.0)) as second:
        assert await anext(second) == 1
