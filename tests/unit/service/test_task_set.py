"""Background tasks: they are kept until they are done."""

import asyncio
import gc
import weakref

import pytest

from coordinator.task_set import TaskSet

pytestmark = pytest.mark.timeout(60)


async def test_a_waiting_task_survives_the_garbage_collector() -> None:
    tasks = TaskSet()

    async def wait_forever() -> None:
        await asyncio.Event().wait()  # nothing but the task refers to the event

    task = weakref.ref(tasks.start(wait_forever()))
    await asyncio.sleep(0)
    gc.collect()
    assert task() is not None
    assert list(tasks) == [task()]
    await tasks.cancel()
    assert not tasks


async def test_done_tasks_leave_the_set() -> None:
    tasks = TaskSet()

    async def fail() -> None:
        raise ValueError("nothing")

    async def answer() -> int:
        return 7

    tasks.start(fail())
    result = tasks.start(answer())
    assert len(tasks) == 2
    await tasks.wait()  # errors are ignored
    await asyncio.sleep(0)
    assert not tasks
    assert result.result() == 7
    await tasks.wait()
    await tasks.cancel()


async def test_cancellation_of_the_wait_reaches_the_tasks() -> None:
    tasks = TaskSet()
    task = tasks.start(asyncio.sleep(3600))
    wait = asyncio.create_task(tasks.wait())
    await asyncio.sleep(0)
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
    assert task.cancelled()
