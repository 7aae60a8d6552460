"""Events that are retained for the operator until the operator asks for them."""

import asyncio
import logging
import threading

from coordinator.actor import StartupLogBuffer
from longleaf.logs import TextFormatter


def line(text: str) -> logging.LogRecord:
    return logging.LogRecord("coordinator", logging.WARNING, "", 0, text, None, None)


async def test_a_flood_while_nobody_asks_leaves_the_last_lines_and_how_many_were_before() -> None:
    updates = StartupLogBuffer(TextFormatter(), limit=3)
    for number in range(10_000):
        updates.handle(line(str(number)))
    dropped, *last = updates.take()
    assert dropped.startswith("9,997 earlier lines")
    assert last == ["9997", "9998", "9999"]
    assert updates.take() == ()


async def test_lines_of_another_thread_wake_who_waits() -> None:
    updates = StartupLogBuffer(TextFormatter())
    waiting = asyncio.create_task(updates.wait())
    for text in ("one", "two"):
        thread = threading.Thread(target=updates.handle, args=(line(text),))
        thread.start()
        await asyncio.wait_for(waiting if text == "one" else updates.wait(), 5)
        thread.join()
        assert updates.take() == (text,)


async def test_who_asks_again_waits_for_what_is_new() -> None:
    updates = StartupLogBuffer(TextFormatter())
    updates.handle(line("one"))
    updates.take()
    await asyncio.sleep(0)  # a pending report would have run by now
    waiting = asyncio.create_task(updates.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
