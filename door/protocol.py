"""HTTP/1.1 as uvicorn speaks it, with limits of bytes, number and time for all that is no body."""

import asyncio
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from door.errors import HttpProblem, unavailable

MAX_HEAD_BYTES = 32 << 10
"""Of the request line and the headers, and of what stands between two parts of a body or follows it: sizes and
extensions of chunks, trailers, empty lines."""
MAX_HEADERS = 128
"""In Python's objects a short header takes thirty times its bytes."""
MAX_PIPELINED = 4
"""Requests that wait until an earlier one of their connection is answered."""
HEAD_SECONDS = 20.0
"""How long a head may take, from its first byte on, or from the connection."""
IDLE_SECONDS = 75
"""How long a connection stays after an answer without another request, whatever else it sends."""
UNREAD_SECONDS = 120.0
"""How long a client may read nothing of an answer."""
PIECE_BYTES = 8 << 10
"""Bytes are counted in pieces of this size: where a body ends and a head begins in the same one is not known."""
LINGER_SECONDS = 2.0
"""How long what a refused caller still sends is thrown away: a connection closed meanwhile would lose the answer."""


class RequestRefused(Exception):
    """Ends the parser's work on what a client has sent."""

    def __init__(self, problem: HttpProblem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class LimitedHttpProtocol(HttpToolsProtocol):
    """Ends connections that send anything but bodies without end, or read nothing of their answers. Answers in JSON
    what is wrong with a head, and 503 to connections beyond `max_connections`."""

    _num_bytes = 0
    """Since the last part of a body, or the begin of a head."""
    _num_headers = 0
    _is_in_head = _is_in_message = False
    _timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _is_surplus = _is_refused = _is_deaf = False

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
        self._end_unread()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _end_head(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self._is_busy() and self._is_in_head:  # what was asked before is answered
            self._stop_listening()
        else:
            self._close()

    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]

    def data_received(self, data: bytes) -> None:
        """As uvicorn's, but nothing is logged: it would be a line for each request of a stranger. The time after an
        answer ends with the next request, and not with any byte."""
        if len(data) <= PIECE_BYTES:
            self._feed(data)
            return
        view = memoryview(data)
        for start in range(0, len(data), PIECE_BYTES):
            self._feed(view[start : start + PIECE_BYTES])

    def _feed(self, piece: bytes | memoryview) -> None:
        if self._is_deaf or self.parser is None:
            return
        self._num_bytes += len(piece)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:  # what follows need be no HTTP
            self._stop_listening()
        except httptools.HttpParserError as error:
            cause = error.__context__
            is_known = isinstance(cause, RequestRefused)
            self._refuse(cause.problem if is_known else HttpProblem(400, "this is no HTTP/1.1 request"))
        else:
            if self._num_bytes > MAX_HEAD_BYTES:
                where = "head" if self._is_in_head else "trailers"
                self._refuse(HttpProblem(431, f"the request's {where} have more than {MAX_HEAD_BYTES:,} bytes"))

    def _refuse(self, problem: HttpProblem) -> None:
        """Reads no more, and says why where an answer has its place."""
        self._end_head()
        is_of_latest = self._is_in_message and not self._is_in_head
        if is_of_latest and (not self._is_busy() or self.cycle.response_started or self.pipeline):
            self._close()
        elif self._is_busy() and not is_of_latest:
            self._stop_listening()
        else:
            self._is_deaf = True
            self._write(problem)
            self._close()

    def _stop_listening(self) -> None:
        """The connection ends with the answers to the requests that have come."""
        self._is_deaf = True
        self.cycle.keep_alive = False

    def _close(self) -> None:
        """Ends the connection once what is written has been read, or is read no more."""
        self._is_deaf = True
        self.transport.close()
        self._expect_reading()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_bytes = self._num_headers = 0
        self._is_in_head = self._is_in_message = True
        self._unset_keepalive_if_required()
        self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:  # a trailer: nothing here has a use for one
            return
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            raise RequestRefused(HttpProblem(431, f"the request has more than {MAX_HEADERS} headers"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._end_head()
        self._num_bytes = 0
        self._unset_keepalive_if_required()
        self._begin_request()
        self._is_in_head = False  # not before: what is refused as a head is none of the latest request's

    def _begin_request(self) -> None:
        if self._is_refused:  # another request follows, before the end
            return
        self._is_surplus = self._is_surplus and self._is_too_full()  # others may have left
        if self._is_surplus:
            self._is_refused = True
            self._write(full(self._max_connections))
            self._timer = self.loop.call_later(LINGER_SECONDS, self._give_up)
            return
        if self.parser is not None and self.parser.should_upgrade() and self._has_body():
            raise RequestRefused(HttpProblem(400, "a request with a body cannot ask for an upgrade: leave Upgrade out"))
        if self._is_busy() and len(self.pipeline) >= MAX_PIPELINED:
            raise RequestRefused(HttpProblem(503, "too many requests wait on this connection"))
        super().on_headers_complete()

    def _has_body(self) -> bool:
        """The parser takes a body behind an upgrade for another protocol, or for another request."""
        return any(
            name == b"transfer-encoding" or (name == b"content-length" and value.strip(b" 0"))
            for name, value in self.headers
        )

    def on_body(self, body: bytes) -> None:
        self._num_bytes = 0
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_message = False
        if self._is_refused:
            self._close()
        else:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._expect_reading()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._end_unread()

    def _expect_reading(self) -> None:
        """From now on a client that reads nothing for UNREAD_SECONDS is let go."""
        if self._unread_timer is None:
            num_unsent = self.transport.get_write_buffer_size()
            self._unread_timer = self.loop.call_later(UNREAD_SECONDS, self._look_unread, num_unsent)

    def _look_unread(self, num_before: int) -> None:
        self._unread_timer = None
        if self.transport.get_write_buffer_size() < num_before:
            self._expect_reading()
        else:
            self.transport.abort()

    def _end_unread(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _write(self, problem: HttpProblem) -> None:
        content = problem.encoded()
        headers = problem.headers | {
            "content-type": "application/json",
            "content-length": str(len(content)),
            "connection": "close",
            "x-content-type-options": "nosniff",
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[problem.status] + lines.encode() + b"\r\n" + content)


def full(num_open: int) -> HttpProblem:
    """What one connection too many is told."""
    return unavailable(f"this door has {num_open:,} connections, and takes no more")


def protocol_options(max_connections: int) -> dict[str, Any]:
    """Of uvicorn's settings, those that belong to it."""
    made = partial(LimitedHttpProtocol, max_connections=max_connections)
    return {"http": made, "ws": "none", "timeout_keep_alive": IDLE_SECONDS, "server_header": False}
