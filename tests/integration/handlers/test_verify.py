"""Verification over real sockets: requests and answers, and that a fleet with wrong results is detected."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import torch
from torch import Tensor

from coordinator.cluster.local_fleet import LocalFleet
from coordinator.handlers.verification import MAX_PROMPT
from coordinator.service import Service
from longleaf.client import AsyncClient
from longleaf.config import EngineConfig, embedded_model
from longleaf.errors import InvalidArgument, LongleafError, RankLost, ResourceExhausted
from longleaf.kernels.backend import Backend
from longleaf.rank_protocol.rank_spec import RankSpec
from longleaf.rank_protocol.verdict import Verification
from longleaf.service_settings import ServiceConfig
from longleaf.types import Delta
from tests.support.service import Served, ids
from workers.__main__ import live, main
from workers.kv_cache.slots import FloatKvPool
from workers.rank import Rank

GOOD = Verification(
    max_difference=0.0009,
    max_logit=10.0,
    worst_index=3,
    compared_tokens=8,
    equal_tokens=7,
    holding_ranks=1,
    dtype="float32",
)


def struct(**changes: object) -> Verification:
    return Verification(**{field: getattr(GOOD, field) for field in GOOD.__struct_fields__} | changes)


async def test_results_of_the_ranks_are_returned(service: Served) -> None:
    service.engine.comparison = struct(reference_seconds=0.25)
    found = await service.client.verify()
    assert found.passed
    assert found.tolerance == pytest.approx(0.001)
    assert (found.max_difference, found.max_logit, found.worst_index) == (0.0009, 10.0, 3)
    assert (found.compared_tokens, found.equal_tokens, found.holding_ranks, found.world_size) == (8, 7, 1, 1)
    assert (found.dtype, found.reference_seconds, found.failure) == ("float32", 0.25, "")


ROUNDED = {"max_difference": 9.0, "dtype": "bfloat16", "reference_dtype": "bfloat16", "reference_distance": 0.1}


@pytest.mark.parametrize(
    ("changes", "is_conclusive", "passed"),
    [
        ({"max_difference": 0.00101}, True, False),
        ({"max_difference": math.nan}, True, False),
        ({**ROUNDED, "distance": 0.19}, True, True),
        ({**ROUNDED, "distance": 0.21}, True, False),
        ({**ROUNDED, "distance": math.nan}, True, False),
        ({**ROUNDED, "distance": 0.05, "dtype": "float16"}, True, True),
        ({**ROUNDED, "distance": 0.31, "reference_distance": 0.08, "dtype": "int8"}, True, True),
        ({**ROUNDED, "distance": 0.33, "reference_distance": 0.08, "dtype": "int8"}, True, False),
        ({**ROUNDED, "distance": 0.1, "reference_distance": 0.17}, False, False),
        ({**ROUNDED, "distance": 0.35, "reference_distance": 0.17}, True, False),
        ({"max_difference": 0.0, "failure": "no memory"}, False, False),
    ],
)
async def test_verdict_follows_rounding_differences(
    service: Served, changes: dict, is_conclusive: bool, passed: bool
) -> None:
    service.engine.comparison = struct(**changes)
    found = await service.client.verify()
    assert (found.is_conclusive, found.passed) == (is_conclusive, passed)
    assert (found.reference_distance, found.reference_dtype) == (
        changes.get("reference_distance", 0),
        changes.get("reference_dtype", ""),
    )


async def test_prompt_is_a_text_or_sampled_with_a_seed(service: Served) -> None:
    await service.client.verify("Grüße", max_tokens=3)
    for seed in (1, 1, 2):
        await service.client.verify(seed=seed, num_tokens=70)
    await service.client.verify()
    text, one, same, other, usual = service.engine.prompts
    assert (text.token_ids, text.sampling.max_tokens) == (ids("Grüße"), 3)
    assert one.token_ids == same.token_ids != other.token_ids
    assert len(other.token_ids) == 70
    assert len(usual.token_ids) == 256
    assert all(prompt.is_compared and prompt.sampling.ignore_end_token for prompt in service.engine.prompts)
    assert {prompt.max_draft_tokens for prompt in service.engine.prompts} == {service.engine.max_draft_tokens}
    assert text.scheduling.client.startswith("ipv4:")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"num_tokens": MAX_PROMPT + 1}, "prompt_token_count"),
        ({"num_tokens": 0}, "prompt_token_count"),
        ({"max_tokens": 65}, "max_token_count"),
        ({"max_tokens": -1}, "max_token_count"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -1}, "seed"),
        ({"text": "a" * (MAX_PROMPT + 1)}, "text"),
        ({"text": "a" * (1 << 17)}, "text"),
        ({"text": ""}, "text"),
        ({"text": "a", "num_tokens": 3}, "prompt_token_count"),
        ({"text": "\ud800"}, "text"),
    ],
)
async def test_invalid_requests_name_the_field(service: Served, options: dict, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await service.client.verify(**options)
    assert refused.value.field == field
    assert service.engine.prompts == []


async def test_one_verification_runs_at_a_time_and_a_disconnect_frees_the_slot(service: Served) -> None:
    service.engine.is_endless = True
    first = asyncio.create_task(service.client.verify())
    await service.engine.opened.wait()
    async with AsyncClient(service.address, retries=0) as other:
        with pytest.raises(ResourceExhausted) as refused:
            await other.verify()
        assert refused.value.retry_seconds
        first.cancel()
        await service.engine.streams[0].closed.wait()
        service.engine.is_endless = False
        service.engine.comparison = GOOD
        assert (await service.client.verify()).passed


async def test_lost_rank_is_named(service: Served) -> None:
    service.engine.late_error = RankLost(1, "died on request")
    async with AsyncClient(service.address, retries=0) as client:
        with pytest.raises(LongleafError) as lost:
            await client.verify()
    assert isinstance(lost.value, RankLost)


class PerturbedRank(Rank):
    """Rank 1 stores its keys correctly, but the values of its first slot are wrong: a single key of all is
    perturbed."""

    def load(self, parts: Sequence[int] = ()) -> None:
        super().load(parts)
        if self._spec.member == 1:
            self.pool.store = Perturbed(self.pool)


class Perturbed:
    """Stores as a pool does, then spoils one token's values in one layer."""

    def __init__(self, pool: FloatKvPool) -> None:
        self._pool = pool
        self._store = pool.store

    def __call__(self, backend: Backend, layer: int, slots_T: Tensor, k_KTD: Tensor, v_KTD: Tensor) -> None:
        self._store(backend, layer, slots_T, k_KTD, v_KTD)
        self._pool.values[layer][:, 0] = torch.flip(self._pool.values[layer][:, 0], dims=(-1,))


