"""Server-sent events, with comments as heartbeats."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from gateway.errors import HttpProblem, stopping

HEARTBEAT_SECONDS = 10.0
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
DONE = b"data: [DONE]\n\n"
SEPARATORS = tuple((chr(code).encode(), f"\\u{code:04x}".encode()) for code in (0x85, 0x2028, 0x2029))
_encoder = msgspec.json.Encoder()


def event(data: object, name: str = "") -> bytes:
    """One event."""
    begin = f"event: {name}\ndata: ".encode() if name else b"data: "
    return begin + _without_separators(_encoder.encode(data)) + b"\n\n"


def _without_separators(content: bytes) -> bytes:
    """The JSON with line separators escaped that do not end a line of an event stream, but do for str.splitlines, which
    some clients use."""
    for character, escape in SEPARATORS:
        content = content.replace(character, escape)
    return content


def comment(text: str) -> bytes:
    """A comment, which clients ignore and which keeps the connection alive."""
    return b": " + " ".join(text.split()).encode() + b"\n\n"


def error_event(problem: HttpProblem) -> bytes:
    """The event of an error, in OpenAI's format."""
    return event(problem.body, "error")


async def wait_disconnected(receive: Receive) -> None:
    """Returns when the caller has disconnected. Requires that the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventResponse:
    """An ASGI response of events. If the caller disconnects, `events` is closed together with its source. `waiting`
    returns the text of heartbeat comments. Cancellation means that the gateway stops, and is sent as an error."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        waiting: Callable[[], str] = lambda: "waiting",
        left: Callable[[Receive], Awaitable[None]] = wait_disconnected,
        heartbeat: float = HEARTBEAT_SECONDS,
        end: asyncio.Event | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
        ping: bytes = b"",
        error: Callable[[HttpProblem], bytes] = error_event,
    ) -> None:
        """`end` ends the response early. `headers` are additional ones, in ASCII. `ping` is sent after each heartbeat
        comment; `error` formats the event of an error."""
        self._headers = [*HEADERS, *((name.encode(), value.encode()) for name, value in headers.items())]
        self._events, self._waiting, self._left, self._heartbeat = events, waiting, left, heartbeat
        self._end, self._num_sent = end, 0
        self._ping, self._error = ping, error
        self._send_lock, self._is_whole = asyncio.Lock(), False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        tasks, is_cut = set[asyncio.Task[Any]](), False
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            work = asyncio.create_task(self._send_event(send))
            tasks |= {
                work,
                asyncio.create_task(self._wait_left(receive)),
                asyncio.create_task(self._send_heartbeats(send)),
            }
            if self._end is not None:
                tasks.add(asyncio.create_task(self._end.wait()))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except asyncio.CancelledError:
            if not tasks:  # not started
                raise
            is_cut = True
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._events.aclose()
        if is_cut:
            await self._send_body(send, self._error(stopping()))
        if is_cut or (self._end is not None and self._end.is_set()):
            await self._send_body(send, b"", is_last=True)

    async def _send_event(self, send: Send) -> None:
        async for content in self._events:
            self._num_sent += 1
            await self._send_body(send, content)
        await self._send_body(send, b"", is_last=True)

    async def _send_body(self, send: Send, content: bytes, is_last: bool = False) -> None:
        """Sends in order, because each send may wait for the caller to read; sends nothing after the last one."""
        async with self._send_lock:
            if not self._is_whole:
                await send({"type": "http.response.body", "body": content, "more_body": not is_last})
                self._is_whole = is_last

    async def _wait_left(self, receive: Receive) -> None:
        await self._left(receive)

    async def _send_heartbeats(self, send: Send) -> None:
        while True:
            before = self._num_sent
            await asyncio.sleep(self._heartbeat)
            if before == self._num_sent:
                await self._send_body(send, comment(self._waiting()) + self._ping)


async def cancel_on_disconnect(request: Request, work: Awaitable[Any]) -> Any:
    """The result of `work`, which is cancelled when the caller disconnects. Then HttpProblem is raised, which has no
    receiver."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(wait_disconnected(request.receive))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        raise HttpProblem(499, "the client disconnected")
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
