"""What is kept for whoever runs a service, until it asks."""

import asyncio
import logging
import threading

from coordinator.actor import StartupLogBuffer
from longleaf.logs import TextFormatter


def line(text: str) -> logging.LogRecord:
    return logging.LogRecord("coordinator", logging.WARNING, "", 0, text, None, None)


async def test_a_flood_while_nobody_asks_leaves_the_last_lines_and_how_many_were_before() -> None:
    news = StartupLogBuffer(TextFormatter(), limit=3)
    for number in range(10_000):
        news.handle(line(str(number)))
    dropped, *last = news.take()
    assert dropped.startswith("9,997 lines")
    assert last == ["9997", "9998", "9999"]
    assert news.take() == ()


async def test_lines_of_another_thread_wake_who_waits() -> None:
    news = StartupLogBuffer(TextFormatter())
    waiting = asyncio.create_task(news.wait())
    for text in ("one", "two"):
        thread = threading.Thread(target=news.handle, args=(line(text),))
        thread.start()
        await asyncio.wait_for(waiting if text == "one" else news.wait(), 5)
        thread.join()
        assert news.take() == (text,)


async def test_who_asks_again_waits_for_what_is_new() -> None:
    news = StartupLogBuffer(TextFormatter())
    news.handle(line("one"))
    news.take()
    await asyncio.sleep(0)  # what would have told of it has run
    waiting = asyncio.create_task(news.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
