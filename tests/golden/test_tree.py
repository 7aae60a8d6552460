"""Contexts that share segments, or only their beginnings: greedy text equals transformers' `generate`."""

import pytest

from tests.support.golden.asking import ask, ingest
from tests.support.golden.states import running
from tests.support.threads import config_for


@pytest.mark.parametrize(("family", "world_size", "prefill"), [("qwen3", 1, "auto"), ("gemma2", 3, "keys")])
async def test_reused_prefixes_answer_like_generate(goldens, family, world_size, prefill):
    golden = goldens(family)
    prompt, wrong = golden.prompt, golden.prompt[::-1]
    config = config_for(golden.folder, world_size=world_size, chunk_size=500, prefill=prefill)
    async with running(config) as engine:
        await ingest(engine, "trunk", prompt[:411] + wrong[:200])
        await ask(engine, prompt[:700] + wrong[:100])
        await engine.delete_context("trunk")
        assert await ask(engine, prompt) == ([golden.tokens], 700)
        assert await ask(engine, prompt) == ([golden.tokens], 999)
        assert await ask(engine, prompt, num_samples=2) == ([golden.tokens] * 2, 999)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("family", "world_size"), [("llama", 2), ("gpt_oss", 3)])
async def test_samples_answer_like_generate(goldens, family, world_size):
    golden = goldens(family)
    async with running(config_for(golden.folder, world_size=world_size, chunk_size=700)) as engine:
        assert await ask(engine, golden.prompt, num_samples=3) == ([golden.tokens] * 3, 0)
