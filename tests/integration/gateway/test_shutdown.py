"""A gateway that stops while it answers: running responses are completed, or marked as cut off."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from longleaf.launch import gateway_command
from longleaf.service_settings import GatewayConfig
from tests.support.service import Served

QUESTION: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Who?"}]}
STREAM = QUESTION | {"stream": True}
CHAT = "/v1/chat/completions"


@asynccontextmanager
async def gateway(server: str, **options: Any) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """A gateway in a separate process."""
    command = gateway_command(GatewayConfig(server=server, port=0, **options))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        yield line.removeprefix("listening on ").strip(), process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_running_calls_finish_after_any_signal(service: Served, number: signal.Signals) -> None:
    service.engine.is_endless = True
    async with (
        gateway(service.address, drain_seconds=60.0) as (url, process),
        httpx2.AsyncClient(base_url=url, timeout=60) as client,
        client.stream("POST", CHAT, json=STREAM) as stream,
    ):
        lines = aiter(stream.aiter_lines())
        assert (await anext(lines)).startswith("data: ")
        process.send_signal(number)
        async with httpx2.AsyncClient(base_url=url, timeout=60) as other:
            await until_refused(other)
        service.engine.streams[0].released.set()
        printed = [line async for line in lines if line]  # an empty end would raise
        assert printed[-2] == "event: error" and "ended the stream before the answer's end" in printed[-1]
        assert await asyncio.wait_for(process.wait(), 30) == 0


async def until_refused(client: httpx2.AsyncClient) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                await client.get("/healthz")
            except httpx2.TransportError:
                return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_interrupted_client_gets_an_error_event(service: Served, number: signal.Signals) -> None:
    service.engine.is_endless = True
    async with (
        gateway(service.address, drain_seconds=0.0) as (url, process),
        httpx2.AsyncClient(base_url=url, timeout=60) as client,
    ):
        whole = asyncio.create_task(client.post(CHAT, json=QUESTION))
        await service.engine.opened.wait()
        async with client.stream("POST", CHAT, json=STREAM) as stream:
            lines = aiter(stream.aiter_lines())
            assert (await anext(lines)).startswith("data: ")
            process.send_signal(number)
            printed = [line async for line in lines if line]
        assert printed[-2] == "event: error"
        error = json.loads(printed[-1].removeprefix("data: "))["error"]
        assert (error["code"], error["message"]) == ("unavailable", "the gateway is stopping")
        answer = await whole
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["message"] == "the gateway is stopping"
        assert await asyncio.wait_for(process.wait(), 30) == 0
