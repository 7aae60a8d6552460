"""Notices to the operator of a service about its ranks."""

import asyncio
import logging
import os
import signal
from pathlib import Path

import pytest

from coordinator.actor import CoordinatorActor, StartResult
from coordinator.cluster.local_fleet import LocalFleet
from longleaf.client import AsyncClient
from longleaf.config import EngineConfig
from longleaf.service_settings import ServiceConfig, TelemetryConfig
from tests.support.fakes.workers import EchoMain
from tests.support.service import write_model

pytestmark = pytest.mark.timeout(60)


async def read_notices(actor: CoordinatorActor, last: str) -> list[str]:
    """The notices up to one with this prefix."""
    notes: list[str] = []
    while not notes or not notes[-1].startswith(last):
        reply = await actor.wait(until_logs=True)
        assert reply.notes, "the service goes on"
        notes += reply.notes
    return notes


async def test_operator_is_notified_of_a_loss_and_its_recovery(tmp_path: Path) -> None:
    engine = EngineConfig(model=str(write_model(tmp_path)), world_size=2, block_size=16)
    actor = CoordinatorActor(ServiceConfig(engine=engine, port=0, launcher="local"), lambda: LocalFleet(EchoMain()))
    try:
        port = (await actor.start()).port
        async with AsyncClient(f"localhost:{port}") as client:
            worker = (await client.cluster()).workers[1]
            os.kill(worker.pid, signal.SIGKILL)
        notes = await read_notices(actor, "member 2 on node")
        node = worker.node
        started = "started member 2 to replace member 1"  # before or after the others have joined
        assert started in notes
        assert [note for note in notes if note != started] == [
            f"lost member 1 on node {node}, rank 1 of epoch 1: was killed by signal 9",
            "epoch 2: started with 1 of 2 ranks",
            "epoch 3: started with 2 of 2 ranks",
            f"member 2 on node {node} joined as rank 1 of epoch 3",
        ]
        await actor.end()
        assert await actor.wait(until_logs=True) == StartResult()
    finally:
        await actor.stop()
    assert not logging.getLogger("coordinator").handlers


async def test_log_lines_during_shutdown_are_printed(tmp_path: Path) -> None:
    """Such as the audit line of the drain that caused the shutdown."""
    engine = EngineConfig(model=str(write_model(tmp_path)), world_size=1, block_size=16)
    telemetry = TelemetryConfig(log_level="info")
    config = ServiceConfig(engine=engine, port=0, launcher="local", telemetry=telemetry)
    actor = CoordinatorActor(config, lambda: LocalFleet(EchoMain()))
    try:
        port = (await actor.start()).port
        waiting = asyncio.create_task(actor.wait(until_logs=True))
        async with AsyncClient(f"localhost:{port}") as client:
            await client.cluster()
            (line,) = (await waiting).notes
            assert line.startswith("call ended [tenant default, method /longleaf.v1.ClusterService/GetCluster, code OK")
            draining = asyncio.create_task(client.drain(wait=True))
            assert await actor.wait(until_logs=True) == StartResult()
            notes = (await actor.stop()).notes
            await draining
        audited = [note for note in notes if note.startswith("drain [")]
        assert len(audited) == 1, notes
    finally:
        await actor.stop()
    assert not logging.getLogger("coordinator").handlers
