"""Every merge, with threads as the ranks of several machines: greedy text equals transformers' `generate`."""

import pytest
import torch

from longleaf.tree import MERGES
from tests.golden.test_generate import answer, running, watch_logits
from tests.threads import config_for

PARTIALS_TOLERANCE = 0.05
"""Of the largest logit: 2^-8 for each of 3 hops in 4 layers."""


async def answers(golden, machines, **settings):
    """To a prompt that is read in chunks, and to the same one over a context with a question."""
    config = config_for(golden.folder, world_size=len(machines), chunk_size=700, prefill="queries", **settings)
    async with running(config, machines=machines) as engine:
        _ = [event async for event in engine.ingest("book", golden.prompt[:2960], append=False)]
        return [await answer(engine, golden.prompt), await answer(engine, golden.prompt[2960:], "book")]


@pytest.mark.parametrize("machines", ["aab", "aabb"])
@pytest.mark.parametrize("merge", MERGES)
async def test_tokens_equal_generate_with_every_merge(goldens, merge, machines):
    golden = goldens("llama")
    assert await answers(golden, machines, merge=merge) == [golden.tokens] * 2


async def test_bfloat16_partials_change_logits_by_their_rounding_only(goldens, monkeypatch):
    golden = goldens("gpt_oss")
    seen = watch_logits(monkeypatch)
    await answers(golden, "aab", merge="hierarchy", partials="bfloat16")
    difference = (seen[0] - golden.logits_V).abs().max()
    assert 1e-4 < difference < PARTIALS_TOLERANCE * golden.logits_V.abs().max()
    assert not torch.equal(seen[0], golden.logits_V)
