"""Scaled and far positions: greedy text equals transformers' `generate`; keys with another rope are not shared."""

import asyncio
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM

from coordinator.engine_messages import DocumentPrompt, Ended, Prompt, Tokens
from longleaf.errors import InvalidArgument
from longleaf.positions import FLOAT32_POSITIONS, Rope
from longleaf.rank_protocol.verdict import judge
from longleaf.sampling import SamplingParams
from longleaf.types import ContextSettings
from tests.support.golden.asking import MAX_TOKENS, compare
from tests.support.golden.knowing import KnowingDrafter
from tests.support.golden.lasting import serving
from tests.support.golden.states import running
from tests.support.threads import config_for
from workers.model.rotary import replace_rotary
from zoo.checkpoints import make_checkpoint

NEW_TOKENS = 32
ORIGINAL = 512
BORDER = 96
"""ORIGINAL of the Phi-3."""
KINDS: dict[str, dict[str, Any]] = {
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "longrope": {
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "dynamic": {"factor": 4.0},
}


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    """A checkpoint by kind of rope, made at first use. `dynamic` was trained for ORIGINAL positions."""
    made = {}

    def get(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            make_checkpoint(folder, "llama", seed=2, max_positions=ORIGINAL if kind == "dynamic" else 8192)
            config = AutoConfig.from_pretrained(folder)
            config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, **KINDS[kind]}
            config.save_pretrained(folder)
            made[kind] = folder
        return made[kind]

    return get


def ids_of(count, seed=7):
    return tuple(torch.randint(3, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def generate(folder, prompt, longest=None, num_tokens=NEW_TOKENS, **options):
    """The answer of transformers, after a pass at the position `longest`: dynamic scaling keeps that length."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if longest:
        model(torch.tensor([[3]]), position_ids=torch.tensor([[longest - 1]]))
    options |= {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": num_tokens}
    found = tuple(model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist())
    assert len(set(found)) >= num_tokens // 2, "the fixture repeats itself"
    return found


async def ask(engine, prompt, context=None, num_tokens=NEW_TOKENS):
    """The answer, and how many tokens of the prompt were held."""
    sampling = SamplingParams(max_tokens=num_tokens, ignore_end_token=True)
    stream = engine.submit(Prompt(context=context, token_ids=prompt, sampling=sampling))
    found, cached = (), 0
    async for event in stream:
        if isinstance(event, Tokens):
            found += event.token_ids
        if isinstance(event, Ended):
            cached = event.cached_tokens
    return found, cached


async def ingest(engine, context, token_ids, **options):
    _ = [event async for event in engine.ingest(DocumentPrompt(context=context, token_ids=token_ids, **options))]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("kind", "length", "world_size"),
    [
        ("llama3", 1200, 2),
        ("linear", 1200, 1),
        ("yarn", 1200, 3),
        ("longrope", 300, 1),
        ("longrope", 1200, 2),
        ("dynamic", 300, 2),
        ("dynamic", 1200, 3),
    ],
)
async def test_scaled_positions_answer_like_generate(scaled, kind, length, world_size):
    prompt = ids_of(length)
    total = length + NEW_TOKENS - 1
    expected = generate(scaled(kind), prompt, total if kind == "dynamic" and total > ORIGINAL else None)
    config = config_for(scaled(kind), world_size=world_size, chunk_size=500, allow_long=True)
    async with running(config) as engine:
        assert (await ask(engine, prompt))[0] == expected
        _ = [
            event
            async for event in engine.ingest(
                DocumentPrompt(context="book", token_ids=prompt[:-40], settings=ContextSettings(capacity=total))
            )
        ]
        await engine.fork_context("book", "fork", length - 50)
        assert (await ask(engine, prompt[-40:], "book"))[0] == expected
        assert (await ask(engine, prompt[-50:], "fork"))[0] == expected


@pytest.fixture(scope="module")
def phi(tmp_path_factory):
    """A Phi-3, whose `generate` drops its cache when the text becomes longer than BORDER."""
    folder = tmp_path_factory.mktemp("phi")
    make_checkpoint(folder, "phi3_long", seed=2)
    config = AutoConfig.from_pretrained(folder)
    config.rope_parameters |= {**KINDS["longrope"], "original_max_position_embeddings": BORDER}
    config.original_max_position_embeddings = BORDER
    config.save_pretrained(folder)
    return folder


def generate_with_logprobs(folder, prompt):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NEW_TOKENS}
    found = model.generate(torch.tensor([prompt]), output_logits=True, return_dict_in_generate=True, **options)
    tokens = tuple(found.sequences[0, len(prompt) :].tolist())
    steps = zip(found.logits, tokens, strict=True)
    return tokens, [float(logits_1V[0].log_softmax(-1)[token]) for logits_1V, token in steps]


async def answer_with_logprobs(engine, prompt, **options):
    """Tokens and logprobs; those of two samples, one after the other."""
    sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_end_token=True, num_logprobs=0)
    stream = engine.submit(Prompt(context=None, token_ids=prompt, sampling=sampling, num_samples=2, **options))
    events = [event async for event in stream if isinstance(event, Tokens)]
    found = [token for event in sorted(events, key=lambda event: event.sample) for token in event.tokens]
    return tuple(token.id for token in found), [token.logprobs.logprob for token in found]


CROSSING = [BORDER - NEW_TOKENS + 1, BORDER - NEW_TOKENS + 2, BORDER - 12, BORDER, BORDER + 1]
"""Lengths of prompts whose answers end just before the border and just behind it, cross it, or begin behind it."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("is_drafted", [False, True])
async def test_answers_cross_the_border_like_generate(phi, monkeypatch, world_size, is_drafted):
    """All in one batch: each is recomputed with the other factors when its own text becomes too long."""
    prompts = [ids_of(length, seed=length) for length in CROSSING]
    wanted = [generate_with_logprobs(phi, prompt) for prompt in prompts]
    drafter = KnowingDrafter(16, [answer for answer, _ in wanted], 0.8)
    if is_drafted:
        monkeypatch.setattr("coordinator.scheduling.scheduler.Drafter", lambda *_: drafter)
    async with running(config_for(phi, world_size=world_size, block_size=16, chunk_size=32)) as engine:
        found = await asyncio.gather(*(answer_with_logprobs(engine, prompt) for prompt in prompts))
        assert not any(engine.scaling_note(None, length, NEW_TOKENS) for length in CROSSING)
    for (answer, logprobs), (tokens, found_logprobs) in zip(wanted, found, strict=True):
        assert tokens == 2 * answer
        assert found_logprobs == pytest.approx(2 * logprobs, abs=1e-3)
    assert drafter.num_right > 100 or not is_drafted


@pytest.mark.parametrize("before", [1, MAX_TOKENS + 1])
async def test_what_is_behind_the_border_passes_verification(phi, before):
    async with running(config_for(phi, world_size=2, block_size=16)) as engine:
        found = await compare(engine, ids_of(BORDER - before))
    assert judge(found).passed
    assert found.equal_tokens == found.compared_tokens == (MAX_TOKENS if before > MAX_TOKENS else MAX_TOKENS - 2)


SHORT, LONG = None, 400
"""Capacities of contexts whose keys have the short factors, up to BORDER, and the long ones."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("capacity", "num_resident", "num_requested", "cached"),
    [
        (SHORT, 40, BORDER - NEW_TOKENS - 39, 40),
        (SHORT, 40, 40, 0),
        (SHORT, 40, BORDER - 39, 0),
        (LONG, 40, BORDER - NEW_TOKENS - 39, 0),
        (LONG, 40, 40, 0),
        (LONG, 40, BORDER - 39, 40),
    ],
)
async def test_questions_have_the_factors_of_their_length(phi, capacity, num_resident, num_requested, cached):
    """Keys with the other factors are recomputed: immediately, or when the answer becomes too long."""
    prompt = ids_of(num_resident + num_requested)
    settings = ContextSettings() if capacity is None else ContextSettings(capacity=capacity)
    async with running(config_for(phi, world_size=2, block_size=8, chunk_size=32)) as engine:
        await ingest(engine, "book", prompt[:num_resident], settings=settings)
        await engine.fork_context("book", "fork")
        assert engine.scaling_note("book", num_requested, NEW_TOKENS) == ""
        assert await ask(engine, prompt[num_resident:], "book") == (generate(phi, prompt), cached)
        view = engine.get_context("fork")
        assert view.positions.scaled_for == (BORDER + 1 if capacity else 0)
        assert (await ask(engine, prompt[num_resident:], "fork"))[0] == generate(phi, prompt)


@pytest.mark.extended
@pytest.mark.parametrize("capacity", [SHORT, LONG])
async def test_questions_have_the_factors_of_their_length_after_a_restore(phi, tmp_path, capacity):
    """Below the border, across it and behind it, by other ranks, for a context that was restored from storage."""
    prompt, settings = ids_of(120), ContextSettings() if capacity is None else ContextSettings(capacity=capacity)
    config = config_for(phi, block_size=8, chunk_size=32, kv_bytes=8 << 20)
    async with serving(tmp_path, replace(config, world_size=2)) as first:
        await ingest(first.engine, "book", prompt[:40], settings=settings)
        await first.save()
    async with serving(tmp_path, replace(config, world_size=3)) as second:
        assert second.engine.get_context("book").state == "evicted"
        requested = [prompt[40:end] for end in (60, 80, 120)]
        found = await asyncio.gather(*(ask(second.engine, question, "book") for question in requested))
        assert [tokens for tokens, _ in found] == [generate(phi, prompt[:40] + question) for question in requested]


async def test_a_text_that_is_not_copied_keeps_the_factors_of_the_context(phi):
    """Of which parts are hidden, for instance: its answer is not called exact."""
    prompt = ids_of(60)
    async with running(config_for(phi, world_size=2, block_size=8)) as engine:
        await ingest(engine, "long", prompt[:40], settings=ContextSettings(capacity=LONG))
        assert "from the first token" in engine.scaling_note("long", 20, 8, is_whole=False)
        sampling = SamplingParams(max_tokens=8, ignore_end_token=True)
        requested = Prompt(context="long", token_ids=prompt[40:], sampling=sampling, hidden=((3, 4),))
        [end] = [event async for event in engine.submit(requested) if isinstance(event, Ended)]
        assert end.cached_tokens == 40


async def test_max_tokens_does_not_change_what_comes_first(scaled):
    """This holds even where `generate` would continue with the keys of the other factors (Llama): the reference has no
    cache.
    """
    prompt = ids_of(ORIGINAL - 12)
    async with running(config_for(scaled("longrope"), world_size=2)) as engine:
        found = {most: (await ask(engine, prompt, num_tokens=most))[0] for most in (8, 13, 14, 24)}
        assert engine.scaling_note(None, len(prompt), 13) == ""
        assert "use_cache=False" in engine.scaling_note(None, len(prompt), 14)
    expected = generate(scaled("longrope"), prompt, num_tokens=24, use_cache=False)
    assert found == {most: expected[:most] for most in found}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
async def test_contexts_of_both_scalings_answer_in_one_batch_like_generate(scaled, kind):
    """The same tokens below and beyond the original length: transformers would rotate all by the longest."""
    near, far = ids_of(300), ids_of(300) + ids_of(900, seed=8)
    total = len(far) + NEW_TOKENS - 1
    wanted = [generate(scaled(kind), near), generate(scaled(kind), far, total if kind == "dynamic" else None)]
    async with running(config_for(scaled(kind), world_size=2, chunk_size=500, allow_long=True)) as engine:
        for _ in range(2):
            answers = await asyncio.gather(ask(engine, near), ask(engine, far))
            assert [tokens for tokens, _ in answers] == wanted
        assert [cached for _, cached in answers] == [len(near) - 1, len(far) - 1], "each found its resident prefix"
        assert (await ask(engine, far[:400]))[1] == 300, "shorter prompts share the keys with the short scaling"


async def test_a_context_keeps_its_rope_and_ends_at_its_capacity(scaled):
    prompt = ids_of(1200)
    async with running(config_for(scaled("longrope"), chunk_size=500)) as engine:
        await ingest(engine, "short", prompt[:400])
        await ingest(engine, "long", prompt[:400], settings=ContextSettings(capacity=2000))
        short, long = (engine.get_context(name).positions for name in ("short", "long"))
        assert (short.capacity, short.scaled_for, long.capacity, long.scaled_for) == (512, 0, 2000, 513)
        assert (short.rope, short.precision) == ("longrope", "float32")
        with pytest.raises(InvalidArgument, match="make 1,000; the context was created for 512 positions"):
            engine.ingest(DocumentPrompt(context="short", token_ids=prompt[400:1000], append=True))
        requested = [await ask(engine, prompt[400:450], name) for name in ("short", "long")]
        expected = generate(scaled("longrope"), prompt[:450])
        assert requested == [(expected, 400), (expected, 449)], (
            "the second finds the context and the question of the first"
        )
        await ingest(engine, "long", prompt[400:-20], append=True)
        assert (await ask(engine, prompt[-20:], "long"))[0] == generate(scaled("longrope"), prompt)
        assert (await engine.fork_context("long", "twig", 300)).positions.scaled_for == 513


async def test_beyond_the_trained_length_needs_permission(scaled):
    prompt = ids_of(600)
    async with running(config_for(scaled("dynamic"))) as engine:
        with pytest.raises(
            InvalidArgument, match=f"600 of input make 600; the model's limit is {ORIGINAL} .*--allow-long"
        ):
            await ask(engine, prompt)
        with pytest.raises(InvalidArgument, match=f"make 600; the model's limit is {ORIGINAL} .*--allow-long"):
            engine.ingest(DocumentPrompt(context="book", token_ids=prompt))
        assert engine.max_positions == ORIGINAL


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
async def test_a_prompt_may_be_as_long_as_the_model(scaled, kind):
    """And is rotated as it is: the token that follows it has no position yet."""
    prompt = ids_of(ORIGINAL)
    async with running(config_for(scaled(kind), chunk_size=500)) as engine:
        for given in (prompt, prompt[:-1]):
            num_tokens = ORIGINAL + 1 - len(given)
            wanted = generate(scaled(kind), given, num_tokens=num_tokens)
            assert (await ask(engine, given, num_tokens=num_tokens))[0] == wanted


async def test_float64_is_for_what_is_declared_long(scaled):
    """And gives the same text where float32 is good enough."""
    prompt = ids_of(1200)
    async with running(config_for(scaled("llama3"), world_size=2, allow_long=True)) as engine:
        await ingest(engine, "far", prompt[:-20], settings=ContextSettings(capacity=FLOAT32_POSITIONS + 1))
        await ingest(engine, "near", prompt[:-20])
        far, near = (engine.get_context(name).positions for name in ("far", "near"))
        assert (far.precision, near.precision) == ("float64", "float32")
        assert far.phase_error < 1e-11 < 1e-5 < near.phase_error
        requested = await asyncio.gather(*(ask(engine, prompt[-20:], name) for name in ("far", "near", "far")))
        assert [tokens for tokens, _ in requested] == [generate(scaled("llama3"), prompt)] * 3
        assert (await ask(engine, prompt))[1] == len(prompt) - 20, "short prompts share the keys with their rope"
        await engine.delete_context("near")


@torch.inference_mode()
def test_far_queries_match_adjacent_keys_only_in_float64(scaled):
    """A rotation is relative: the scores of a query and the keys just before it are the same wherever they lie."""
    model = AutoModelForCausalLM.from_pretrained(scaled("llama3"), dtype=torch.float32)
    ids = torch.tensor([ids_of(64)])
    ropes, _ = replace_rotary(model.base_model, model.config)
    found = {}
    for start in (0, 1_000_000, 8_000_000, 20_000_000):
        for is_double in (True, False):
            ropes.rows = {Rope(is_double=is_double): None}
            logits_TV = model(ids, position_ids=torch.arange(start, start + 64)[None]).logits[0]
            found[start, is_double] = logits_TV[-1]
    for start in (1_000_000, 8_000_000, 20_000_000):
        error, own_error = ((found[start, d] - found[0, True]).abs().max() for d in (True, False))
        assert error < 1e-3
        assert own_error > 10 * error
