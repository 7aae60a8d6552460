"""Greedy text equals transformers' `generate` token for token, for any ranks, merge, chunks and history."""

import asyncio
import itertools
import math

import msgspec
import pytest
import torch

from coordinator.engine_messages import DocumentPrompt, Prompt, Tokens
from longleaf.attention import Partial
from longleaf.errors import RankLost
from longleaf.sampling import SamplingParams
from tests.support.golden.asking import answer
from tests.support.golden.plain import LIVELY, LOGIT_TOLERANCE, NEW_TOKENS, load_plain
from tests.support.golden.states import STATES, Logits, running
from tests.support.pairwise import pairwise_cover
from tests.support.thinned import thinned
from tests.support.threads import config_for
from workers.model import hook
from workers.model.hook import LayerCall
from zoo.checkpoints import PAD_IDS
from zoo.families import FAMILIES

WAYS = {
    "world_size": (1, 2, 3, 4),
    "merge": ("gather", "paper"),
    "chunk_size": (64, 300, 4096),
    "state": tuple(STATES),
    "prefill": ("auto", "queries", "keys"),
}


def full_product():
    """Every family at every world size in every state; the rest changes from row to row."""
    others = itertools.cycle(itertools.product(*(WAYS[name] for name in ("merge", "chunk_size", "prefill"))))
    for family, world_size, state in itertools.product(FAMILIES, WAYS["world_size"], WAYS["state"]):
        merge, chunk_size, prefill = next(others)
        yield family, world_size, merge, chunk_size, state, prefill


COVER = list(zip(FAMILIES * 2, itertools.cycle(pairwise_cover(list(WAYS.values()))), strict=False))
"""Every family twice. The first half, with every family and every way at least once, is in the default run."""


async def check_row(golden, world_size, merge, chunk_size, state, prefill):
    config = config_for(golden.folder, world_size=world_size, merge=merge, chunk_size=chunk_size, prefill=prefill)
    logits = Logits()
    async with running(config, logits.watch) as engine:
        answers = await STATES[state](engine, golden.prompt)
    assert answers == [golden.tokens] * len(answers)
    difference = (logits.first(NEW_TOKENS) - golden.logits_TV).abs().max()
    assert difference <= LOGIT_TOLERANCE * golden.logits_TV.std()


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("family", "way"), thinned(COVER, len(FAMILIES)))
async def test_tokens_equal_generate(goldens, family, way):
    await check_row(goldens(family), *way)


@pytest.mark.slow
@pytest.mark.parametrize(("family", *WAYS), list(full_product()))
async def test_tokens_equal_generate_in_the_full_product(
    goldens, family, world_size, merge, chunk_size, state, prefill
):
    await check_row(goldens(family), world_size, merge, chunk_size, state, prefill)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pad_token_id", PAD_IDS[1:])
@pytest.mark.parametrize("family", FAMILIES)
async def test_tokens_equal_generate_with_another_padding(goldens, family, pad_token_id):
    """Its embedding is zero, and it may be the first id. The tests above have the usual one."""
    await check_row(goldens(family, pad_token_id), 2, "gather", 300, "fresh", "auto")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "kernels"), [("llama", "torch"), ("gemma2", "dense"), ("deepseek_v3", "dense")])
async def test_tokens_equal_generate_with_other_kernels(goldens, family, kernels):
    golden = goldens(family)
    async with running(config_for(golden.folder, world_size=2, chunk_size=500, kernels=kernels)) as engine:
        assert {worker.kernels for worker in engine.cluster().workers} == {kernels}
        assert await answer(engine, golden.prompt) == golden.tokens


def test_the_cover_covers():
    for rows in (COVER, COVER[: len(FAMILIES)]):
        assert {family for family, _ in rows} == set(FAMILIES)
        assert {way for _, way in rows} == set(pairwise_cover(list(WAYS.values())))


