"""uvicorn's HTTP/1.1 protocol with limits on size, number and time of everything but bodies."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway.cors import early_headers
from gateway.errors import HttpProblem, busy

MAX_HEAD_BYTES = 32 << 10
"""Limit of the request line and the headers, and of data between and after the parts of a body: chunk sizes and
extensions, trailers, empty lines."""
MAX_HEADERS = 128
"""A short header takes thirty times its size as Python objects."""
MAX_PIPELINED = 4
"""Pipelined requests that wait for the answer to an earlier one on their connection."""
HEAD_SECONDS = 20.0
"""Time limit of a head, from its first byte, or from the start of the connection."""
IDLE_SECONDS = 75
"""How long a connection stays open after an answer without a complete further request."""
UNREAD_SECONDS = 120.0
"""How long a client may stop reading an answer."""
PIECE_BYTES = 8 << 10
"""Bytes are counted in pieces of this size, because the boundary between a body and the next head within a piece is
unknown."""
LINGER_SECONDS = 2.0
"""How long further data of a refused caller is read and discarded: closing the connection earlier would lose the
answer."""


class RequestRefused(Exception):
    """Stops the parser after a refused request."""

    def __init__(self, problem: HttpProblem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class LimitedHttpProtocol(HttpToolsProtocol):
    """Closes connections that send unlimited data other than bodies, or do not read their answers. Malformed heads get
    a JSON error, and connections beyond `max_connections` get 503."""

    _num_bytes = 0
    """Bytes since the last part of a body, or since the start of a head."""
    _num_headers = 0
    _is_in_head = _is_in_message = False
    _timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _is_surplus = _is_refused = _is_deaf = False

    def __init__(self, *arguments: Any, max_connections: int, origins: Sequence[str], **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._max_connections = max_connections
        self._origins = origins

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._is_surplus = self._is_too_full()
        self._expect_head()

    def _is_too_full(self) -> bool:
        return len(self.connections) > self._max_connections  # including this one

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
        if self._is_busy() and self._is_in_head:  # earlier requests are answered
            self._stop_listening()
        else:
            self._close()

    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]

    def data_received(self, data: bytes) -> None:
        """Like uvicorn's, but without logging, which unauthenticated peers could flood. The idle time after an answer
        ends with the next request instead of with any byte."""
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
        except httptools.HttpParserUpgrade:  # the following data need not be HTTP
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
        """Stops reading, and sends the error if an answer is possible."""
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
        """Closes the connection after the answers to the received requests."""
        self._is_deaf = True
        self.cycle.keep_alive = False

    def _close(self) -> None:
        """Closes the connection once the written data has been read, or after a timeout."""
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
        if not self._is_in_head:  # a trailer, which is ignored
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
        self._is_in_head = False  # only now: an error in the head does not belong to the previous request

    def _begin_request(self) -> None:
        if self._is_refused:  # a further request, before the connection is closed
            return
        self._is_surplus = self._is_surplus and self._is_too_full()  # others may have disconnected
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
        """The parser treats data after an upgrade to another protocol, or after another request, as a body."""
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
        """Starts the timeout that disconnects a client after UNREAD_SECONDS without reading."""
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
        headers = problem.headers | early_headers(self._origins, self.headers or ())
        headers |= {
            "content-type": "application/json",
            "content-length": str(len(content)),
            "connection": "close",
            "x-content-type-options": "nosniff",
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[problem.status] + lines.encode() + b"\r\n" + content)


def full(num_open: int) -> HttpProblem:
    """The answer to a connection beyond the limit."""
    return busy(f"it has {num_open:,} connections, and takes no more")


def protocol_options(max_connections: int, origins: Sequence[str] = ()) -> dict[str, Any]:
    """The options of uvicorn for this protocol. Pages of `origins` may read its errors."""
    made = partial(LimitedHttpProtocol, max_connections=max_connections, origins=origins)
    return {"http": made, "ws": "none", "timeout_keep_alive": IDLE_SECONDS, "server_header": False}
