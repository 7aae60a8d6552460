"""The rest of the service over real sockets: counting, cluster, health, reflection, the sync client."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from coordinator.__main__ import announce
from coordinator.actor import StartResult
from coordinator.grpc_server.server import SERVICES
from longleaf.client import AsyncClient, Client
from longleaf.config import EngineConfig
from longleaf.errors import InvalidArgument, NotFound
from longleaf.service_settings import ServiceConfig
from longleaf.types import Delta
from tests.support.service import TEXT, FakeEngine, Served, collect, ids, serving


async def test_synchronous_client_streams_stops_and_closes(service: Served) -> None:
    def use() -> tuple[str, str]:
        with Client(service.address) as client:
            client.ingest("moby", "some text")
            left = client.ask("moby", "who?")
            first = next(event for event in left if isinstance(event, Delta))
            left.close()
            forgotten = client.ask("moby", "who?")
            next(forgotten)
            assert client.get_context("moby").id == client.list_contexts()[0].id == "moby"
            assert client.is_healthy()
            with pytest.raises(NotFound):
                client.delete_context("none")
        forgotten.close()  # after its client: nothing remains to be ended
        client.close()
        return first.text, client.server

    service.engine.answer = tuple((token_id,) for token_id in ids("two words"))
    assert await asyncio.to_thread(use) == ("t", service.address)


async def test_tokens_are_counted_and_messages_may_be_large(service: Served) -> None:
    assert await service.client.count_tokens(TEXT) == len(ids(TEXT))
    many = [200] * ((2 << 20) - 1000)  # two bytes each
    _, finished = await collect(service.client.generate(many))
    assert finished.usage.prompt_tokens == len(many)
    with pytest.raises(InvalidArgument, match="the limit for one message is 4,194,304"):
        await service.client.count_tokens("a" * (5 << 20))


async def test_ipv6_address_is_announced_in_client_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(FakeEngine(), tmp_path / "model", "::1") as (_, address):
        config = ServiceConfig(engine=EngineConfig(model=""), host="::1")
        announce(config, StartResult(port=int(address.rpartition(":")[2])))
        announced = capsys.readouterr().out.removeprefix("listening on ").strip()
        async with AsyncClient(announced) as client:
            assert await client.is_healthy()


async def test_cluster_is_described(service: Served) -> None:
    cluster = await service.client.cluster()
    assert cluster == service.engine.describe()
    assert cluster.workers[0].pid == 4711


async def test_health_follows_the_service(service: Served) -> None:
    assert await service.client.is_healthy()
    assert all([await service.client.is_healthy(name) for name in SERVICES])
    await service.server.drain(0)
    assert not await service.client.is_healthy("longleaf.v1.GenerationService")
    with pytest.raises(NotFound, match=r"no\.such\.Service"):
        await service.client.is_healthy("no.such.Service")


async def test_reflection_lists_the_services(channel: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)

    async def upward() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    async for answer in stub.ServerReflectionInfo(upward()):
        names = {found.name for found in answer.list_services_response.service}
    assert names >= {*SERVICES, "grpc.health.v1.Health"}
