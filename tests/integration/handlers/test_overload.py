"""Overload, disconnected clients and clients that do not read: real sockets, real ranks."""

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import grpc
import psutil
import pytest

from coordinator.cluster.local_fleet import LocalFleet
from coordinator.cluster.rank_manager import RankManager
from coordinator.engine.engine import Engine
from coordinator.grpc_server.server import GrpcServer
from coordinator.handlers.application import Application
from coordinator.text.template import DirectRenderer
from coordinator.text.tokenizer import Tokenizer
from longleaf.client import AsyncClient, Client
from longleaf.config import EngineConfig, embedded_model
from longleaf.errors import ResourceExhausted, Unavailable
from longleaf.types import Delta, ModelInfo
from longleaf.v1 import generation_service_pb2 as service_pb
from longleaf.v1.generation_service_pb2_grpc import GenerationServiceStub
from tests.support.network.proxy import breaking
from tests.support.running import running_on
from workers.__main__ import main as worker_main

pytestmark = pytest.mark.timeout(240)
CAPACITY = 8
MIB = 1 << 20
SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0))
MANY = 20_000
"""Number of tokens that takes longer than a test."""


async def until(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(0.001)


class Served:
    """A running engine behind its gRPC server."""

    def __init__(self, engine: Engine, address: str, client: AsyncClient) -> None:
        self.engine, self.address, self.client = engine, address, client

    async def until_idle(self) -> None:
        """Waits until no job remains, and checks that all resources are free."""
        await until(lambda: not self.engine.cluster().running + self.engine.cluster().waiting)
        self.engine.audit()
        resident = sum(context.tokens for context in self.engine.list_contexts())
        assert sum(worker.tokens for worker in self.engine.cluster().workers) == resident


@asynccontextmanager
async def serving(**changes: object) -> AsyncIterator[Served]:
    settings: dict[str, object] = {"world_size": 2, "max_sequences": CAPACITY // 2, "max_waiting": CAPACITY // 2}
    settings |= {"model": str(embedded_model()), "kv_bytes": 64 * MIB, "merge": "gather"}
    config = EngineConfig(**(settings | changes))  # type: ignore[arg-type]
    control, fleet = RankManager(config), LocalFleet(worker_main)
    async with running_on(fleet, control, config, max_positions=1 << 20) as found:
        engine = found.engine
        model = ModelInfo(name="embedded")
        tokenizer = Tokenizer.load(Path(config.model), DirectRenderer())
        use_cases = Application(engine, tokenizer, lambda: engine.cluster(model, "local"))
        server = GrpcServer(use_cases)
        address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
        async with AsyncClient(address, retries=0) as client:
            yield Served(engine, address, client)
        await server.stop()
        await use_cases.close()


async def ask(client: AsyncClient, number: int, max_tokens: int = 40) -> tuple[int, ...]:
    """The ids of an answer to a distinct prompt."""
    prompt = [65 + number, *range(70, 90 + 10 * number)]
    events = client.generate(prompt, max_tokens=max_tokens, ignore_end_token=True)
    return tuple([i async for event in events if isinstance(event, Delta) for i in event.token_ids])


async def overload(client: AsyncClient, expected: list[tuple[int, ...]]) -> int:
    """Sends four times the capacity; returns the number of refused requests."""
    calls = [ask(client, i % CAPACITY) for i in range(4 * CAPACITY)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    refused = [result for result in results if isinstance(result, ResourceExhausted)]
    for number, result in enumerate(results):
        assert isinstance(result, ResourceExhausted) or result == expected[number % CAPACITY]
    assert all(error.retry_seconds for error in refused)
    assert len(results) - len(refused) >= CAPACITY
    return len(refused)


async def test_excess_load_is_refused_and_accepted_answers_are_correct() -> None:
    async with serving() as served:
        expected = [await ask(served.client, number) for number in range(CAPACITY)]
        assert {len(answer) for answer in expected} == {40}
        assert await overload(served.client, expected)
        await served.until_idle()


@pytest.mark.slow
async def test_memory_stays_flat_under_overload() -> None:
    async with serving() as served:
        expected = [await ask(served.client, number) for number in range(CAPACITY)]
        for _ in range(5):
            await overload(served.client, expected)
        await served.until_idle()
        before = psutil.Process().memory_info().rss
        for _ in range(40):
            assert await overload(served.client, expected)
        await served.until_idle()
        assert psutil.Process().memory_info().rss - before < 16 * MIB


async def test_disconnected_clients_release_everything() -> None:
    async with serving(chunk_size=256) as served:
        for leave in (leave_an_ingest, break_an_ingest_off, leave_a_prompt, kill_a_client, pass_a_deadline):
            await leave(served)
            await served.until_idle()
        assert served.engine.list_contexts() == []


async def leave_an_ingest(served: Served) -> None:
    ingest = asyncio.create_task(served.client.ingest("doc", tuple(range(65, 90)) * 1000))
    await until(lambda: sum(worker.tokens for worker in served.engine.cluster().workers) >= 512)
    ingest.cancel()
    await asyncio.wait([ingest])


async def break_an_ingest_off(served: Served) -> None:
    async with breaking(served.address) as (proxy, address), AsyncClient(address, retries=0) as client:
        ingest = asyncio.create_task(client.ingest("doc", tuple(range(65, 90)) * 1000))
        await until(lambda: sum(worker.tokens for worker in served.engine.cluster().workers) >= 512)
        proxy.drop()
        with pytest.raises(Unavailable):
            await ingest


async def leave_a_prompt(served: Served) -> None:
    async with aclosing(served.client.generate([66] * 20_000, max_tokens=4)) as events:
        async for _ in events:
            break  # in the middle of the prompt


async def kill_a_client(served: Served) -> None:
    context = multiprocessing.get_context("forkserver")
    first = context.Event()
    process = context.Process(target=read_for_ever, args=(served.address, first))
    process.start()
    assert await asyncio.to_thread(first.wait, 60)
    assert served.engine.cluster().running == 1
    process.kill()
    await asyncio.to_thread(process.join)


async def pass_a_deadline(served: Served) -> None:
    async with grpc.aio.insecure_channel(served.address) as channel:
        call = GenerationServiceStub(channel).Generate(endless(), timeout=1.0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in call]
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


def read_for_ever(address: str, first: object) -> None:
    """In a separate process: reads an endless answer."""
    with Client(address) as client:
        for event in client.generate([65, 66, 67], max_tokens=MANY, ignore_end_token=True):
            if isinstance(event, Delta):
                first.set()  # type: ignore[attr-defined]


@pytest.mark.slow
async def test_slow_reader_is_paused_and_delays_no_other_client() -> None:
    async with serving() as served, grpc.aio.insecure_channel(served.address, SMALL_WINDOW) as channel:
        expected = await ask(served.client, 1)
        call = GenerationServiceStub(channel).Generate(endless())
        index = 0
        await until(lambda: any(job.request.is_paused for job in served.engine._scheduler._running.values()))  # type: ignore[union-attr]
        assert await ask(served.client, 1) == expected
        while index < 3000:
            message = await call.read()
            if message.HasField("delta"):
                assert message.delta.token_index == index
                index += len(message.delta.token_ids)
        call.cancel()
        await served.until_idle()


def endless() -> service_pb.GenerateRequest:
    request = service_pb.GenerateRequest(token_ids={"ids": [65, 66]})
    request.sampling.max_token_count = MANY
    request.sampling.ignore_end_token = True
    return request
