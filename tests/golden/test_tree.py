"""What shares segments, or only their beginnings: greedy text equals transformers' `generate` on the same ids."""

import pytest

from coordinator.events import Ended, Prompt, Tokens
from longleaf.sampling import Sampling
from tests.golden.conftest import NEW_TOKENS
from tests.support.states import ingest, running
from tests.support.threads import config_for


async def ask(engine, prompt, num_samples=1):
    """Tokens by sample, and how many of the prompt's were held."""
    sampling = Sampling(max_tokens=NEW_TOKENS, ignore_end_token=True)
    stream = engine.submit(Prompt(context=None, token_ids=prompt, sampling=sampling, num_samples=num_samples))
    found, cached = [() for _ in range(num_samples)], set()
    async for event in stream:
        if isinstance(event, Tokens):
            found[event.sample] += event.token_ids
        if isinstance(event, Ended):
            cached.add(event.cached_tokens)
    return found, *cached


@pytest.mark.parametrize(("family", "world_size", "prefill"), [("qwen3", 1, "auto"), ("gemma2", 3, "keys")])
async def test_reused_prefixes_answer_like_generate(goldens, family, world_size, prefill):
    golden = goldens(family)
    prompt, wrong = golden.prompt, golden.prompt[::-1]
    config = config_for(golden.folder, world_size=world_size, chunk_size=500, prefill=prefill)
    async with running(config) as engine:
        await ingest(engine, "trunk", prompt[:411] + wrong[:200])
        await ask(engine, prompt[:700] + wrong[:100])
        engine.delete_context("trunk")
        assert await ask(engine, prompt) == ([golden.tokens], 700)
        assert await ask(engine, prompt) == ([golden.tokens], 999)
        assert await ask(engine, prompt, num_samples=2) == ([golden.tokens] * 2, 999)


@pytest.mark.parametrize(("family", "world_size"), [("llama", 2), ("gpt_oss", 3)])
async def test_samples_answer_like_generate(goldens, family, world_size):
    golden = goldens(family)
    async with running(config_for(golden.folder, world_size=world_size, chunk_size=700)) as engine:
        assert await ask(engine, golden.prompt, num_samples=3) == ([golden.tokens] * 3, 0)
