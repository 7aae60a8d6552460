"""Keys and values in 8 bits through the service: the error of its answers, for any ranks and history."""

import pytest
import torch

from coordinator.engine_messages import Prompt, Tokens
from coordinator.text.template import DirectRenderer
from coordinator.text.tokenizer import Tokenizer
from longleaf.config import embedded_model
from longleaf.demo.facts import is_correct
from longleaf.demo.haystack import make_haystack
from longleaf.sampling import SamplingParams
from tests.support.conversations import question_ids
from tests.support.golden.asking import ingest
from tests.support.golden.rounding import plain_logits, served_logits
from tests.support.golden.states import running
from tests.support.service import encoded
from tests.support.threads import config_for


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"world_size": 1}),
        ("llama", {"world_size": 2, "prefix": (111, 120, 650)}),
        ("llama", {"world_size": 2, "dtype": "bfloat16"}),
        ("gemma2", {"world_size": 3}),
        ("gpt_oss", {"world_size": 2, "dtype": "float16"}),
    ],
)
async def test_logits_are_off_by_at_most_twice_what_bfloat16_weights_bring(goldens, family, settings):
    golden = goldens(family)
    exact, plain = plain_logits(golden), plain_logits(golden, "bfloat16")
    found = await served_logits(golden, kv_dtype="int8", **settings)
    error, allowed = (torch.linalg.vector_norm(logits - exact) for logits in (found, plain))
    assert 0 < error <= 2 * allowed


async def test_ranks_and_ways_to_read_a_prompt_do_not_show(goldens):
    """The rounding error is the same, except where the last bit of a value crosses the edge between two steps."""
    golden = goldens("llama")
    alone = await served_logits(golden, kv_dtype="int8")
    for way in ("queries", "keys"):
        found = await served_logits(golden, kv_dtype="int8", world_size=3, prefill=way)
        assert torch.linalg.vector_norm(found - alone) <= 2e-3 * torch.linalg.vector_norm(alone)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("world_size", [1, 3])
async def test_the_embedded_model_still_finds_facts(world_size):
    haystack = make_haystack(5, 3000, 3, 1, split="held_out")
    tokenizer = Tokenizer.load(embedded_model(), DirectRenderer())
    document = encoded(tokenizer.document_encoder(is_first=True), haystack.text)
    config = config_for(embedded_model(), world_size=world_size, chunk_size=1000, kv_dtype="int8")
    async with running(config) as engine:
        await ingest(engine, "book", document)
        for fact in (*haystack.facts, *haystack.absent):
            ids = tuple(question_ids(tokenizer, [("user", fact.question)]))
            prompt = Prompt(
                context="book", token_ids=ids, sampling=SamplingParams(max_tokens=60), end_tokens=tokenizer.end_tokens
            )
            events = [event async for event in engine.submit(prompt) if isinstance(event, Tokens)]
            output = bytes(token for event in events for token in event.token_ids if token < 256)
            assert is_correct(output.decode(errors="replace"), fact)


async def test_tokens_take_a_quarter_of_their_bytes(goldens):
    """Per key head of 16: 16 bytes of key, 16 of value, 4 of scale, and 16 exponents per block of 64 tokens."""
    golden, taken = goldens("llama"), {}
    for kv_dtype in ("auto", "int8"):
        async with running(config_for(golden.folder, kv_dtype=kv_dtype, kv_bytes=1 << 20)) as engine:
            await ingest(engine, "book", golden.prompt[:100])
            view = engine.get_context("book")
            taken[kv_dtype] = view.kv_bytes / view.tokens
            assert view.is_exact is (kv_dtype == "auto")
            assert 0.98 * (1 << 20) < engine.total_tokens * taken[kv_dtype] <= 1 << 20
    assert taken == {"auto": 4 * 2 * 128, "int8": 4 * 2 * (36 + 16 / 64)}
