"""A minimal HTTP server for Prometheus scrapes.

Clients are unauthenticated. Requests are limited in size, time and number, and a new connection closes the oldest one,
so a client that sends or reads nothing cannot block others.

`prometheus_client.start_http_server` has none of these limits: it starts a thread per connection, waits forever for the
request, and does not close open connections at shutdown. It also serves the metrics at every path, and renders them in
its threads, whereas values of the engine must be read on the event loop.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

from longleaf.config import join_address
from longleaf.errors import StartError

PATH = "/metrics"
MAX_CONNECTIONS = 16
MAX_REQUEST_BYTES = 8 << 10
REQUEST_SECONDS = 10.0
"""Time limit from connecting to reading the complete response; the same as Prometheus' default."""
END = b"\r\n\r\n"
log = logging.getLogger(__name__)

Render = Callable[[], Awaitable[bytes]]


class MetricsServer:
    """Answers GET /metrics with the result of `render`, with this content type, and everything else with 404."""

    def __init__(self, render: Render, content_type: str, seconds: float = REQUEST_SECONDS) -> None:
        self._render = render
        self._content_type = content_type
        self._seconds = seconds
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[None], None] = {}
        """Open connections, the oldest first."""

    async def start(self, host: str, port: int) -> int:
        """Listens, and returns the port, which the system chooses for 0. Raises StartError."""
        try:
            listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            reason = str(error.strerror).partition(" (while")[0]
            raise StartError(f"metrics_port: cannot listen on {join_address(host, port)}: {reason}") from error
        self._server = await asyncio.start_server(self._begin, sock=listening, limit=MAX_REQUEST_BYTES)
        return int(listening.getsockname()[1])

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        task = asyncio.create_task(self._serve(reader, writer))
        self._open[task] = None
        task.add_done_callback(lambda task: self._open.pop(task, None))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(TimeoutError, OSError, EOFError):
                async with asyncio.timeout(self._seconds):
                    writer.write(await self._answer(reader))
                    writer.close()
                    await writer.wait_closed()  # returns once the client has read everything
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            request = await reader.readuntil(END)
        except asyncio.LimitOverrunError:
            return _response("431 Request Header Fields Too Large", "text/plain", b"the request is too long\n")
        method, _, rest = request.partition(b"\r\n")[0].partition(b" ")
        target = rest.partition(b" ")[0].partition(b"?")[0]
        if (method, target) != (b"GET", PATH.encode()):
            return _response("404 Not Found", "text/plain", f"there is {PATH}, and nothing else\n".encode())
        try:
            return _response("200 OK", self._content_type, await self._render())
        except Exception:
            log.exception("cannot render the metrics")
            return _response("500 Internal Server Error", "text/plain", b"the log says what is wrong\n")

    async def stop(self) -> None:
        """Closes all connections. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in (going := list(self._open)):
            task.cancel()
        await asyncio.gather(*going, return_exceptions=True)


def _response(status: str, content_type: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\nConnection: close"
    return head.encode() + END + body
