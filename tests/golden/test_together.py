"""Generations that run together over one context: the same tokens as alone, and its keys read once per step."""

import asyncio
import contextlib

import pytest

from coordinator.engine.engine import Engine
from coordinator.events import Document
from longleaf.channel.step import Decode
from tests.golden.states import answer
from tests.golden.test_generate import LIVELY
from tests.threads import ThreadRanks, config_for

BOUNDS = (900, 985)
"""The context is ingested in two parts; what follows is the question."""
NUM_TOGETHER = 6


class CountingRanks(ThreadRanks):
    """Notes the rows of each decode step, and the bytes of keys and values that rank 0 read."""

    def __init__(self, config):
        super().__init__(config)
        self.steps = []

    async def step(self, plan):
        result = await super().step(plan)
        if isinstance(plan.work, Decode):
            self.steps.append((len(plan.work.rows), result.kv_bytes_read))
        return result


@contextlib.asynccontextmanager
async def holding(golden, **settings):
    """An engine that holds the context, and its ranks."""
    config = config_for(golden.folder, **settings)
    ranks = CountingRanks(config)
    engine = Engine(ranks, config, max_positions=8192)
    await engine.start()
    loop = asyncio.create_task(engine.run())
    try:
        for start, end in zip((0, *BOUNDS), BOUNDS, strict=False):
            _ = [
                event
                async for event in engine.ingest(
                    Document(context="book", token_ids=golden.prompt[start:end], append=start > 0)
                )
            ]
        yield engine, ranks
        engine.check()
    finally:
        await engine.close()
        await asyncio.gather(loop, return_exceptions=True)


@pytest.mark.parametrize("family", LIVELY)
async def test_tokens_equal_generate_however_many_ask(goldens, family):
    golden = goldens(family)
    async with holding(golden, world_size=2, chunk_size=1000) as (engine, _):
        others = [answer(engine, golden.prompt[10 * i : 10 * i + 20 * i + 5], "book") for i in range(2)]
        asked = [answer(engine, golden.prompt[BOUNDS[-1] :], "book") for _ in range(NUM_TOGETHER)]
        _, _, *answers = await asyncio.gather(*others, *asked)
    assert answers == [golden.tokens] * NUM_TOGETHER


@pytest.mark.parametrize("world_size", [1, 3])
async def test_keys_read_per_step_do_not_grow_with_the_generations(goldens, world_size):
    golden = goldens("llama")
    async with holding(golden, world_size=world_size) as (engine, ranks):
        question = golden.prompt[BOUNDS[-1] :]
        await answer(engine, question, "book")
        alone = max(count for rows, count in ranks.steps if rows == 1)
        ranks.steps.clear()
        await asyncio.gather(*(answer(engine, question, "book") for _ in range(NUM_TOGETHER)))
        together = max(count for rows, count in ranks.steps if rows == NUM_TOGETHER)
        held = engine.get_context("book")
    own = (len(question) + len(golden.tokens)) * held.kv_bytes // held.tokens
    assert alone >= held.kv_bytes * 0.8 / world_size
    assert together <= alone + NUM_TOGETHER * own
