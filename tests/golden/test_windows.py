"""Windowed layers whose keys each rank holds itself: greedy text equals transformers' `generate` token for token."""

import asyncio
import itertools

import pytest
import torch

from coordinator.engine_messages import Prompt, SchedulingParams, Tokens
from longleaf.errors import InvalidArgument
from longleaf.rank_protocol.verdict import judge
from longleaf.sampling import SamplingParams
from tests.support.golden.asking import MAX_TOKENS, answer, ask, compare, ingest
from tests.support.golden.loaded_engine import BOUNDS, engine_with_context
from tests.support.golden.plain import LOGIT_TOLERANCE, NEW_TOKENS
from tests.support.golden.rounding import plain_logits, served_logits
from tests.support.golden.states import AT_ENDS, CONTEXT_LEN, Logits, running
from tests.support.thinned import thinned
from tests.support.threads import ThreadRanks, config_for
from workers.kv_cache import pools
from zoo.families import SECTION, WINDOW

FAMILIES = (
    "gemma3",
    "mistral",
    "gpt_oss",
    "cohere2",
    "llama4",
    "gemma2",
    "qwen2",
    "ministral",
    "mixtral",
    "phi3",
)
"""Those that have windowed layers; Mistral, Mixtral and Phi-3 have no others."""
CHUNK_SIZES = (64, 300, 4096)
"""Several chunks in a window, about one, several windows in a chunk."""


EVERY_WAY = list(itertools.product((1, 2, 3, 4), CHUNK_SIZES, AT_ENDS))
COVER = [(family, *EVERY_WAY[(7 * i) % len(EVERY_WAY)]) for i, family in enumerate(FAMILIES * 2)]
"""Every family twice; steps of 7 meet every world size, chunk size and state in either half, of which the default run
takes the first."""


def replicated(golden, **settings):
    return config_for(golden.folder, window_keys="replicated", **settings)


async def check_row(golden, world_size, chunk_size, state):
    logits = Logits()
    async with running(replicated(golden, world_size=world_size, chunk_size=chunk_size), logits.watch) as engine:
        answers = await AT_ENDS[state](engine, golden.prompt)
    assert answers == [golden.tokens] * len(answers)
    difference = (logits.first(NEW_TOKENS) - golden.logits_TV).abs().max()
    assert difference <= LOGIT_TOLERANCE * golden.logits_TV.std()


def test_the_cover_covers():
    for factor, values in ((0, FAMILIES), (1, (1, 2, 3, 4)), (2, CHUNK_SIZES), (3, AT_ENDS)):
        for rows in (COVER[: len(FAMILIES)], COVER[len(FAMILIES) :]):
            assert {way[factor] for way in rows} == set(values)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("family", "world_size", "chunk_size", "state"), thinned(COVER, len(FAMILIES)))
async def test_tokens_equal_generate(goldens, family, world_size, chunk_size, state):
    await check_row(goldens(family), world_size, chunk_size, state)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "chunk_size", "state"), EVERY_WAY)
@pytest.mark.parametrize("family", FAMILIES)
async def test_tokens_equal_generate_in_the_full_product(goldens, family, world_size, chunk_size, state):
    await check_row(goldens(family), world_size, chunk_size, state)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [0, 1])
async def test_a_rank_that_keeps_other_keys_is_noticed(goldens, number):
    """Each rank's own copy counts: its results enter the keys and partials of all layers."""
    golden = goldens("gemma3")

    def drop_values(index, rank):
        store = rank.pool.store
        if index == number:
            rank.pool.store = lambda backend, layer, slots_T, k, v: store(
                backend, layer, slots_T, k, v if layer else 0 * v
            )

    async with running(replicated(golden, world_size=2), drop_values) as engine:
        assert await answer(engine, golden.prompt) != golden.tokens


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("family", "world_size"), [("gemma3", 2), ("mistral", 3)])
async def test_samples_and_reused_prompts_answer_like_generate(goldens, family, world_size):
    """A prompt is found again as far as its end, and not within it."""
    golden = goldens(family)
    async with running(replicated(golden, world_size=world_size, chunk_size=300)) as engine:
        assert await ask(engine, golden.prompt, num_samples=3) == ([golden.tokens] * 3, 0)
        assert await ask(engine, golden.prompt) == ([golden.tokens], 999)
        assert (await ask(engine, golden.prompt[:500] + golden.prompt[:9]))[1] == 0
        others = [answer(engine, golden.prompt[: 90 * i]) for i in range(1, 5)]
        first, *_, last = await asyncio.gather(answer(engine, golden.prompt), *others, answer(engine, golden.prompt))
    assert first == last == golden.tokens


async def test_a_preempted_answer_goes_on_as_it_began(goldens):
    """One generation runs at a time, and one of a higher priority takes its turn in the middle."""
    golden = goldens("gemma3")
    sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_end_token=True)
    async with running(replicated(golden, world_size=2, max_sequences=1, chunk_size=300)) as engine:
        output, urgent = [], []
        async for event in engine.submit(
            Prompt(context=None, token_ids=golden.prompt, sampling=sampling, scheduling=SchedulingParams(priority=-1))
        ):
            output += event.token_ids if isinstance(event, Tokens) else ()
            if output and not urgent:
                urgent.append(
                    engine.submit(
                        Prompt(
                            context=None,
                            token_ids=(5, 6, 7),
                            sampling=sampling,
                            scheduling=SchedulingParams(priority=1),
                        )
                    )
                )
        assert any([isinstance(event, Tokens) async for event in urgent[0]])
    assert tuple(output) == golden.tokens


BLOCK_BYTES = {"gemma3": 32 << 10, "llama4": 48 << 10, "mistral": 64 << 10}
"""Of 64 tokens in the layers that have a window."""


