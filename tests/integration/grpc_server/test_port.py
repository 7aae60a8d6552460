"""Unauthenticated peers that reach the port must not affect other clients."""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.engine_messages import Admitted
from coordinator.grpc_server import unauthenticated_limiter
from longleaf.client import AsyncClient
from longleaf.types import Started
from tests.support.fuzz.target import until
from tests.support.network.deaf import Deaf
from tests.support.service import FakeEngine, Served, serving

NO_UTF8 = b"/\xff".decode(errors="surrogateescape")
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
MANY = 2 * unauthenticated_limiter.MAX_CALLS


@asynccontextmanager
async def poisoned(address: str) -> AsyncGenerator[None, None]:
    """A port that was closed by a call with a non-UTF-8 path and is open again."""
    host, _, port = address.rpartition(":")
    async with Deaf(address) as intruder:
        await intruder.call(NO_UTF8)
        await until(lambda: not is_open(host, int(port)))
    await until(lambda: is_open(host, int(port)))
    yield


def is_open(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port)).close()
    except ConnectionError:
        return False
    return True


async def test_non_utf8_path_closes_the_port_only_briefly(service: Served) -> None:
    service.engine.script = (Admitted(1, 0),)
    service.engine.is_endless = True
    stream = service.client.generate("x")
    assert isinstance(await anext(stream), Started)
    for _ in range(3):
        async with poisoned(service.address), AsyncClient(service.address) as other:
            assert await other.list_contexts() == []
    assert len(service.engine.streams) == 1 and not service.engine.streams[0].closed.is_set(), "running calls continue"
    await stream.aclose()


async def test_non_utf8_path_closes_the_health_port_only_briefly(service: Served) -> None:
    port = await service.server.start_health("127.0.0.1", 0)
    address = f"127.0.0.1:{port}"
    async with poisoned(address), grpc.aio.insecure_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_server_stops_normally_after_a_closed_port(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path / "model") as (server, address):
        async with poisoned(address):
            await server.stop(None)
        await server.wait()
        host, _, port = address.rpartition(":")
        assert not is_open(host, int(port))


@pytest.mark.parametrize("method", [CHECK, WATCH])
async def test_open_health_watches_do_not_block_other_checks(service: Served, method: str) -> None:
    request = health_pb2.HealthCheckRequest().SerializeToString()
    async with AsyncExitStack() as stack:
        for _ in range(4):
            intruder = await stack.enter_async_context(Deaf(service.address))
            for _ in range(MANY // 4):
                await intruder.call(method, request)
        assert await service.client.is_healthy()
        assert await service.client.list_contexts() == []


async def test_longest_health_watch_is_closed_with_a_reason(service: Served, channel: grpc.aio.Channel) -> None:
    first = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    assert (await first.read()).status == health_pb2.HealthCheckResponse.SERVING
    others = [
        health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        for _ in range(unauthenticated_limiter.MAX_CALLS)
    ]
    for other in others:
        assert (await other.read()).status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await first.read()
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    for other in others:
        other.cancel()


async def test_silent_connections_leave_descriptors_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = len(os.listdir("/proc/self/fd")) + 20
    monkeypatch.setattr("coordinator.grpc_server.server.max_files", lambda: 2 * most)
    async with serving(FakeEngine(), tmp_path / "model") as (_, address), silent(address, 2 * most) as connections:
        await until(lambda: len(connections) <= most)


@asynccontextmanager
async def silent(address: str, count: int) -> AsyncIterator[set[socket.socket]]:
    """Unauthenticated connections that send nothing; returns those that are still open."""
    host, _, port = address.rpartition(":")
    loop, connections = asyncio.get_running_loop(), set[socket.socket]()

    async def watch(connection: socket.socket) -> None:
        with suppress(OSError):
            while await loop.sock_recv(connection, 4096):
                pass
        connections.discard(connection)
        connection.close()

    tasks = list[asyncio.Task[None]]()
    for _ in range(count):
        connection = socket.create_connection((host, int(port)))
        connection.setblocking(False)
        connections.add(connection)
        tasks.append(asyncio.create_task(watch(connection)))
    try:
        yield connections
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in connections:
            connection.close()


async def test_non_utf8_headers_are_not_logged(service: Served, caplog: pytest.LogCaptureFixture) -> None:
    secret = b"Bearer longleaf-\xe9".decode(errors="surrogateescape")
    with caplog.at_level(logging.DEBUG):
        async with Deaf(service.address) as intruder:
            await intruder.call("/longleaf.v1.ContextService/ListContexts", authorization=secret)
            assert await service.client.list_contexts() == []
    assert "longleaf-" not in caplog.text
