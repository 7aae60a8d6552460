"""Many unauthenticated peers that connect to the control channel repeatedly: the ranks are not affected."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from coordinator.cluster.rank_manager import RankManager
from coordinator.engine_messages import Prompt
from longleaf.config import EngineConfig
from longleaf.sampling import SamplingParams
from tests.integration.cluster.test_unauthenticated_peers import until
from tests.support.fakes.workers import EchoMain
from tests.support.network import crowd
from tests.support.running import WatchedFleet, running_on

pytestmark = pytest.mark.timeout(120)
NUM_ANSWERS = 4
NUM_HEARTBEATS = 3
"""Heartbeats of each rank that must arrive meanwhile."""
NUM_REFUSED = 1000
SPARE_TASKS = 8
"""Tasks of the engine that may run when tasks are counted; one per peer would be thousands."""


@contextmanager
def crowded(control: RankManager) -> Iterator[None]:
    """All peers are connected and send until the end of the block."""
    server_key = control.invitations[0].server_key.decode()
    command = [sys.executable, "-m", crowd.__name__, control.address, server_key]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "all have come\n"
        yield
    finally:
        process.kill()
        process.communicate()


async def test_hundred_unauthenticated_peers_delay_no_heartbeat_or_step(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(model="none", world_size=2, chunk_size=64, block_size=16, replicate_below=8)
    fleet = WatchedFleet(EchoMain())
    control = RankManager(config, kill=fleet.kill)
    async with running_on(fleet, control, config) as found:

        def heard() -> list[int]:
            return [member.num_heartbeats for member in control.registry]

        async def answer() -> int:
            prompt = Prompt(context=None, token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=50))
            return len([event async for event in found.engine.submit(prompt)])

        process = psutil.Process()
        num_files, num_tasks = process.num_fds(), len(asyncio.all_tasks())
        with crowded(control):
            expected = [number + NUM_HEARTBEATS for number in heard()]
            num_refused, num_answers = control.num_refused, 0
            while control.num_refused < NUM_REFUSED or any(map(int.__lt__, heard(), expected)):
                assert await answer() > 0
                num_answers += 1
            while num_answers < NUM_ANSWERS:  # where heartbeats arrive before answers
                assert await answer() > 0
                num_answers += 1
            assert control.num_refused > num_refused, "the peers kept connecting"
        connections = control._channel._members._connections
        await until(lambda: process.num_fds() <= num_files and not connections._candidates)
        assert len(asyncio.all_tasks()) <= num_tasks + SPARE_TASKS
        assert (found.engine.cluster().epoch, control.num_ignored) == (1, 0)
    lines = [record for record in caplog.records if "refused connections" in record.message]
    assert len(lines) <= control.num_refused.bit_length()
