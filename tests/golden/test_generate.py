"""Greedy text equals transformers' `generate` token for token, whatever the ranks, merge, chunks and history."""

import asyncio
import contextlib
import itertools
import math
import random

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from coordinator.engine import Engine
from coordinator.events import Prompt, Tokens
from longleaf.attention import Partial
from longleaf.errors import ModelRefused
from longleaf.sampling import Sampling
from tests.golden.conftest import NEW_TOKENS
from tests.threads import ThreadRanks, config_for
from workers import hook
from workers.hook import LayerCall
from workers.sampler import Sampler

FACTORS = {
    "family": ("llama", "qwen3", "mistral", "smollm3", "gemma2", "gpt_oss"),
    "world_size": (1, 2, 3, 4),
    "merge": ("gather", "paper"),
    "chunk_size": (64, 500, 4096),
    "history": ("fresh", "kept", "appended", "questioned"),
    "prefill": ("auto", "queries", "keys"),
}


def pairwise_cover():
    """A few combinations in which every two values of two factors meet, chosen greedily with a fixed seed."""
    product = list(itertools.product(*FACTORS.values()))
    random.Random(0).shuffle(product)

    def pairs(row):
        return set(itertools.combinations(enumerate(row), 2))

    missing = set().union(*map(pairs, product))
    while missing:
        best = max(product, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        yield best


COVER = list(pairwise_cover())
OTHERS = itertools.product(*(values for name, values in FACTORS.items() if name != "prefill"))
REST = [(*row, prefill) for row, prefill in zip(OTHERS, itertools.cycle(FACTORS["prefill"]), strict=False)]
REST = [row for row in REST if row not in COVER]


def watch_logits(monkeypatch):
    """A list that gets the logits [V] of the first row of each step, which is greedy."""
    seen = []

    def choose(sampler, rows, logits_RV):
        seen.append(logits_RV[0].float())
        return logits_RV.argmax(dim=-1).tolist(), {}

    monkeypatch.setattr(Sampler, "choose", choose)
    return seen


async def answer(engine, prompt, context=None):
    stream = engine.submit(
        Prompt(
            context=context,
            token_ids=prompt,
            sampling=Sampling(max_tokens=NEW_TOKENS, ignore_end_token=True),
        )
    )
    return tuple([t async for event in stream if isinstance(event, Tokens) for t in event.token_ids])


async def ask_with_history(engine, prompt, history):
    """The answers to the same prompt, given in the way that `history` says."""
    if history == "fresh":
        return [await answer(engine, prompt)]
    # a question shorter than replicate_below runs as replicated rows, a longer one through a chunk of its own
    bounds = {"kept": (2900,), "appended": (1111, 1120, 2900), "questioned": (2981,)}[history]
    for start, end in itertools.pairwise((0, *bounds)):
        _ = [event async for event in engine.ingest("book", prompt[start:end], append=start > 0)]
    answers = [await answer(engine, prompt[bounds[-1] :], "book")]
    if history == "kept":
        await answer(engine, prompt[:70], "book")
        answers.append(await answer(engine, prompt[2900:], "book"))
    return answers


@contextlib.asynccontextmanager
async def running(config, spoil=None):
    engine = Engine(ThreadRanks(config, spoil), config, max_positions=8192)
    await engine.start()
    loop = asyncio.create_task(engine.run())
    try:
        yield engine
        engine.check()
    finally:
        await engine.close()
        await asyncio.gather(loop, return_exceptions=True)


async def check_row(golden, world_size, merge, chunk_size, history, prefill):
    config = config_for(golden.folder, world_size=world_size, merge=merge, chunk_size=chunk_size, prefill=prefill)
    async with running(config) as engine:
        answers = await ask_with_history(engine, golden.prompt, history)
    assert answers == [golden.tokens] * len(answers)


@pytest.mark.parametrize(tuple(FACTORS), COVER)
async def test_tokens_equal_generate(goldens, family, world_size, merge, chunk_size, history, prefill):
    await check_row(goldens(family), world_size, merge, chunk_size, history, prefill)


@pytest.mark.slow
@pytest.mark.parametrize(tuple(FACTORS), REST)
async def test_tokens_equal_generate_in_the_full_product(
    goldens, family, world_size, merge, chunk_size, history, prefill
):
    await check_row(goldens(family), world_size, merge, chunk_size, history, prefill)


@pytest.mark.parametrize(
    ("family", "world_size", "merge"), [(f, 3, "gather") for f in FACTORS["family"]] + [("llama", 4, "paper")]
)
async def test_last_logits_are_within_1e_4(goldens, family, world_size, merge, monkeypatch):
    golden, seen = goldens(family), watch_logits(monkeypatch)
    async with running(config_for(golden.folder, world_size=world_size, merge=merge, chunk_size=500)) as engine:
        await answer(engine, golden.prompt)
    torch.testing.assert_close(seen[0], golden.logits_V, atol=1e-4, rtol=0)


@pytest.mark.parametrize("world_size", [1, 3])
async def test_penalties_and_logprobs_are_those_of_generate(goldens, world_size):
    """Penalties count the tokens of context, question and answer; logprobs are told of the plain logits."""
    golden = goldens("llama")
    prompt = golden.prompt[:150]
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NEW_TOKENS}
    penalties = {"repetition_penalty": 1.5, "sequence_bias": {(7,): 1.5}}
    model = AutoModelForCausalLM.from_pretrained(golden.folder, dtype=torch.float32)
    tell = {"return_dict_in_generate": True, "output_logits": True}
    found = model.generate(torch.tensor([prompt]), **options, **penalties, **tell)
    wanted = tuple(found.sequences[0, len(prompt) :].tolist())
    assert wanted != tuple(model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist())
    sampling = Sampling(
        max_tokens=NEW_TOKENS, ignore_end_token=True, repetition_penalty=1.5, logit_bias={7: 1.5}, num_logprobs=2
    )
    async with running(config_for(golden.folder, world_size=world_size, chunk_size=64)) as engine:
        _ = [event async for event in engine.ingest("book", prompt[:70], append=False)]
        stream = engine.submit(Prompt(context="book", token_ids=prompt[70:], sampling=sampling))
        events = [event async for event in stream if isinstance(event, Tokens)]
    assert tuple(i for event in events for i in event.token_ids) == wanted
    told = [entry for event in events for entry in event.logprobs]
    logprobs_TV = torch.log_softmax(torch.stack(found.logits)[:, 0].double(), dim=-1)
    chosen_T = logprobs_TV.gather(1, torch.tensor(wanted)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([e.logprob for e in told]).double(), chosen_T, atol=1e-4, rtol=0)
    assert [[top.token_id for top in entry.top] for entry in told] == logprobs_TV.topk(2).indices.tolist()