@pytest.mark.parametrize("world_size", [1, 3])
async def test_penalties_and_logprobs_are_those_of_generate(goldens, world_size):
    """Penalties count the tokens of context, question and answer; logprobs are those of the plain logits."""
    golden = goldens("llama")
    prompt = golden.prompt[:150]
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NEW_TOKENS}
    penalties = {"repetition_penalty": 1.5, "sequence_bias": {(7,): 1.5}}
    model = load_plain(golden.folder)
    output_options = {"return_dict_in_generate": True, "output_logits": True}
    found = model.generate(torch.tensor([prompt]), **options, **penalties, **output_options)
    wanted = tuple(found.sequences[0, len(prompt) :].tolist())
    assert wanted != tuple(model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist())
    sampling = SamplingParams(
        max_tokens=NEW_TOKENS, ignore_end_token=True, repetition_penalty=1.5, logit_bias={7: 1.5}, num_logprobs=2
    )
    async with running(config_for(golden.folder, world_size=world_size, chunk_size=64)) as engine:
        _ = [event async for event in engine.ingest(DocumentPrompt(context="book", token_ids=prompt[:70]))]
        stream = engine.submit(Prompt(context="book", token_ids=prompt[70:], sampling=sampling))
        events = [event async for event in stream if isinstance(event, Tokens)]
    assert tuple(i for event in events for i in event.token_ids) == wanted
    reported = [token.logprobs for event in events for token in event.tokens]
    logprobs_TV = torch.log_softmax(torch.stack(found.logits)[:, 0].double(), dim=-1)
    chosen_T = logprobs_TV.gather(1, torch.tensor(wanted)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([e.logprob for e in reported]).double(), chosen_T, atol=1e-4, rtol=0)
    assert [[top.token_id for top in entry.top] for entry in reported] == logprobs_TV.topk(2).indices.tolist()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", LIVELY)
async def test_a_dropped_partial_is_noticed(goldens, family):
    """The tests above can fail: when one rank's partials are lost, the text changes."""
    golden = goldens(family)

    def spoil(number, rank):
        if number == 1:
            plain = rank.backend.attend

            def nothing(*inputs):
                partial = plain(*inputs)
                return Partial.identity(*partial.out_THD.shape)

            rank.backend.attend = nothing

    async with running(config_for(golden.folder, world_size=3, chunk_size=500), spoil) as engine:
        assert await answer(engine, golden.prompt) != golden.tokens


async def test_ranks_that_raise_end_the_answer_with_their_error(goldens):
    """No test that asks ranks in threads waits for an answer in vain."""

    def spoil(number, rank):
        def fail(*_):
            raise RuntimeError("this step cannot be done")

        rank.backend.attend = fail

    async with running(config_for(goldens("llama").folder, world_size=2), spoil) as engine, asyncio.timeout(20):
        with pytest.raises(RankLost, match="this step cannot be done"):
            await answer(engine, (5, 6, 7))


WRONG = {
    "cap lost": ("gemma2", lambda call: call._replace(softcap=None)),
    "sink lost": ("gpt_oss", lambda call: call._replace(sink_H=None)),
    "sink added twice": ("gpt_oss", lambda call: call._replace(sink_H=call.sink_H + math.log(2))),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("error", WRONG)
async def test_a_wrong_cap_or_sink_is_noticed(goldens, monkeypatch, error):
    family, wrong = WRONG[error]
    golden = goldens(family)
    monkeypatch.setattr(hook, "LayerCall", lambda *values: wrong(LayerCall(*values)))
    async with running(config_for(golden.folder, world_size=2)) as engine:
        assert await answer(engine, golden.prompt) != golden.tokens


async def test_samples_are_what_their_seeds_give_alone(goldens):
    """Penalties count each sample's own tokens, and nothing depends on the rest of the batch."""
    golden = goldens("llama")
    sampling = SamplingParams(max_tokens=20, temperature=1.5, seed=11, frequency_penalty=1.0, ignore_end_token=True)
    prompt = Prompt(context=None, token_ids=golden.prompt[:100], sampling=sampling, num_samples=3)
    async with running(config_for(golden.folder, world_size=2, chunk_size=64)) as engine:
        together = {sample: [] for sample in range(3)}
        async for event in engine.submit(prompt):
            if isinstance(event, Tokens):
                together[event.sample] += event.token_ids
        for sample in range(3):
            alone = msgspec.structs.replace(prompt, sampling=sampling.of_sample(sample), num_samples=1)
            events = [event async for event in engine.submit(alone) if isinstance(event, Tokens)]
            assert together[sample] == [i for event in events for i in event.token_ids]
    assert len(set(map(tuple, together.values()))) == 3


async def test_concurrent_generations_do_not_touch_each_other(goldens):
    golden = goldens("llama")
    async with running(config_for(golden.folder, world_size=2, chunk_size=700)) as engine:
        others = [answer(engine, golden.prompt[: 40 * i]) for i in range(1, 5)]
        first, *_, last = await asyncio.gather(answer(engine, golden.prompt), *others, answer(engine, golden.prompt))
    assert first == last == golden.tokens


async def test_a_deleted_context_gives_its_blocks_back(goldens):
    golden = goldens("smollm3")
    async with running(config_for(golden.folder, world_size=3, chunk_size=500)) as engine:
        for _ in range(3):
            assert await STATES["appended"](engine, golden.prompt) == [golden.tokens]
            await engine.delete_context("book")
        assert sum(worker.tokens for worker in engine.cluster().workers) == 0
