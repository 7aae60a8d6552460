"""Event-stream responses: keep-alives while nothing happens, and the end of a response."""

import asyncio
import gc
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from gateway.generations import WaitStatus
from gateway.sse import EventResponse, event
from longleaf.types import Progress, Recovering, Started

OFTEN = 0.005


class ResponseReader:
    """A reader of a response; disconnects on request."""

    def __init__(self, response: EventResponse) -> None:
        self.left = asyncio.Event()
        self._bodies = asyncio.Queue[bytes]()
        self.going = asyncio.create_task(response({"type": "http"}, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.is_whole = not message.get("more_body", True)
        if message.get("body"):
            self._bodies.put_nowait(message["body"])

    async def next(self) -> bytes:
        async with asyncio.timeout(10):
            return await self._bodies.get()

    async def until(self, body: bytes) -> int:
        """The number of other parts before this one."""
        num_others = 0
        while await self.next() != body:
            num_others += 1
        return num_others


async def test_comments_report_the_wait_and_events_follow():
    waiting, may_continue = WaitStatus(), asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        await may_continue.wait()
        yield event({"n": 1})

    reading = ResponseReader(EventResponse(events(), waiting, heartbeat=OFTEN))
    assert [await reading.next() for _ in range(2)] == [b": waiting\n\n"] * 2
    for reported, comment in (
        (Started(9, 0, queue_position=3), b": queued 3\n\n"),
        (Progress(4096, 60_000), b": read 4096 of 60000 tokens\n\n"),
        (Recovering(lost_tokens=8, recovered_tokens=2, total_tokens=8), b": recovering, 2 of 8 tokens\n\n"),
    ):
        waiting.record(reported)
        assert await reading.until(comment) <= 1  # one may have been on its way
        assert await reading.next() == comment
    may_continue.set()
    assert await reading.until(b'data: {"n":1}\n\n') <= 1
    await reading.going


async def test_disconnect_during_a_pause_closes_the_events():
    is_closed = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            await asyncio.Event().wait()
            yield b""
        finally:
            is_closed.set()

    reading = ResponseReader(EventResponse(events(), heartbeat=OFTEN))
    await reading.next()
    reading.left.set()
    await reading.going
    assert is_closed.is_set()


async def test_cancelled_response_ends_with_an_error_event():
    async def events() -> AsyncGenerator[bytes, None]:
        yield event({"n": 1})
        await asyncio.Event().wait()

    reading = ResponseReader(EventResponse(events()))
    await reading.next()
    reading.going.cancel()
    await reading.going
    name, data = (await reading.next()).decode().splitlines()[:2]
    error = json.loads(data.removeprefix("data: "))["error"]
    assert (name, error["message"], error["code"]) == ("event: error", "the gateway is stopping", "unavailable")
    assert reading.is_whole


class SlowCaller:
    """A caller that reads nothing until it is released. Nothing may arrive after the last event."""

    def __init__(self) -> None:
        self.may_take, self.waits = asyncio.Event(), asyncio.Event()
        self.is_whole = self.is_late = False

    async def receive(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.waits.set()
            await self.may_take.wait()
            self.is_late |= self.is_whole
            assert not self.is_late
            self.is_whole = not message["more_body"]


async def test_no_comment_follows_the_last_event():
    async def events() -> AsyncGenerator[bytes, None]:
        for content in ():
            yield content

    reported, caller = list[dict[str, Any]](), SlowCaller()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    going = asyncio.create_task(EventResponse(events(), heartbeat=OFTEN)({}, caller.receive, caller.send))
    await caller.waits.wait()  # the end is on its way
    await asyncio.sleep(4 * OFTEN)  # a comment is due
    caller.may_take.set()
    await going
    gc.collect()
    await asyncio.sleep(0)
    assert caller.is_whole and not caller.is_late and reported == []


async def test_error_outside_the_events_is_raised():
    async def events() -> AsyncGenerator[bytes, None]:
        await asyncio.Event().wait()
        yield b""

    def waiting() -> str:
        raise RuntimeError("no place")

    reading = ResponseReader(EventResponse(events(), waiting, heartbeat=OFTEN))
    with pytest.raises(RuntimeError, match="no place"):
        await reading.going
