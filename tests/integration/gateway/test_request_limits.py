"""The data after a request's head is bounded in bytes and in time for every request."""

import asyncio
import json
import logging
import re
from asyncio import create_subprocess_exec, subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import repeat
from typing import NamedTuple

import httpx2
import psutil
import pytest

from gateway import protocol
from longleaf.launch import gateway_command
from longleaf.service_settings import GatewayConfig
from tests.integration.gateway.test_slow_readers import REQUEST, TEXTS
from tests.integration.gateway.test_slow_readers import service as slow_service
from tests.support.gateways import opened
from tests.support.service import Served

CHUNKED = b"Host: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
MOST_GROWTH = 16 << 20
NUM_BYTES = 8 << 20
"""Sent by each attack, in pieces of 64 KiB."""


class Attack(NamedTuple):
    """The data that is sent on one connection: a head, and a piece that is repeated."""

    begin: bytes
    piece: bytes

    def pieces(self) -> Iterator[bytes]:
        yield self.begin
        yield from repeat(self.piece * ((64 << 10) // len(self.piece) + 1), NUM_BYTES >> 16)


ATTACKS = {
    "trailers of an answered request": Attack(b"GET /healthz HTTP/1.1\r\n" + CHUNKED + b"0\r\n", b"a:b\r\n"),
    "trailers of a body": Attack(b"POST /v1/chat/completions HTTP/1.1\r\n" + CHUNKED + b"2\r\n{}\r\n0\r\n", b"a:b\r\n"),
    "trailers of a document": Attack(b"POST /v1/contexts/x HTTP/1.1\r\n" + CHUNKED + b"2\r\n{}\r\n0\r\n", b"a:b\r\n"),
    "one long trailer": Attack(b"GET /healthz HTTP/1.1\r\n" + CHUNKED + b"0\r\na:", b"b" * 64),
    "the name of a trailer": Attack(b"GET /healthz HTTP/1.1\r\n" + CHUNKED + b"0\r\n", b"b" * 64),
    "an extension of a chunk": Attack(b"POST /v1/completions HTTP/1.1\r\n" + CHUNKED + b"2;a=", b"b" * 64),
    "requests without end": Attack(b"", HEALTH),
    "empty lines": Attack(HEALTH, b"\r\n"),
}


@asynccontextmanager
async def gateway() -> AsyncIterator[tuple[str, int, psutil.Process]]:
    """A gateway in a separate process, without a service behind it."""
    command = gateway_command(GatewayConfig(server="127.0.0.1:1", port=0))
    process = await create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        host, _, port = (await process.stdout.readline()).decode().strip().rpartition("/")[2].rpartition(":")
        yield host, int(port), psutil.Process(process.pid)
    finally:
        process.terminate()
        await process.wait()


async def test_memory_stays_bounded_for_every_request_form() -> None:
    async with gateway() as (host, port, process), asyncio.timeout(60):
        before, wrong = await warmed_up_memory(host, port, process), list[str]()
        for name, attack in ATTACKS.items():
            reader, writer = await asyncio.open_connection(host, port)
            most, is_ended = 0, False
            for piece in attack.pieces():
                try:
                    writer.write(piece)
                    await asyncio.wait_for(writer.drain(), 0.5)
                    await asyncio.wait_for(reader.read(1 << 16), 0.001)
                except TimeoutError:
                    pass
                except OSError:
                    is_ended = True
                    break
                most = max(most, process.memory_info().rss)
            writer.close()
            if not is_ended or most - before >= MOST_GROWTH:
                wrong.append(f"{name}: {(most - before) >> 20} MiB, {'ended' if is_ended else 'continues'}")
        assert not wrong
        await warmed_up_memory(host, port, process)


async def warmed_up_memory(host: str, port: int, process: psutil.Process) -> int:
    """Queries the gateway once; returns its memory in bytes."""
    async with httpx2.AsyncClient(base_url=f"http://{host}:{port}") as client:
        assert (await client.get("/healthz")).status_code == 200
    return process.memory_info().rss


@pytest.fixture
async def address(service: Served, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[str, int]]:
    """A gateway with short timeouts."""
    monkeypatch.setattr(protocol, "IDLE_SECONDS", 0.3)
    monkeypatch.setattr(protocol, "UNREAD_SECONDS", 0.5)
    async with opened(service.address) as url:
        host, _, port = url.removeprefix("http://").rpartition(":")
        yield host, int(port)


@pytest.mark.parametrize(
    ("head", "later"),
    [
        (HEALTH, b"\r\n"),
        (b"GET /healthz HTTP/1.1\r\n" + CHUNKED, b"1\r\nx\r\n"),
        (b"GET /healthz HTTP/1.1\r\n" + CHUNKED + b"0\r\n", b"a:b\r\n"),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999\r\n\r\n", b"x"),
        (b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999\r\n\r\n", b"x"),
    ],
)
async def test_data_after_an_answered_request_is_limited_in_time(
    address: tuple[str, int], head: bytes, later: bytes
) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(head)
    async with asyncio.timeout(10):
        await reader.readuntil(b"\r\n\r\n")
        while True:  # single bytes do not keep a connection open
            try:
                if not await asyncio.wait_for(reader.read(1 << 16), 0.05):
                    break
            except TimeoutError:
                writer.write(later)
            except ConnectionError:
                break
    writer.close()


async def test_request_after_a_pause_is_answered_completely(service: Served, address: tuple[str, int]) -> None:
    """The limit ends with the head of the second request: its answer may take longer."""
    reader, writer = await asyncio.open_connection(*address)
    body = b'{"model": "fake", "prompt": "x", "max_tokens": 2}'
    request = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with asyncio.timeout(10):
        writer.write(HEALTH + request[:20])
        await reader.readuntil(b'{"status":"ok"}')
        service.engine.is_endless = True
        writer.write(request[20:] + body)
        await service.engine.opened.wait()
        await asyncio.sleep(2 * protocol.IDLE_SECONDS)
        assert not reader.at_eof()
        service.engine.streams[-1].released.set()
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 ")
    writer.close()


@pytest.mark.parametrize("is_streamed", [True, pytest.param(False, marks=pytest.mark.extended)])
async def test_unread_answer_ends_after_a_timeout(monkeypatch: pytest.MonkeyPatch, is_streamed: bool) -> None:
    monkeypatch.setattr(protocol, "UNREAD_SECONDS", 0.3)
    async with slow_service() as (server, _), opened(server) as url, asyncio.timeout(20):
        host, _, port = url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1)
        body = json.dumps(REQUEST | {"stream": is_streamed}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await reader.readexactly(1)
        await asyncio.sleep(3 * protocol.UNREAD_SECONDS)
        num_read = 0
        with suppress(ConnectionError):
            while content := await reader.read(1 << 20):
                num_read += len(content)
        assert num_read < sum(map(len, TEXTS)) // 2  # it was truncated
        writer.close()


async def test_pipelined_requests_are_limited(service: Served, address: tuple[str, int]) -> None:
    """Accepted requests are answered, and the last response closes the connection."""
    reader, writer = await asyncio.open_connection(*address)
    async with asyncio.timeout(10):
        writer.write(HEALTH * 1000)
        answers = await reader.read(-1)
    num_answers = answers.count(b'{"status":"ok"}')
    assert 1 < num_answers <= protocol.MAX_PIPELINED + 1
    assert answers.count(b"connection: close") == 1
    assert answers.rpartition(b"connection: close")[2].endswith(b'{"status":"ok"}')
    writer.close()


async def test_number_of_headers_is_bounded(address: tuple[str, int]) -> None:
    for number, status in ((protocol.MAX_HEADERS - 1, b"200"), (protocol.MAX_HEADERS, b"431")):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"a:b\r\n" * number + b"\r\n")
        async with asyncio.timeout(10):
            assert (await reader.readline()).split()[1] == status
        writer.close()


async def test_trailers_are_not_parsed_as_headers(service: Served, address: tuple[str, int]) -> None:
    """A short trailer is accepted and has no effect."""
    reader, writer = await asyncio.open_connection(*address)
    body = b'{"model": "fake", "prompt": "x", "max_tokens": 2}'
    writer.write(b"POST /v1/completions HTTP/1.1\r\n" + CHUNKED + b"%x\r\n%b\r\n" % (len(body), body))
    writer.write(b"0\r\nauthorization: Basic x\r\nhost: evil.example\r\nexpect: 100-continue\r\n\r\n")
    async with asyncio.timeout(10):
        assert (await reader.readline()).split()[1] == b"200"
    writer.close()


async def test_unauthenticated_peers_cannot_write_to_the_log(
    address: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither malformed HTTP nor an upgrade request is logged."""
    upgrade = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade, close\r\nUpgrade: websocket\r\n\r\n"
    for sent, status in ((b"nonsense\r\n\r\n", b"400"), (upgrade, b"200")):
        for _ in range(3):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(sent)
            assert (await asyncio.wait_for(reader.read(), 10)).split()[1] == status
            writer.close()
    assert [
        each.getMessage() for each in caplog.records if each.levelno >= logging.INFO and each.name != "gateway.access"
    ] == []


async def test_data_after_an_upgrade_is_not_parsed_as_a_request(address: tuple[str, int]) -> None:
    """The parser would read a following body as the next request. Earlier requests are answered."""
    upgrade = b" HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
    for request, reason in (
        (b"GET /healthz" + upgrade + b"\r\n", None),
        (b"GET /healthz" + upgrade + b"Content-Length: 0\r\n\r\n", None),
        (b"POST /healthz" + upgrade + b"Content-Length: %d\r\n\r\n" % len(HEALTH), b"leave Upgrade out"),
        (b"POST /healthz" + upgrade + b"Transfer-Encoding: chunked\r\n\r\n", b"leave Upgrade out"),
        (b"CONNECT localhost:1 HTTP/1.1\r\nHost: localhost\r\n\r\n", b"this is no HTTP/1.1 request"),
    ):
        for before in (b"", HEALTH):
            reader, writer = await asyncio.open_connection(*address)
            async with asyncio.timeout(10):
                writer.write(before + request + HEALTH)
                answers = await reader.read(-1)
            writer.close()
            expected = [b"200"] * bool(before) + ([b"200"] if reason is None else [] if before else [b"400"])
            assert re.findall(rb"HTTP/1\.1 ([0-9]+)", answers.replace(b"no HTTP/1.1", b"")) == expected, request
            assert reason is None or before or reason in answers
            assert b"connection: close" in answers
