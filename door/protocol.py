"""HTTP/1.1 as uvicorn speaks it, with limits of what comes before a body: bytes, and time."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from door.errors import Problem

MAX_HEAD_BYTES = 32 << 10
"""The request's line and its headers."""
HEAD_SECONDS = 20.0
"""How long these may take, from the first byte on, or from the connection."""


class DoorProtocol(HttpToolsProtocol):
    """Ends connections that send a head for ever; says in JSON what is wrong with one."""

    _num_head_bytes = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._expect_head()

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
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._answer(Problem(400, "this is no HTTP/1.1 request"))

    def _answer(self, problem: Problem) -> None:
        content = problem.encoded()
        head = b"content-type: application/json\r\nconnection: close\r\nx-content-type-options: nosniff\r\n"
        length = f"content-length: {len(content)}\r\n\r\n".encode()
        self.transport.write(STATUS_LINE[problem.status] + head + length + content)
        self.transport.close()


def full(num_open: int) -> Problem:
    """What one connection too many is told."""
    told = f"this door has {num_open:,} connections, and takes no more"
    return Problem(503, told, kind="server_error", code="unavailable", headers={"retry-after": "1"})


def protocol_options() -> dict[str, Any]:
    """Of uvicorn's settings, those that belong to it."""
    return {"http": DoorProtocol, "ws": "none", "timeout_keep_alive": 75, "server_header": False}
