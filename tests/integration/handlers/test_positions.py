"""Position limits of contexts and prompts, over real sockets: the whole coordinator, with ranks that answer by
arithmetic."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from coordinator.auth.quotas import QuotaEnforcer
from coordinator.engine.engine import Engine
from coordinator.grpc_server.server import GrpcServer
from coordinator.handlers.application import Application
from longleaf.client import AsyncClient
from longleaf.config import EngineConfig
from longleaf.errors import InvalidArgument
from longleaf.positions import Rope, Rotary
from longleaf.rank_protocol.step import Decode, Prefill
from longleaf.types import Finished, ModelInfo, Started
from longleaf.v1 import generation_service_pb2 as service_pb
from longleaf.v1.generation_service_pb2_grpc import GenerationServiceStub
from tests.support.fakes.ranks import FakeRanks
from tests.support.running import running
from tests.support.service import load_tokenizer, write_model

TRAINED = 200
LONGROPE = Rotary(kind="longrope", trained=TRAINED, scaled_from=64, float32_error=6e-8, float64_error=9e-16)


class Running:
    """A service, its ranks and a client."""

    def __init__(self, address: str, client: AsyncClient, engine: Engine, ranks: FakeRanks) -> None:
        self.address, self.client, self.engine, self.ranks = address, client, engine, ranks

    def ropes(self) -> set[Rope]:
        """Ropes sent to the ranks so far."""
        works = [plan.work for plan in self.ranks.plans]
        rows = [row for work in works if isinstance(work, Decode) for row in work.rows if row.path]
        return {part.rope for part in (*rows, *(work for work in works if isinstance(work, Prefill)))}


@asynccontextmanager
async def serving(folder: Path, *, allow_long: bool = False) -> AsyncIterator[Running]:
    settings = {"chunk_size": 32, "block_size": 4, "replicate_below": 8}
    config = EngineConfig(model="none", world_size=2, allow_long=allow_long, **settings)
    ranks = FakeRanks(2, 200, vocab=200, rotary=LONGROPE)
    engine = Engine(ranks, config, max_positions=3000)
    async with running(engine):
        model = engine.positions.describe_model(ModelInfo(name="fake"))
        tokenizer = load_tokenizer(write_model(folder / "model"))
        application = Application(engine, tokenizer, lambda: engine.cluster(model, "local"))
        server = GrpcServer(application)
        address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
        try:
            async with AsyncClient(address) as client:
                yield Running(address, client, engine, ranks)
        finally:
            await server.stop(None)
            await application.close()


async def generate(client: AsyncClient, num_tokens: int, max_tokens: int) -> Started:
    """Reads the whole answer to a prompt with this number of tokens; returns the first event."""
    events = [event async for event in client.generate((1,) * num_tokens, max_tokens=max_tokens, ignore_end_token=True)]
    assert isinstance(events[0], Started)
    return events[0]


async def test_prompt_beyond_the_trained_length_is_refused_with_both_lengths(tmp_path: Path) -> None:
    async with serving(tmp_path) as service, grpc.aio.insecure_channel(service.address) as channel:
        request = service_pb.GenerateRequest(token_ids={"ids": [1] * 150}, sampling={"max_token_count": 52})
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [event async for event in GenerationServiceStub(channel).Generate(request)]
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "make 201, since the last token generated takes no position; the model's limit is 200 positions" in (
            caught.value.details() or ""
        )
        assert "--allow-long" in (caught.value.details() or "")
        with pytest.raises(InvalidArgument, match="200 tokens of the model's context, .*--allow-long"):
            await service.client.ingest("book", "x" * 10_000)
        with pytest.raises(InvalidArgument, match="201 exceeds 200 positions, .*--allow-long") as refused:
            await service.client.ingest("book", "x", capacity=201)
        assert refused.value.field == "config.capacity_token_count"
        assert await service.client.list_contexts() == []
        assert not (await generate(service.client, 150, 51)).is_beyond_trained


async def test_extended_positions_are_allowed_with_permission_and_reported(tmp_path: Path) -> None:
    async with serving(tmp_path, allow_long=True) as service:
        assert (await generate(service.client, 150, 52)).is_beyond_trained
        context = await service.client.ingest("book", (1,) * 201)
        assert context.positions.is_beyond_trained
        model = (await service.client.cluster()).model
        assert (model.max_context_tokens, model.is_long_allowed, model.rope) == (TRAINED, True, "longrope")


async def test_context_reports_its_rope_and_forks_inherit_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        client = service.client
        short = await client.ingest("short", (1,) * 50)
        assert (short.positions.capacity, short.positions.scaled_for) == (64, 0)
        assert service.ropes() == {Rope()}
        service.ranks.plans.clear()
        long = await client.ingest("long", (1,) * 50, capacity=100)
        assert (long.positions.capacity, long.positions.scaled_for, long.positions.rope) == (100, 65, "longrope")
        assert long.positions.phase_error == pytest.approx(50 * 6e-8)
        await client.fork_context("long", "fork", num_tokens=20)
        await client.ingest("fork", (2,) * 10, append=True)
        _ = [event async for event in client.ask("fork", (3,) * 40, max_tokens=2)]
        assert service.ropes() == {Rope(scaled_for=65)}
        assert (await client.get_context("fork")).positions.capacity == 100
        with pytest.raises(InvalidArgument, match="make 101; the context was created for 100 positions"):
            await client.ingest("long", (1,) * 51, append=True)
        assert (await client.get_context("long")).tokens == 50


@pytest.mark.parametrize(
    ("context", "num_requested", "num_samples", "cached", "taken"),
    [
        ("short", 5, 1, 50, []),
        ("short", 15, 1, 0, [50]),
        ("short", 10, 1, 0, [50]),
        ("short", 10, 2, 0, [50]),
        ("long", 5, 1, 0, [50]),
        ("long", 10, 1, 0, [50]),
        ("long", 15, 1, 50, []),
    ],
)
async def test_recomputed_tokens_of_a_question_are_announced_and_counted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    context: str,
    num_requested: int,
    num_samples: int,
    cached: int,
    taken: list[int],
) -> None:
    """Up to 64 tokens have one scaling, and more have another. Finished always reports how many of the 50 tokens were
    cached."""
    counted: list[int] = []
    monkeypatch.setattr(QuotaEnforcer, "charge_input", lambda _, num_tokens: counted.append(num_tokens))
    async with serving(tmp_path) as service:
        await service.client.ingest("short", (1,) * 50)
        await service.client.ingest("long", (2,) * 50, capacity=100)
        counted.clear()
        options = {"max_tokens": 10, "num_samples": num_samples, "ignore_end_token": True}
        events = [event async for event in service.client.ask(context, (3,) * num_requested, **options)]
    ends = [event for event in events if isinstance(event, Finished)]
    assert [end.usage.cached_tokens for end in ends] == [cached] * num_samples
    assert all(end.is_exact for end in ends)
    assert counted == [num_requested, *taken]


async def test_prompts_share_only_prefixes_with_the_same_rope(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        await service.client.ingest("long", (1,) * 40, capacity=100)
        cached = [(await generate(service.client, 40 + i, 8)).cached_tokens for i in (1, 2, 40)]
        assert cached == [0, 41, 40], "the first one is short: only the second finds a prefix with its rope"


async def test_model_reports_the_exactness_of_its_positions(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        model = (await service.client.cluster()).model
        assert not model.is_long_allowed
        assert model.float32_phase_error == pytest.approx(TRAINED * 6e-8)
        assert model.float64_phase_error == pytest.approx(2**24 * 9e-16)
