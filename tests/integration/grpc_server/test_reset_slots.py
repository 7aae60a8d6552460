"""An abandoned slot is filled on request."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from coordinator.cluster.local_fleet import LocalFleet
from longleaf.client import AsyncClient
from longleaf.rank_protocol.rank_spec import RankSpec
from longleaf.types import Cluster
from tests.integration.grpc_server.test_lifecycle import begun, config_of
from tests.support.command_line import CLI
from tests.support.fakes.workers import EchoMain

pytestmark = pytest.mark.timeout(120)


class FragileMain(EchoMain):
    """Replacements fail while `broken` exists."""

    def __init__(self, broken: Path) -> None:
        super().__init__()
        self._broken = broken

    def __call__(self, spec: RankSpec) -> None:
        if spec.member >= spec.config.world_size and self._broken.exists():
            raise SystemExit(1)
        super().__call__(spec)


async def seen(client: AsyncClient, slot: str) -> Cluster:
    """The cluster once the slot of the first lost rank has this state."""
    async for cluster in client.watch_cluster(min_interval=0.05):
        if cluster.losses and cluster.losses[0].slot == slot:
            return cluster
    raise AssertionError


async def reset_slots(port: int) -> str:
    """The output of the command."""
    process = await asyncio.create_subprocess_exec(
        *CLI, "reset-slots", "--server", f"127.0.0.1:{port}", stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


async def test_abandoned_slot_is_filled_on_request(tmp_path: Path) -> None:
    (broken := tmp_path / "broken").touch()
    config = config_of(tmp_path)
    async with begun(config, LocalFleet(FragileMain(broken))) as found:
        await found.starting
        assert await found.client.reset_slots() == 0
        os.kill((await found.client.cluster()).workers[1].pid, signal.SIGKILL)
        cluster = await seen(found.client, "abandoned")
        assert cluster.world_size == 1
        assert "3 replacements were lost before they joined" in cluster.losses[0].slot_reason
        broken.unlink()
        assert await reset_slots(config.port) == "starting ranks in 1 slot\n"
        cluster = await seen(found.client, "replaced")
        assert cluster.world_size == 2
        assert await reset_slots(config.port) == "no slot is abandoned\n"
