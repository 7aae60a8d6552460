"""The metrics port accepts unauthenticated peers and any input."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from longleaf.errors import StartError
from longleaf.metrics_server import MAX_CONNECTIONS, MAX_REQUEST_BYTES, MetricsServer

pytestmark = pytest.mark.timeout(60)
GET = b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n"


class Rendering:
    """Returns a body once it is released."""

    def __init__(self, body: bytes = b"some metrics\n") -> None:
        self.body = body
        self.error: Exception | None = None
        self.released = asyncio.Event()
        self.released.set()
        self.requested = asyncio.Event()

    async def __call__(self) -> bytes:
        self.requested.set()
        await self.released.wait()
        if self.error is not None:
            raise self.error
        return self.body


@asynccontextmanager
async def listening(rendering: Rendering, seconds: float = 30.0) -> AsyncIterator[int]:
    port = MetricsServer(rendering, "text/plain", seconds)
    try:
        yield await port.start("127.0.0.1", 0)
    finally:
        await port.stop()


async def say(port: int, request: bytes) -> bytes:
    """The whole response until the service closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await reader.read()
    finally:
        writer.close()


def read_late(deaf: socket.socket) -> int:
    """Number of bytes that a reader gets that starts after its timeout."""
    count = 0
    try:
        while got := deaf.recv(1 << 20):
            count += len(got)
    except ConnectionResetError:
        pass
    return count


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize("target", [b"/metrics", b"/metrics?format=text", b"/metrics?"])
async def test_metrics_are_returned(target: bytes) -> None:
    async with listening(Rendering()) as port:
        answer = await say(port, b"GET " + target + b" HTTP/1.1\r\nHost: here\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert status(answer) == 200
    assert body == b"some metrics\n"
    assert b"Content-Length: 13" in head
    assert b"Connection: close" in head


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1",
        b"GET /metrics/ HTTP/1.1",
        b"GET /../metrics HTTP/1.1",
        b"GET //metrics HTTP/1.1",
        b"POST /metrics HTTP/1.1",
        b"HEAD /metrics HTTP/1.1",
        b"get /metrics HTTP/1.1",
        b"GET",
        b"",
        b"\xff\x00\xfe",
    ],
)
async def test_other_paths_are_not_found(line: bytes) -> None:
    rendering = Rendering()
    async with listening(rendering) as port:
        assert status(await say(port, line + b"\r\nHost: here\r\n\r\n")) == 404
    assert not rendering.requested.is_set()


async def test_request_size_is_limited() -> None:
    async with listening(Rendering()) as port:
        assert (
            status(await say(port, b"GET /metrics HTTP/1.1\r\nA: " + b"a" * 2 * MAX_REQUEST_BYTES + b"\r\n\r\n")) == 431
        )
        assert status(await say(port, b"a" * 2 * MAX_REQUEST_BYTES)) == 431
        assert status(await say(port, GET)) == 200


async def test_render_error_is_logged_and_returned_as_an_internal_error(caplog: pytest.LogCaptureFixture) -> None:
    rendering = Rendering()
    async with listening(rendering) as port:
        rendering.error = ValueError("boom")
        answer = await say(port, GET)
        assert status(answer) == 500
        assert b"boom" not in answer
        assert "boom" in caplog.text
        rendering.error = None
        assert status(await say(port, GET)) == 200


async def test_silent_client_times_out() -> None:
    async with listening(Rendering(), seconds=0.2) as port:
        assert await say(port, b"GET /metrics HT") == b""


async def test_disconnected_client_leaves_nothing() -> None:
    async with listening(Rendering()) as port:
        for request in (b"", b"GET /met", GET):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            writer.transport.abort()
        assert status(await say(port, GET)) == 200


async def test_client_that_does_not_read_times_out_and_delays_no_other() -> None:
    rendering = Rendering(b"m" * (32 << 20))
    async with listening(rendering, seconds=0.5) as port:
        with socket.create_connection(("127.0.0.1", port)) as deaf:
            deaf.sendall(GET)
            await rendering.requested.wait()
            rendering.body = b"some metrics\n"
            assert status(await say(port, GET)) == 200
            assert await say(port, b"GET") == b""  # a connection with a later deadline
            assert await asyncio.to_thread(read_late, deaf) < 32 << 20


async def test_oldest_connection_is_closed_when_too_many_are_open() -> None:
    async with listening(Rendering()) as port:
        resident = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CONNECTIONS)]
        assert status(await say(port, GET)) == 200
        assert await resident[0][0].read() == b""
        resident[1][1].write(GET)
        assert status(await resident[1][0].read()) == 200
        for _, writer in resident:
            writer.close()


async def test_many_unauthenticated_clients_do_not_block_metrics() -> None:
    async with listening(Rendering()) as port:
        intruders = [await asyncio.open_connection("127.0.0.1", port) for _ in range(10 * MAX_CONNECTIONS)]
        for _, writer in intruders:
            writer.write(b"GET /metrics HTTP/1.1\r\n")
        assert status(await say(port, GET)) == 200
        for _, writer in intruders:
            writer.close()


async def test_open_connections_end_with_the_server() -> None:
    rendering = Rendering()
    rendering.released.clear()
    async with listening(rendering) as port:
        waiting = asyncio.create_task(say(port, GET))
        await rendering.requested.wait()
    assert await waiting == b""
    with pytest.raises(ConnectionRefusedError):
        await say(port, GET)


async def test_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(
            StartError, match=f"metrics_port: cannot listen on 127.0.0.1:{number}: Address already in use"
        ):
            await MetricsServer(Rendering(), "text/plain").start("127.0.0.1", number)


async def test_unavailable_address_is_named() -> None:
    with pytest.raises(StartError, match=r"metrics_port: cannot listen on 192\.0\.2\.1:0: "):
        await MetricsServer(Rendering(), "text/plain").start("192.0.2.1", 0)
