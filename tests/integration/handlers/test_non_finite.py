"""Results that are not finite end a request with a typed error, over real sockets, and affect no other request."""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from longleaf.client import AsyncClient
from longleaf.errors import NotFinite, NotFound
from longleaf.types import Delta, Finished
from longleaf.v1 import generation_service_pb2, generation_service_pb2_grpc
from tests.support import gated
from tests.support.fakes.ranks import FakeRanks

PROMPT = tuple(range(5))


@asynccontextmanager
async def serving(folder: Path, broken: Collection[tuple[int, int | None]]) -> AsyncIterator[tuple[AsyncClient, str]]:
    ranks = FakeRanks(2, 100, vocab=200, broken=broken)
    async with (
        gated.serving(ranks, folder, world_size=2, chunk_size=32, replicate_below=8) as (engine, address),
        AsyncClient(address) as client,
    ):
        yield client, address
        assert (await client.cluster()).running == 0
        engine.audit()


async def read(events: AsyncIterator[object]) -> tuple[dict[int, list[int]], list[int], str]:
    """The ids and the ends of the samples, and the end of the stream."""
    ids, ended = dict[int, list[int]](), list[int]()
    try:
        async for event in events:
            if isinstance(event, Delta):
                ids.setdefault(event.sample, []).extend(event.token_ids)
            ended += [event.sample] if isinstance(event, Finished) else []
    except NotFinite as error:
        return ids, ended, error.tokens
    return ids, ended, ""


@pytest.mark.parametrize("options", [{}, {"resumable": True}])
@pytest.mark.parametrize("index", [0, 4])
async def test_answer_ends_at_its_non_finite_token_and_others_continue(
    tmp_path: Path, index: int, options: dict
) -> None:
    async with serving(tmp_path, {(1, index)}) as (client, _):
        whole, _, _ = await read(client.generate(PROMPT, max_tokens=9, ignore_end_token=True))
        beside = client.generate(PROMPT, max_tokens=9, ignore_end_token=True)
        ids, ended, tokens = await read(client.generate(PROMPT, max_tokens=9, ignore_end_token=True, **options))
        assert tokens == f"token {index} of the answer"
        assert ended == []
        assert ids.get(0, []) == whole[0][: len(ids.get(0, []))]
        assert len(ids.get(0, [])) <= index
        assert await read(beside) == (whole, [0], "")


async def test_only_the_non_finite_sample_of_several_ends(tmp_path: Path) -> None:
    requested = {"max_tokens": 9, "num_samples": 3, "ignore_end_token": True}
    async with serving(tmp_path, {(3 + 1, 2)}) as (client, _):
        whole, _, _ = await read(client.generate(PROMPT, **requested))
        ids, ended, tokens = await read(client.generate(PROMPT, **requested))
        assert sorted(ended) == [0, 2]
        assert (ids[0], ids[2]) == (whole[0], whole[2])
        assert tokens == "token 2 of answer 1"


async def test_non_finite_document_is_not_acknowledged_and_existing_contexts_remain(tmp_path: Path) -> None:
    async with serving(tmp_path, {(2, None), (5, None)}) as (client, _):
        with pytest.raises(NotFinite, match="tokens 32 to 39 of the document"):
            await client.ingest("moby", tuple(range(40)), upload_id="1")
        with pytest.raises(NotFound):
            await client.get_context("moby")
        assert (await client.ingest("moby", tuple(range(40)), upload_id="1")).tokens == 40
        with pytest.raises(NotFinite, match="tokens 0 to 9 of the document"):
            await client.ingest("moby", tuple(range(10)), append=True)
        assert (await client.get_context("moby")).tokens == 40
        assert (await client.ingest("moby", tuple(range(10)), append=True)).tokens == 50
        assert (await read(client.ask("moby", "who?", max_tokens=3)))[2] == ""


async def test_non_finite_prompt_ends_all_its_samples(tmp_path: Path) -> None:
    async with serving(tmp_path, {(1, None)}) as (client, _):
        ids, ended, tokens = await read(client.generate(tuple(range(50)), num_samples=2))
        assert (ids, ended, tokens) == ({}, [], "tokens 0 to 31 of the prompt")
        assert (await read(client.generate(tuple(range(50)), max_tokens=3)))[2] == ""


async def test_non_finite_verification_reports_that_nothing_can_be_compared(tmp_path: Path) -> None:
    async with serving(tmp_path, {(0, 3)}) as (client, _):
        found = await client.verify()
        assert not found.passed
        assert "token 3 of the answer" in found.failure
        assert (await client.verify()).passed


async def test_status_is_data_loss(tmp_path: Path) -> None:
    async with serving(tmp_path, {(0, 0)}) as (_, address), grpc.aio.insecure_channel(address) as channel:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(generation_service_pb2.GenerateRequest(text="who?")):
                pass
        assert caught.value.code() is grpc.StatusCode.DATA_LOSS
        assert "token 0 of the answer" in (caught.value.details() or "")
