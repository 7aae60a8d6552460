"""HTTP/1.1 as uvicorn speaks it, with limits of what comes before a body: bytes, and time."""

import asyncio
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from door.errors import Problem, unavailable

MAX_HEAD_BYTES = 32 << 10
"""The request's line and its headers."""
HEAD_SECONDS = 20.0
"""How long these may take, from the first byte on, or from the connection."""
LINGER_SECONDS = 2.0
"""How long what a refused caller still sends is thrown away: a connection closed meanwhile would lose the answer."""


class DoorProtocol(HttpToolsProtocol):
    """Ends connections that send a head for ever; says in JSON what is wrong with one, and to those that come while
    `max_connections` are open that there is no room."""

    _num_head_bytes = 0
    _timer: asyncio.TimerHandle | None = None
    _is_surplus = _is_refused = False

    def __init__(self, *arguments: Any, max_connections: int, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._max_connections = max_connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._is_surplus = self._is_too_full()
        self._expect_head()

    def _is_too_full(self) -> bool:
        return len(self.connections) > self._max_connections  # this one is among them

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self._num_head_bytes = 0
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _end_head(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            super().data_received(data)
            return
        if self._timer is not None and self._num_head_bytes + len(data) > MAX_HEAD_BYTES:
            head = data.find(b"\r\n\r\n")
            if head < 0 or self._num_head_bytes + head > MAX_HEAD_BYTES:
                self._end_head()
                self._answer(Problem(431, f"the request's head has more than {MAX_HEAD_BYTES:,} bytes"))
                return
        if self._timer is not None:
            self._num_head_bytes += len(data)
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._end_head()
        if self._is_refused:  # another request follows, before the end
            return
        self._is_surplus = self._is_surplus and self._is_too_full()  # others may have left
        if self._is_surplus:
            self._is_refused = True
            self._write(full(self._max_connections))
            self._timer = self.loop.call_later(LINGER_SECONDS, self._give_up)
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_refused:
            self.transport.close()
        else:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._answer(Problem(400, "this is no HTTP/1.1 request"))

    def _answer(self, problem: Problem) -> None:
        self._write(problem)
        self.transport.close()

    def _write(self, problem: Problem) -> None:
        content = problem.encoded()
        headers = problem.headers | {
            "content-type": "application/json",
            "content-length": str(len(content)),
            "connection": "close",
            "x-content-type-options": "nosniff",
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[problem.status] + lines.encode() + b"\r\n" + content)


def full(num_open: int) -> Problem:
    """What one connection too many is told."""
    return unavailable(f"this door has {num_open:,} connections, and takes no more")


def protocol_options(max_connections: int) -> dict[str, Any]:
    """Of uvicorn's settings, those that belong to it."""
    made = partial(DoorProtocol, max_connections=max_connections)
    return {"http": made, "ws": "none", "timeout_keep_alive": 75, "server_header": False}
