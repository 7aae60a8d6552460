"""A service before its model is loaded and during shutdown, with real sockets and real processes; ranks compute
nothing."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from msgspec.structs import replace

from coordinator.cluster.local_fleet import LocalFleet
from coordinator.cluster.ports import Fleet
from coordinator.grpc_server import servicers
from coordinator.grpc_server.server import SERVICES
from coordinator.service import Service
from longleaf.client import AsyncClient, Retry
from longleaf.config import EngineConfig
from longleaf.errors import ModelRefused, PermissionDenied, RankLost, Unavailable
from longleaf.rank_protocol.rank_spec import RankSpec
from longleaf.service_settings import UNLIMITED_DRAIN_SECONDS, ServiceConfig
from longleaf.types import Delta, Draining, Finished
from tests.support.fakes.ranks import FakeFleet
from tests.support.fakes.workers import EchoMain, EchoRank
from tests.support.network.deaf import Deaf
from tests.support.service import write_model
from tests.support.uploading import Upload
from workers.__main__ import live

pytestmark = pytest.mark.timeout(60)


def config_of(folder: Path, **settings: float) -> ServiceConfig:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    engine = EngineConfig(model=str(write_model(folder)), world_size=2, block_size=16, chunk_size=64)
    return ServiceConfig(engine=engine, port=port, launcher="local", **settings)  # type: ignore[arg-type]


async def test_sampling_defaults_are_read_before_ranks_start(tmp_path: Path) -> None:
    config = replace(config_of(tmp_path), sampling_defaults="model")
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "top_p": 2}')
    service = Service(config, FakeFleet(0))
    with pytest.raises(ModelRefused, match=r"generation_config.json: top_p: must be between 0 and 1"):
        await service.start()
    await service.stop()


class Begun:
    """A starting service, and a client without retries."""

    def __init__(self, service: Service, client: AsyncClient, starting: asyncio.Task[int]) -> None:
        self.service, self.client, self.starting = service, client, starting

    async def refusal(self) -> Unavailable:
        with pytest.raises(Unavailable) as caught:
            await self.client.cluster()
        return caught.value

    async def health(self) -> tuple[bool, ...]:
        """Health of the model and the process."""
        model = {await self.client.is_healthy(name) for name in ("", *SERVICES)}
        return (*model, await self.client.is_healthy("liveness"))


@asynccontextmanager
async def begun(config: ServiceConfig, fleet: Fleet) -> AsyncIterator[Begun]:
    """The port is open; nothing else is ready."""
    service = Service(config, fleet)
    starting = asyncio.create_task(service.start())
    try:
        async with AsyncClient(f"127.0.0.1:{config.port}", retries=0) as client:
            while not await is_listening(client):
                await asyncio.sleep(0.01)  # there is no notification
                assert not starting.done() or starting.result()
            yield Begun(service, client, starting)
    finally:
        starting.cancel()
        await service.stop()


async def is_listening(client: AsyncClient) -> bool:
    try:
        return await client.is_healthy("liveness")
    except Unavailable:
        return False


class LateRank(EchoRank):
    """Rank 1 loads until a byte is written to a pipe."""

    def __init__(self, spec: RankSpec, pipe: Path) -> None:
        super().__init__(spec)
        self._rank, self._pipe = spec.member, pipe

    def load(self, parts: Sequence[int] = ()) -> None:
        if self._rank == 1:
            self._pipe.read_bytes()


class LateMain:
    def __init__(self, pipe: Path) -> None:
        self._pipe = pipe

    def __call__(self, spec: RankSpec) -> None:
        live(spec, lambda spec: LateRank(spec, self._pipe))


async def test_calls_during_start_report_the_number_of_ready_ranks(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    async with begun(config_of(tmp_path), LocalFleet(LateMain(pipe))) as found:
        while found.service.loading.num_ready < 1:
            assert await found.health() == (False, True)
            assert not found.starting.done()
        refusal = await found.refusal()
        assert (str(refusal), refusal.retry_seconds) == ("loading, 1 of 2 ranks ready", 2.0)
        await asyncio.to_thread(pipe.write_bytes, b"go on")
        await found.starting
        assert await found.health() == (True, True)
        assert (await found.client.cluster()).world_size == 2


async def test_health_watch_reports_start_and_shutdown(tmp_path: Path) -> None:
    """Clients that balance over several services watch health. The shutdown does not wait for the watchers."""
    os.mkfifo(pipe := tmp_path / "pipe")
    config, response = config_of(tmp_path), HealthCheckResponse
    async with (
        begun(config, LocalFleet(LateMain(pipe))) as found,
        grpc.aio.insecure_channel(f"127.0.0.1:{config.port}") as channel,
    ):
        stub: Any = HealthStub(channel)
        watching, alive, unknown = (
            aiter(stub.Watch(HealthCheckRequest(service=name))) for name in (SERVICES[0], "liveness", "nobody")
        )
        assert (await anext(watching)).status == response.NOT_SERVING
        assert (await anext(alive)).status == response.SERVING
        assert (await anext(unknown)).status == response.SERVICE_UNKNOWN
        await asyncio.to_thread(pipe.write_bytes, b"go on")
        assert (await anext(watching)).status == response.SERVING
        found.service.drain()
        assert (await anext(watching)).status == response.NOT_SERVING
        await found.service.wait()
        await found.service.stop()
        for ended in (watching, alive, unknown):
            assert [one async for one in ended] == []


async def test_missing_slots_are_reported(tmp_path: Path) -> None:
    fleet = FakeFleet(num_missing=5)
    async with begun(config_of(tmp_path, wait_for_ranks=60), fleet) as found:
        await fleet.requested.wait()
        assert fleet.patience == 60
        assert str(await found.refusal()) == "loading, 0 of 2 ranks ready, 5 of their slots missing"
        assert not found.starting.done()


async def test_loading_service_can_be_drained(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with begun(config_of(tmp_path), FakeFleet(num_missing=1)) as found:
        await found.refusal()
        assert await found.client.drain() == Draining(open_calls=0, limit=UNLIMITED_DRAIN_SECONDS)
        await found.service.wait_drained()
        assert "accepts no new calls" in str(await found.refusal())
    assert caplog.messages == [], "refusals during a drain are not logged: there may be thousands"


async def test_running_calls_finish_and_new_calls_are_refused(tmp_path: Path) -> None:
    async with begun(config_of(tmp_path, drain_seconds=60), LocalFleet(EchoMain())) as found:
        await found.starting
        answer = found.client.generate("x", max_tokens=200, ignore_end_token=True)
        assert not isinstance(await anext(answer), Finished)
        upload = await Upload(found.client, "book").begin()
        ending = asyncio.create_task(found.service.wait())
        assert (await found.client.drain()).limit == 60
        assert await found.health() == (False, True)
        refusal = await found.refusal()
        assert (str(refusal), refusal.retry_seconds) == ("the service is stopping and accepts no new calls", 1.0)
        events = [event async for event in answer]
        assert isinstance(events[-1], Finished)
        assert sum(len(event.token_ids) for event in events if isinstance(event, Delta)) == 200
        assert not ending.done(), "the ingest continues"
        upload.finish()
        assert (await upload.task).tokens > 0
        await ending


async def test_remaining_calls_end_with_the_reason_and_drain_callers_are_notified(tmp_path: Path) -> None:
    async with begun(config_of(tmp_path, drain_seconds=0.1), LocalFleet(EchoMain())) as found:
        await found.starting
        upload = await Upload(found.client, "book").begin()
        waiting = asyncio.create_task(found.client.drain(wait=True))
        await found.service.wait()
        with pytest.raises(Unavailable, match="^the service is stopping; waited 100 ms for calls to end$"):
            await upload.task
        assert not waiting.done(), "the operator is not notified yet"
        await found.service.stop()
        assert await waiting == Draining(open_calls=1, limit=0.1)


async def test_second_drain_does_not_wait(tmp_path: Path) -> None:
    async with begun(config_of(tmp_path, drain_seconds=600), LocalFleet(EchoMain())) as found:
        await found.starting
        upload = await Upload(found.client, "book").begin()
        found.service.drain()
        await asyncio.sleep(0)
        assert not upload.task.done()
        found.service.drain()
        await found.service.wait()
        with pytest.raises(Unavailable, match="^the service is stopping$"):
            await upload.task


async def test_signal_after_a_drain_call_counts_as_the_first(tmp_path: Path) -> None:
    """As with a stopped container whose hook has started the drain."""
    async with begun(config_of(tmp_path, drain_seconds=600), LocalFleet(EchoMain())) as found:
        await found.starting
        upload = await Upload(found.client, "book").begin()
        await found.client.drain()
        found.service.drain()
        await found.client.drain()
        assert await found.client.drain() == Draining(open_calls=1, limit=600.0)
        upload.finish()
        assert (await upload.task).tokens > 0
        await found.service.wait()


async def test_drain_call_breaks_off_no_answer_unless_a_signal_follows(tmp_path: Path) -> None:
    async with begun(config_of(tmp_path), LocalFleet(EchoMain())) as found:
        await found.starting
        upload = await Upload(found.client, "book").begin()
        assert await found.client.drain() == Draining(open_calls=1, limit=UNLIMITED_DRAIN_SECONDS)
        found.service.drain()
        assert await found.client.drain() == Draining(open_calls=1, limit=2.0)
        await found.service.wait()
        with pytest.raises(Unavailable, match="^the service is stopping; waited 2 s for calls to end$"):
            await upload.task


async def test_rank_loss_during_drain_is_waited_for(tmp_path: Path) -> None:
    async with begun(config_of(tmp_path, drain_seconds=600), LocalFleet(EchoMain())) as found:
        await found.starting
        worker = (await found.client.cluster()).workers[1]
        upload = await Upload(found.client, "book").begin()
        waiting = asyncio.create_task(found.client.drain(wait=True))
        while await found.client.is_healthy():
            assert not waiting.done()
        os.kill(worker.pid, signal.SIGKILL)
        upload.finish()
        assert (await upload.task).tokens > 0
        await found.service.wait()
        await found.service.stop()
        assert await waiting == Draining(open_calls=0, limit=600.0)


class OnceMain(EchoMain):
    """Entry point without working replacements."""

    def __call__(self, spec: RankSpec) -> None:
        if spec.member >= spec.config.world_size:
            raise SystemExit(1)
        super().__call__(spec)


async def test_drain_caller_is_notified_when_all_ranks_are_lost(tmp_path: Path) -> None:
    config = config_of(tmp_path, drain_seconds=600)
    config = replace(config, engine=replace(config.engine, max_losses_per_minute=100))  # no replacement is awaited
    async with begun(config, LocalFleet(OnceMain())) as found:
        await found.starting
        workers = (await found.client.cluster()).workers
        upload = await Upload(found.client, "book").begin()
        waiting = asyncio.create_task(found.client.drain(wait=True))
        while await found.client.is_healthy():
            assert not waiting.done()
        for worker in workers:
            os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(RankLost, match="rank [01] was lost"):
            await found.service.wait()
        await found.service.stop()
        with pytest.raises(Unavailable, match="^the service did not drain: rank [01] was lost"):
            await waiting
        with pytest.raises(Unavailable, match="^rank [01] was lost"):
            await upload.task


async def test_drain_caller_is_notified_when_shutdown_skips_the_drain(tmp_path: Path) -> None:
    """The operator stops the service immediately."""
    async with begun(config_of(tmp_path, drain_seconds=600), LocalFleet(EchoMain())) as found:
        await found.starting
        upload = await Upload(found.client, "book").begin()
        waiting = asyncio.create_task(found.client.drain(wait=True))
        while await found.client.is_healthy():
            assert not waiting.done()
        await found.service.stop()
        with pytest.raises(Unavailable, match="^the service did not drain: the service is stopping$"):
            await waiting
        with pytest.raises(Unavailable, match="^the service is stopping$"):
            await upload.task


async def test_interrupted_drain_call_is_not_retried() -> None:
    """A second request could reach the successor of the process that has ended."""
    retries: list[Retry] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    async with AsyncClient(address, on_retry=retries.append) as client:
        with pytest.raises(Unavailable):
            await client.drain()
    assert retries == []


async def test_stalled_clients_do_not_delay_shutdown_notices(tmp_path: Path) -> None:
    """They read neither health nor cluster nor answer events, so their send buffers are full."""
    os.mkfifo(pipe := tmp_path / "pipe")
    config = config_of(tmp_path, drain_seconds=0.1)
    async with begun(config, LocalFleet(LateMain(pipe))) as found, Deaf(f"127.0.0.1:{config.port}") as deaf:
        for name in ("", "liveness"):
            await deaf.call("/grpc.health.v1.Health/Watch", HealthCheckRequest(service=name).SerializeToString())
        await asyncio.to_thread(pipe.write_bytes, b"go on")
        await found.starting
        assert await found.health() == (True, True)
        await deaf.call("/longleaf.v1.ClusterService/WatchCluster")
        await deaf.call("/longleaf.v1.ClusterService/GetCluster")
        await found.client.drain()
        await found.service.wait()
        assert await found.health() == (False, True)


async def test_remote_callers_cannot_drain_or_reset_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with begun(config_of(tmp_path), LocalFleet(EchoMain())) as found:
        await found.starting
        monkeypatch.setattr(servicers, "is_here", lambda peer: False)
        with pytest.raises(PermissionDenied, match="machine or pod of the service; this call comes from ipv4:127"):
            await found.client.drain()
        with pytest.raises(PermissionDenied, match="^ResetSlots is allowed only from the machine"):
            await found.client.reset_slots()
        assert await found.health() == (True, True)