@pytest.mark.parametrize(
    ("family", "world_size"),
    [
        ("gemma3", 2),
        pytest.param("llama4", 1, marks=pytest.mark.slow),
        pytest.param("mistral", 3, marks=pytest.mark.slow),
    ],
)
async def test_a_document_of_tiny_pieces_answers_like_generate(goldens, family, world_size):
    """Pieces of 4 tokens lie in blocks of their own, of which a token sees 80 at most, in a pool of 110; the blocks
    that they free go to documents that are wrong."""
    golden = goldens(family)
    settings = {"world_size": world_size, "window_bytes": 110 * BLOCK_BYTES[family], "kv_bytes": 96 << 20}
    async with running(replicated(golden, **settings)) as engine:
        await ingest(engine, "book", golden.prompt[:400])
        for number, start in enumerate(range(400, CONTEXT_LEN, 4)):
            await ingest(engine, "book", golden.prompt[start : start + 4])
            if number % 25 == 24:
                await ingest(engine, "wrong", golden.prompt[::-1])
                await engine.delete_context("wrong")
        await engine.fork_context("book", "twig", CONTEXT_LEN - 8)
        assert await answer(engine, golden.prompt[CONTEXT_LEN:], "book") == golden.tokens
        await engine.delete_context("book")
        await ingest(engine, "wrong", golden.prompt[::-1])
        assert await answer(engine, golden.prompt[CONTEXT_LEN - 8 :], "twig") == golden.tokens


async def test_a_fork_within_a_segment_is_refused(goldens):
    golden = goldens("gemma3")
    async with running(replicated(golden, world_size=2)) as engine:
        await ingest(engine, "book", golden.prompt)
        with pytest.raises(InvalidArgument, match="token_count"):
            await engine.fork_context("book", "fork", 500)


async def test_contexts_and_prompts_part_where_sections_begin(goldens):
    golden, wrong = goldens("llama4"), goldens("llama4").prompt[:400]
    async with running(replicated(golden, world_size=3, chunk_size=300)) as engine:
        await ingest(engine, "book", golden.prompt[: SECTION + 9] + wrong)
        await engine.fork_context("book", "fork", SECTION)
        await engine.delete_context("book")
        assert await answer(engine, golden.prompt[SECTION:], "fork") == golden.tokens
        await engine.delete_context("fork")
        assert (await ask(engine, golden.prompt[: SECTION + 9] + wrong))[1] == 0
        assert await ask(engine, golden.prompt) == ([golden.tokens], SECTION)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gemma3", {"world_size": 3}),
        ("mistral", {"world_size": 2}),
        ("gpt_oss", {"world_size": 2, "dtype": "float16"}),
    ],
)
async def test_keys_in_8_bits_are_off_by_at_most_twice_what_bfloat16_weights_bring(goldens, family, settings):
    golden = goldens(family)
    exact, plain = plain_logits(golden), plain_logits(golden, "bfloat16")
    found = await served_logits(golden, kv_dtype="int8", window_keys="replicated", **settings)
    error, allowed = (torch.linalg.vector_norm(logits - exact) for logits in (found, plain))
    assert 0 < error <= 2 * allowed


async def test_how_many_ranks_round_to_8_bits_does_not_show(goldens):
    golden = goldens("gemma3")
    alone, found = [
        await served_logits(golden, kv_dtype="int8", window_keys="replicated", world_size=world_size)
        for world_size in (1, 3)
    ]
    assert torch.linalg.vector_norm(found - alone) <= 2e-3 * torch.linalg.vector_norm(alone)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["gemma3", "mistral"])
async def test_half_precision_stays_close_to_the_plain_model(goldens, family):
    golden = goldens(family)
    exact, plain = plain_logits(golden), plain_logits(golden, "bfloat16")
    found = await served_logits(golden, world_size=3, dtype="bfloat16", window_keys="replicated")
    error, allowed = (torch.linalg.vector_norm(logits - exact) for logits in (found, plain))
    assert error <= 2 * allowed


async def test_verification_passes(goldens):
    golden = goldens("gpt_oss")
    async with running(replicated(golden, world_size=3, chunk_size=200)) as engine:
        found = await compare(engine, golden.prompt[:500])
    assert (found.failure, found.compared_tokens, found.equal_tokens) == ("", MAX_TOKENS, MAX_TOKENS)
    assert judge(found).passed


@pytest.mark.parametrize("world_size", [1, 3])
async def test_every_rank_reads_a_window_and_no_more(goldens, world_size):
    """All layers of Mistral have one: 2 heads of 16, keys and values, float32, in 4 layers."""
    async with engine_with_context(goldens("mistral"), world_size=world_size, window_keys="replicated") as (
        engine,
        ranks,
    ):
        await answer(engine, goldens("mistral").prompt[BOUNDS[-1] :], "book")
    assert {count for _, count in ranks.steps[1:]} == {WINDOW * 4 * 2 * (2 * 16) * 4}


async def test_ranks_of_unequal_memory_agree_on_the_blocks_of_windows(goldens, monkeypatch):
    """A block of 64 tokens takes 32 KiB in the two layers of Gemma 3 that have a window."""
    sizes = iter((8 << 20, 6 << 20, 7 << 20))
    monkeypatch.setattr(pools, "default_kv_bytes", lambda *_: next(sizes))
    ranks = ThreadRanks(replicated(goldens("gemma3"), world_size=3, kv_bytes=None))
    readies = (await ranks.start(1)).readies
    await ranks.close()
    assert [ready.windows.num_blocks for ready in readies] == [(3 << 20) // (32 << 10)] * 3
