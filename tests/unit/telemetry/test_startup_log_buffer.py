"""The startup log buffer, which retains lines until the operator reads them."""

import asyncio
import logging
import threading

from coordinator.actor import StartupLogBuffer
from longleaf.logs import TextFormatter


def line(text: str) -> logging.LogRecord:
    return logging.LogRecord("coordinator", logging.WARNING, "", 0, text, None, None)


async def test_flood_without_a_reader_keeps_the_last_lines_and_a_count() -> None:
    buffer = StartupLogBuffer(TextFormatter(), limit=3)
    for number in range(10_000):
        buffer.handle(line(str(number)))
    dropped, *last = buffer.take()
    assert dropped.startswith("9,997 earlier lines")
    assert last == ["9997", "9998", "9999"]
    assert buffer.take() == ()


async def test_lines_of_another_thread_notify_the_waiter() -> None:
    buffer = StartupLogBuffer(TextFormatter())
    waiting = asyncio.create_task(buffer.wait())
    for text in ("one", "two"):
        thread = threading.Thread(target=buffer.handle, args=(line(text),))
        thread.start()
        await asyncio.wait_for(waiting if text == "one" else buffer.wait(), 5)
        thread.join()
        assert buffer.take() == (text,)


async def test_second_read_waits_for_new_lines() -> None:
    buffer = StartupLogBuffer(TextFormatter())
    buffer.handle(line("one"))
    buffer.take()
    await asyncio.sleep(0)  # a pending report would have run by now
    waiting = asyncio.create_task(buffer.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
