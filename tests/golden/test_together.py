"""Generations that run together over one context: the same tokens as one by one, and its keys read once per step."""

import asyncio

import pytest

from tests.support.golden.asking import answer
from tests.support.golden.loaded_engine import BOUNDS, engine_with_context
from tests.support.golden.plain import LIVELY

NUM_TOGETHER = 6


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", LIVELY)
async def test_tokens_equal_generate_however_many_ask(goldens, family):
    golden = goldens(family)
    async with engine_with_context(golden, world_size=2, chunk_size=1000) as (engine, _):
        others = [answer(engine, golden.prompt[10 * i : 10 * i + 20 * i + 5], "book") for i in range(2)]
        requested = [answer(engine, golden.prompt[BOUNDS[-1] :], "book") for _ in range(NUM_TOGETHER)]
        _, _, *answers = await asyncio.gather(*others, *requested)
    assert answers == [golden.tokens] * NUM_TOGETHER


@pytest.mark.parametrize("world_size", [1, 3])
async def test_keys_read_per_step_do_not_grow_with_the_generations(goldens, world_size):
    golden = goldens("llama")
    async with engine_with_context(golden, world_size=world_size) as (engine, ranks):
        question = golden.prompt[BOUNDS[-1] :]
        await answer(engine, question, "book")
        alone = max(count for rows, count in ranks.steps if rows == 1)
        ranks.steps.clear()
        await asyncio.gather(*(answer(engine, question, "book") for _ in range(NUM_TOGETHER)))
        together = max(count for rows, count in ranks.steps if rows == NUM_TOGETHER)
        resident = engine.get_context("book")
    own = (len(question) + len(golden.tokens)) * resident.kv_bytes // resident.tokens
    assert alone >= resident.kv_bytes * 0.8 / world_size
    assert together <= alone + NUM_TOGETHER * own