@pytest.mark.parametrize("family", FACTORS["family"])
async def test_a_dropped_partial_is_noticed(goldens, family):
    """The tests above can fail: when one rank's partials are lost, the text changes."""
    golden = goldens(family)

    def spoil(number, rank):
        if number == 1:
            plain = rank._kernel

            def nothing(*inputs):
                partial = plain(*inputs)
                return Partial.identity(*partial.out_THD.shape)

            rank._kernel = nothing

    async with running(config_for(golden.folder, world_size=3, chunk_size=500), spoil) as engine:
        assert await answer(engine, golden.prompt) != golden.tokens


WRONG = {
    "cap lost": ("gemma2", lambda call: call._replace(softcap=None)),
    "sink lost": ("gpt_oss", lambda call: call._replace(sink_H=None)),
    "sink added twice": ("gpt_oss", lambda call: call._replace(sink_H=call.sink_H + math.log(2))),
}


@pytest.mark.parametrize("error", WRONG)
async def test_a_wrong_cap_or_sink_is_noticed(goldens, monkeypatch, error):
    family, wrong = WRONG[error]
    golden = goldens(family)
    monkeypatch.setattr(hook, "LayerCall", lambda *values: wrong(LayerCall(*values)))
    async with running(config_for(golden.folder, world_size=2)) as engine:
        assert await answer(engine, golden.prompt) != golden.tokens


async def test_samples_are_what_their_seeds_give_alone(goldens):
    """Penalties, too, count each sample's own tokens, and nothing depends on what else is in the batch."""
    golden = goldens("llama")
    sampling = Sampling(max_tokens=20, temperature=1.5, seed=11, frequency_penalty=1.0, ignore_end_token=True)
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
            assert await ask_with_history(engine, golden.prompt, "appended") == [golden.tokens]
            engine.delete_context("book")
        assert sum(worker.tokens for worker in engine.cluster().workers) == 0


def test_a_model_that_ignores_the_hook_is_refused(tmp_path):
    from transformers import BloomConfig, BloomForCausalLM

    from workers import model

    BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2)).save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="0 of 2 layers"):
        model.load(str(tmp_path), "float32", "cpu")


@pytest.mark.parametrize(
    "feature",
    [{"position_bias": torch.zeros(3, 3)}, {"sinks": torch.zeros(2)}, {"s_aux": torch.zeros(3, 2)}],
    ids=lambda feature: next(iter(feature)),
)
def test_attention_that_would_be_wrong_is_refused(feature):
    from workers.model import Probe

    module = torch.nn.Module()
    module.layer_idx = 0
    q, k = torch.zeros(1, 2, 3, 8), torch.zeros(1, 1, 3, 8)
    hook.attention(module, q, k, k, None, step=Probe(), softcap=3.0, s_aux=torch.zeros(2))
    with pytest.raises(ModelRefused, match="not supported"):
        hook.attention(module, q, k, k, None, step=Probe(), **feature)
