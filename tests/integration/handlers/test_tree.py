"""Contexts that share segments, over real sockets: the whole coordinator, on ranks that answer by arithmetic."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.engine.engine import Engine
from coordinator.grpc_server.server import GrpcServer
from coordinator.handlers.application import Application
from longleaf.client import AsyncClient
from longleaf.config import EngineConfig
from longleaf.errors import AlreadyExists, InvalidArgument, NotFound, ResourceExhausted
from longleaf.positions import STATE_SPAN, WindowSpec
from longleaf.types import Usage
from longleaf.v1 import context_service_pb2 as ingest_pb
from longleaf.v1.context_service_pb2_grpc import ContextServiceStub
from tests.support.fakes.ranks import FakeRanks
from tests.support.running import running
from tests.support.service import FakeEngine, collect, load_tokenizer, write_model

CONFIG = EngineConfig(model="none", world_size=2, chunk_size=32, block_size=4, replicate_below=8)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine(FakeRanks(2, 100, vocab=200), CONFIG, max_positions=3000, wall_clock=lambda: 12.0)
    async with running(engine):
        yield engine


@pytest.fixture
async def address(tmp_path: Path, engine: Engine) -> AsyncIterator[str]:
    application = Application(engine, load_tokenizer(write_model(tmp_path / "model")), FakeEngine().describe)
    server = GrpcServer(application)
    port = await server.start("127.0.0.1", 0)
    yield f"127.0.0.1:{port}"
    await server.stop(None)
    await application.close()


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({}, grpc.StatusCode.OK, ""),
        ({"name": "contexts/none"}, grpc.StatusCode.NOT_FOUND, "contexts/none"),
        ({"new_name": "contexts/moby"}, grpc.StatusCode.ALREADY_EXISTS, "contexts/moby"),
        ({"name": "moby"}, grpc.StatusCode.INVALID_ARGUMENT, "name"),
        ({"new_name": ""}, grpc.StatusCode.INVALID_ARGUMENT, "new_name"),
        ({"token_count": 0}, grpc.StatusCode.INVALID_ARGUMENT, "token_count: 0 is not between 1 and 70"),
        ({"token_count": -(2**63)}, grpc.StatusCode.INVALID_ARGUMENT, "token_count"),
        ({"token_count": 71}, grpc.StatusCode.INVALID_ARGUMENT, "the tokens of contexts/moby"),
    ],
)
async def test_fork_is_created_or_refused_with_a_reason(
    address: str, changes: dict[str, Any], code: grpc.StatusCode, message: str
) -> None:
    fields = {"name": "contexts/moby", "new_name": "contexts/ahab", "token_count": 50} | changes
    async with AsyncClient(address) as client, grpc.aio.insecure_channel(address) as channel:
        await client.ingest("moby", tuple(range(70)))
        call = ContextServiceStub(channel).ForkContext(ingest_pb.ForkContextRequest(**fields))
        assert await call.code() == code
        assert message in (await call.details() or "")
        names = {context.id: context.tokens for context in await client.list_contexts()}
        assert names == {"moby": 70} | ({"ahab": 50} if code == grpc.StatusCode.OK else {})


async def test_fork_survives_its_source(address: str, engine: Engine) -> None:
    async with AsyncClient(address) as client, grpc.aio.insecure_channel(address) as channel:
        await client.ingest("moby", tuple(range(70)))
        request = ingest_pb.ForkContextRequest(name="contexts/moby", new_name="contexts/ahab")
        fork = await ContextServiceStub(channel).ForkContext(request)
        assert (fork.token_count, fork.create_time.seconds) == (70, 12)
        await client.delete_context("moby")
        await client.ingest("ahab", tuple(range(10)), append=True)
        assert [(context.id, context.tokens) for context in await client.list_contexts()] == [("ahab", 80)]
        await client.delete_context("ahab")
        assert sum(worker.tokens for worker in engine.cluster().workers) == 0


STATES = WindowSpec(reaches=(STATE_SPAN,), num_blocks=20, bytes_per_token=8, is_state=True)
"""Recurrent states: contexts can be continued at the ends of their last four documents."""


@pytest.fixture
async def hybrid(tmp_path: Path) -> AsyncIterator[AsyncClient]:
    """A client of a service whose model has recurrent states. Its context `moby` has six documents of ten tokens."""
    engine = Engine(FakeRanks(2, 100, vocab=200, windows=STATES), CONFIG, max_positions=3000)
    async with running(engine):
        application = Application(engine, load_tokenizer(write_model(tmp_path / "model")), FakeEngine().describe)
        server = GrpcServer(application)
        port = await server.start("127.0.0.1", 0)
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            for number in range(6):
                await client.ingest("moby", tuple(range(10 * number, 10 * number + 10)), append=number > 0)
            yield client
        await server.stop(None)
        await application.close()


@pytest.mark.parametrize(("end", "place"), [(60, 60), (50, 50), (30, 30), (59, 50), (51, 50), (29, 0), (20, 0), (1, 0)])
async def test_fork_recomputes_tokens_from_the_nearest_position_before(
    hybrid: AsyncClient, end: int, place: int
) -> None:
    if place != end:
        with pytest.raises(InvalidArgument, match=f"token_count: {end}: with a model with recurrent states, .*nearest"):
            await hybrid.fork_context("moby", "ahab", num_tokens=end)
    fork = await hybrid.fork_context("moby", "ahab", num_tokens=end, recompute=True)
    assert (fork.tokens, fork.recomputed_tokens) == (end, end - place)
    source = await hybrid.get_context("moby")
    assert (fork.positions.capacity, source.tokens) == (source.positions.capacity, 60)
    _, plain = await collect(hybrid.generate((5, 6), context="moby", max_tokens=3))
    _, answer = await collect(hybrid.generate((5, 6), context="ahab", max_tokens=3))
    assert (answer.usage, plain.usage) == (Usage(end + 2, end, 3), Usage(62, 60, 3))
    assert (await hybrid.ingest("ahab", (1, 2, 3), append=True)).tokens == end + 3


async def test_fork_that_cannot_be_recomputed_leaves_no_context(hybrid: AsyncClient) -> None:
    for number in range(100):
        try:
            await hybrid.ingest(f"c{number}", (1, 2, 3))
        except ResourceExhausted:
            break
    with pytest.raises(ResourceExhausted, match="recurrent states are needed"):
        await hybrid.fork_context("moby", "ahab", num_tokens=55, recompute=True)
    with pytest.raises(InvalidArgument, match="61 is not between 1 and 60"):
        await hybrid.fork_context("moby", "ahab", num_tokens=61, recompute=True)
    with pytest.raises(NotFound):
        await hybrid.get_context("ahab")
    with pytest.raises(AlreadyExists):
        await hybrid.fork_context("moby", "c0", num_tokens=5, recompute=True)
    assert (await hybrid.get_context("c0")).tokens == 3
    await hybrid.delete_context("c0")
    await hybrid.delete_context("c1")
    assert (await hybrid.fork_context("moby", "ahab", num_tokens=55, recompute=True)).recomputed_tokens == 5


async def test_repeated_prompt_reports_its_cached_tokens(address: str) -> None:
    async with AsyncClient(address) as client:
        _, cold = await collect(client.generate(tuple(range(70)), max_tokens=3))
        _, warm = await collect(client.generate(tuple(range(70)), max_tokens=3))
        _, longer = await collect(client.generate((*range(60), 9, 9), max_tokens=3))
        assert (cold.usage, warm.usage) == (Usage(70, 0, 3), Usage(70, 69, 3))
        assert longer.usage == Usage(62, 60, 3)
        await client.ingest("moby", tuple(range(100, 150)))
        _, other = await collect(client.generate((*range(100, 140), 7), max_tokens=1))
        assert other.usage == Usage(41, 40, 1)
