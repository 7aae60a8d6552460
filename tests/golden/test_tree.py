"""Contexts that branch off inside segments: greedy text equals transformers' `generate` on the concatenated ids."""

import pytest

from tests.golden.test_generate import answer, running
from tests.threads import config_for


async def ingest(engine, context, token_ids):
    is_new = context not in [view.id for view in engine.list_contexts()]
    _ = [event async for event in engine.ingest(context, token_ids, append=not is_new)]


@pytest.mark.parametrize(
    ("family", "world_size", "prefill"),
    [("llama", 1, "auto"), ("llama", 3, "queries"), ("gemma2", 2, "keys"), ("gpt_oss", 3, "auto")],
)
async def test_forks_inside_segments_answer_like_generate(goldens, family, world_size, prefill):
    golden = goldens(family)
    prompt, wrong = golden.prompt, golden.prompt[::-1]
    config = config_for(golden.folder, world_size=world_size, chunk_size=500, prefill=prefill)
    async with running(config) as engine:
        await ingest(engine, "trunk", prompt[:1111] + wrong[:400])
        engine.fork_context("trunk", "branch", 1111)
        await ingest(engine, "branch", prompt[1111:1900] + wrong[:300])
        engine.fork_context("branch", "twig", 1777)
        engine.delete_context("trunk")
        engine.delete_context("branch")
        await ingest(engine, "twig", prompt[1777:2990])
        engine.fork_context("twig", "leaf", 2950)
        assert await answer(engine, prompt[2990:], "twig") == golden.tokens
        assert await answer(engine, prompt[2950:], "leaf") == golden.tokens
        assert await answer(engine, wrong[:50], "twig") != golden.tokens