def perturbed_main(spec: RankSpec) -> None:
    live(spec, PerturbedRank)


@asynccontextmanager
async def serving(rank_main: object) -> AsyncIterator[AsyncClient]:
    config = EngineConfig(model=str(embedded_model()), world_size=2, kv_bytes=1 << 23, merge="gather")
    service = Service(ServiceConfig(engine=config, port=0, launcher="local"), LocalFleet(rank_main))
    try:
        async with AsyncClient(f"127.0.0.1:{await service.start()}") as client:
            yield client
    finally:
        await service.stop()


async def answer(client: AsyncClient) -> list[int]:
    events = client.generate("Once upon a time", max_tokens=30, ignore_end_token=True)
    return [i async for event in events if isinstance(event, Delta) for i in event.token_ids]


async def test_fleet_is_verified_beside_other_streams() -> None:
    async with serving(main) as client:
        alone = await answer(client)
        streams = [asyncio.create_task(answer(client)) for _ in range(3)]
        found = await client.verify(seed=3)
        text = await client.verify("amber-12 = 4711\n", max_tokens=4)
        assert [await stream for stream in streams] == [alone] * 3
        assert (found.passed, found.failure, found.dtype) == (True, "", "float32")
        assert (found.prompt_tokens, found.compared_tokens, found.equal_tokens) == (257, 8, 8)
        assert found.holding_ranks == found.world_size == 2
        assert 0 < found.max_difference < found.tolerance < found.max_logit
        assert (text.passed, text.compared_tokens) == (True, 4)
        resident = [worker.tokens for worker in (await client.cluster()).workers]
        again = await client.verify(seed=3)
        assert again.passed
        assert [worker.tokens for worker in (await client.cluster()).workers] == resident, "none of it is retained"


async def test_fleet_with_one_wrong_value_fails() -> None:
    async with serving(perturbed_main) as client:
        found = await client.verify()
        assert not found.passed
        assert found.failure == ""
        assert found.max_difference > found.tolerance
