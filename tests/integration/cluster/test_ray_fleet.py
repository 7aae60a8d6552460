"""The fleet on Ray, with ranks that compute nothing."""

import asyncio
import logging
import os
import signal
from pathlib import Path

import psutil
import pytest

from coordinator.cluster import ray_fleet
from coordinator.cluster.rank_manager import RankManager
from coordinator.cluster.ray_fleet import RayFleet
from coordinator.engine.engine import Engine
from coordinator.engine_messages import Prompt, Tokens
from longleaf.config import EngineConfig
from longleaf.errors import StartError
from longleaf.resources import memory
from longleaf.sampling import SamplingParams
from tests.integration.cluster.test_rank_logs import rank_records
from tests.integration.cluster.test_unauthenticated_peers import until
from tests.support.fakes.workers import EchoActor, RankFault
from tests.support.ray_calls import CountingActor, count_calls, stop_counting

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


class Service:
    """An engine with its own Ray fleet; `stop` checks that no process remains and all slots are free."""

    def __init__(self, world_size: int, fault: RankFault | None = None, fleet: RayFleet | None = None) -> None:
        self.config = EngineConfig(
            model="none", chunk_size=64, block_size=16, replicate_below=8, world_size=world_size, step_timeout=5.0
        )
        self.fleet = fleet or RayFleet(EchoActor, fault)
        self.control = RankManager(self.config)
        self.engine = Engine(self.control, self.config, max_positions=100_000)
        self.loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        assert await self.fleet.reserve(self.config) == "127.0.0.1", "all ranks are here"
        await self.fleet.launch(self.config, self.control.invitations, self.control.on_process_exit)
        await self.engine.start()
        self.loop = asyncio.create_task(self.engine.run())

    async def answer(self, count: int, max_tokens: int) -> list[int]:
        sampling = SamplingParams(max_tokens=max_tokens)
        stream = self.engine.submit(Prompt(context=None, token_ids=tuple(range(count)), sampling=sampling))
        return [token async for event in stream if isinstance(event, Tokens) for token in event.token_ids]

    async def stop(self) -> None:
        processes = [psutil.Process(hello.pid) for hello in self.control.hellos if psutil.pid_exists(hello.pid)]
        await self.engine.close()
        await self.fleet.shutdown()
        assert psutil.wait_procs(processes, timeout=20)[1] == []


async def test_generates(ray_cluster: int) -> None:
    import ray  # late, because its environment is set by the cluster

    service = Service(world_size=ray_cluster)
    try:
        await service.start()
        assert len(await service.answer(100, 20)) == 20
        (node,) = {worker.node for worker in service.engine.cluster().workers}
        assert ray.get_runtime_context().get_node_id().startswith(node)
    finally:
        await service.stop()


@pytest.mark.extended
async def test_memory_of_each_rank_is_read_on_its_node(ray_cluster: int) -> None:
    """The slots are free for the ranks afterwards."""
    service = Service(world_size=ray_cluster)
    try:
        await service.fleet.reserve(service.config)
        found = await service.fleet.rank_memory()
        assert found is not None
        assert 0 < found <= memory().total // ray_cluster
        await service.fleet.launch(service.config, service.control.invitations, service.control.on_process_exit)
        await service.engine.start()
    finally:
        await service.stop()


async def test_memory_is_unknown_where_a_node_does_not_answer(
    ray_cluster: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_fleet, "MEMORY_SECONDS", 0.0)
    service = Service(world_size=ray_cluster)
    try:
        await service.fleet.reserve(service.config)
        assert await service.fleet.rank_memory() is None
        assert "the memory of the Ray nodes is unknown: GetTimeoutError" in caplog.text
    finally:
        await service.stop()


async def test_token_makes_no_call_to_ray(ray_cluster: int, tmp_path: Path) -> None:
    calls = count_calls()
    service = Service(world_size=2, fleet=RayFleet(CountingActor, tmp_path))
    try:
        await service.start()
        counts = [calls.num_calls]
        assert counts[0] >= 4, "two actors were created and started"
        for max_tokens in (100, 200):
            assert len(await service.answer(100, max_tokens)) == max_tokens
            counts.append(calls.num_calls)
        assert counts == counts[:1] * 3
    finally:
        await service.stop()
        stop_counting(calls)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["0", "0"]


async def test_killed_rank_is_named_and_the_others_continue(ray_cluster: int) -> None:
    service = Service(world_size=2)
    try:
        await service.start()
        os.kill(service.control.hellos[1].pid, signal.SIGKILL)
        await service.control.group.wait_ended()
        assert len(await service.answer(100, 20)) == 20
        [loss] = service.control.losses
        assert (loss.rank, loss.reason) == (1, "its process died (ActorDiedError)")
        assert service.engine.cluster().world_size == 1
    finally:
        await service.stop()


@pytest.mark.extended
async def test_rank_that_raises_is_kept(ray_cluster: int) -> None:
    service = Service(world_size=2, fault=RankFault(rank=1, kind="raise", step=3))
    try:
        await service.start()
        assert len(await service.answer(4, 100)) == 100
        await until(lambda: service.engine.cluster().epoch == 2)  # rank 0 does not wait for rank 1 in these fakes
        assert service.engine.cluster().world_size == 2
        assert service.control.losses == ()
    finally:
        await service.stop()


async def test_slots_are_waited_for(ray_cluster: int) -> None:
    config, fleet = EngineConfig(model="none", world_size=8), RayFleet(EchoActor)
    with pytest.raises(
        StartError,
        match=rf"the cluster has {ray_cluster}, and --wait-for-ranks has passed; Ray listens on the loopback",
    ):
        await fleet.reserve(config, 0.01)
    waiting = asyncio.create_task(fleet.reserve(config, 600.0))
    while not fleet.num_missing:
        await asyncio.sleep(0.01)
        assert not waiting.done()
    assert fleet.num_missing == 8 - ray_cluster
    await fleet.shutdown()
    with pytest.raises(StartError, match="the service is stopping"):
        await waiting
    assert fleet.num_missing == 0


async def test_more_ranks_than_slots(ray_cluster: int) -> None:
    service = Service(world_size=8)
    try:
        with pytest.raises(StartError, match=f"world size 8 needs 8 slots, the cluster has {ray_cluster}"):
            await service.start()
    finally:
        await service.stop()


@pytest.mark.extended
async def test_warnings_of_ranks_are_in_the_log(ray_cluster: int, caplog: pytest.LogCaptureFixture) -> None:
    """Not only in the file of its Ray worker."""
    service = Service(world_size=2, fault=RankFault(rank=1, kind="raise", step=20))
    try:
        await service.start()
        assert len(await service.answer(100, 100)) == 100
        (node,) = {worker.node for worker in service.engine.cluster().workers}
        await until(lambda: rank_records(caplog))
        [record] = rank_records(caplog)
        assert (record.rank, record.node, record.levelno) == (1, node, logging.WARNING)  # type: ignore[attr-defined]
        assert record.getMessage().endswith("\nRuntimeError: failed on request")
    finally:
        await service.stop()
