"""Shutdown of a service: running calls may finish, new calls are refused, and the exit code is 0."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from longleaf.client import AsyncClient
from longleaf.config import EngineConfig
from longleaf.errors import Unavailable
from longleaf.options import to_argument
from longleaf.service_settings import ServiceConfig
from longleaf.types import Draining
from tests.support.command_line import Left, Served
from tests.support.uploading import Upload

pytestmark = pytest.mark.timeout(180)
LAUNCHERS = ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.extended])]
LAST_SIGNAL = """
import ctypes, runpy, signal
libc = ctypes.CDLL(None)
libc.__cxa_atexit(getattr(libc, "raise"), int(signal.SIGTERM), None)  # comes when Python itself has ended
runpy.run_module("coordinator", run_name="__main__", alter_sys=True)
"""


@asynccontextmanager
async def served(checkpoint: Path, launcher: str, seconds: float) -> AsyncIterator[tuple[Served, AsyncClient]]:
    """A service with this drain time, and a client without retries."""
    options = ("--model", str(checkpoint), "--launcher", launcher, "--kv-bytes", "80000000")
    with Served(*options, "--drain-seconds", str(seconds)) as service:
        async with AsyncClient(service.address, retries=0) as client:
            yield service, client


async def wait_draining(client: AsyncClient) -> None:
    """Returns when new calls are refused, as reported by the health service."""
    while await client.is_healthy():
        pass
    assert await client.is_healthy("liveness")
    with pytest.raises(Unavailable, match="accepts no new calls") as caught:
        await client.cluster()
    assert caught.value.retry_seconds


@pytest.mark.parametrize("launcher", LAUNCHERS)
async def test_running_ingest_finishes_after_sigterm(checkpoint: Path, launcher: str):
    async with served(checkpoint, launcher, 120) as (service, client):
        left = Left(service.process)
        upload = await Upload(client, "book").begin()
        service.process.send_signal(signal.SIGTERM)
        await wait_draining(client)
        upload.finish()
        assert (await upload.task).tokens > 0
        assert await asyncio.to_thread(service.process.wait, 60) == 0
        left.audit()


@pytest.mark.parametrize("launcher", LAUNCHERS)
async def test_signals_to_the_whole_terminal_group_interrupt_no_call(checkpoint: Path, launcher: str):
    """SIGINT from Ctrl-C, and SIGHUP when the terminal closes."""
    async with served(checkpoint, launcher, 120) as (service, client):
        upload = await Upload(client, "book").begin()
        os.killpg(service.process.pid, signal.SIGHUP)
        await wait_draining(client)
        upload.finish()
        assert (await upload.task).tokens > 0
        assert await asyncio.to_thread(service.process.wait, 60) == 0


@pytest.mark.parametrize("launcher", LAUNCHERS)
async def test_second_signal_exits_immediately(checkpoint: Path, launcher: str):
    async with served(checkpoint, launcher, 600) as (service, client):
        upload = await Upload(client, "book").begin()
        service.process.send_signal(signal.SIGTERM)
        await wait_draining(client)
        assert await asyncio.to_thread(service.stop) == 0
        with pytest.raises(Unavailable, match="^the service is stopping$"):
            await upload.task


@pytest.mark.parametrize("launcher", LAUNCHERS)
async def test_drain_command_waits_for_running_calls(checkpoint: Path, launcher: str):
    async with served(checkpoint, launcher, 120) as (service, client):
        left = Left(service.process)
        upload = await Upload(client, "book").begin()
        hook = asyncio.create_task(asyncio.to_thread(service.json, "drain", "--wait"))
        await wait_draining(client)
        assert await client.drain() == Draining(open_calls=1, limit=120.0)
        assert (service.process.poll(), hook.done()) == (None, False)
        upload.finish()
        assert (await upload.task).tokens > 0
        assert await hook == {"open_calls": 0, "limit": 120.0}
        assert await asyncio.to_thread(service.process.wait, 60) == 0
        left.audit()


def test_late_signal_does_not_change_the_exit_code(tmp_path: Path):
    """Python removes signal handlers before the process exits."""
    config = ServiceConfig(engine=EngineConfig(model=str(tmp_path / "nothing")), launcher="local")
    command = [sys.executable, "-c", LAST_SIGNAL, to_argument(config)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.startswith("error: ")) == (2, True), ended.stderr
