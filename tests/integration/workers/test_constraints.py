"""Constrained answers of real ranks, against masks that share no code with the engine of the product."""

import asyncio
import json
import random
import re
from itertools import product

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer

from coordinator.engine_messages import Ended, Prompt, Tokens
from coordinator.grammars.source import grammar_of
from coordinator.scheduling.speculation import Drafter
from longleaf.errors import InvalidArgument
from longleaf.grammars.vocabulary import read_vocabulary
from longleaf.sampling import SamplingParams
from longleaf.types import json_schema, regex
from tests.support.golden.knowing import KnowingDrafter
from tests.support.golden.plain import draw_ids, load_plain, make_golden
from tests.support.golden.states import running
from tests.support.random_drafter import RandomPolicy
from tests.support.threads import config_for
from workers import rank as ranks
from workers.sampling.device_sampler import DeviceSampler

END = 1
"""The end token of the checkpoints."""
PATTERN = r"(no|yes|maybe){1,2}[xyz]?!?"
WORDS = ("no", "yes", "maybe")
LANGUAGE = frozenset(
    "".join(words) + letter + mark
    for count in (1, 2)
    for words in product(WORDS, repeat=count)
    for letter in ("", *"xyz")
    for mark in ("", "!")
)
"""All texts that PATTERN matches."""
PREFIXES = frozenset(text[:end] for text in LANGUAGE for end in range(len(text) + 1))
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": -50, "maximum": 50}, "b": {"enum": ["p", "q", None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    return make_golden(tmp_path_factory.mktemp("model"), "llama")


def test_language_is_that_of_the_pattern():
    assert all(re.fullmatch(PATTERN, text) for text in LANGUAGE)


def token_texts(golden):
    tokenizer = Tokenizer.from_file(str(golden.folder / "tokenizer.json"))
    return [tokenizer.decode([i]) for i in range(512)], tokenizer


@torch.inference_mode()
def masked_by_hand(golden, prompt, bias):
    """The greedy answer of transformers' model where a token is masked unless the text can become one of LANGUAGE."""
    model, ids, text = load_plain(golden.folder), list(prompt), ""
    texts, _ = token_texts(golden)
    while True:
        logits_V = model(torch.tensor([ids])).logits[0, -1].double()
        for token_id, added in bias.items():
            logits_V[token_id] += added
        allowed = [bool(each) and text + each in PREFIXES for each in texts]
        allowed[END] = text in LANGUAGE
        logits_V[~torch.tensor(allowed)] = -torch.inf
        ids.append(int(logits_V.argmax()))
        text += "" if ids[-1] == END else texts[ids[-1]]
        if ids[-1] == END or not any(other != text and other.startswith(text) for other in LANGUAGE):
            return ids[len(prompt) :], text


async def ask(engine, golden, prompt, grammar, num_samples=1, max_drafts=0, **sampling):
    """Token ids, logprobs and the finish reason of each sample."""
    params = SamplingParams(**{"max_tokens": 40, **sampling})
    request = Prompt(
        token_ids=prompt,
        sampling=params,
        context=None,
        grammar=grammar,
        end_tokens=frozenset({END}),
        num_samples=num_samples,
        max_draft_tokens=max_drafts,
    )
    tokens, reasons = [[] for _ in range(num_samples)], [""] * num_samples
    async for event in engine.submit(request):
        if isinstance(event, Tokens):
            tokens[event.sample] += event.tokens
        if isinstance(event, Ended):
            reasons[event.sample] = event.reason
    return [([token.id for token in each], each, reason) for each, reason in zip(tokens, reasons, strict=True)]


@pytest.fixture(params=["cpu", "device"])
def sampler(request, monkeypatch):
    if request.param == "device":
        monkeypatch.setattr(ranks, "make_sampler", lambda *given: DeviceSampler("cpu", 512, given[-1]))
    return request.param


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world_size", [1, 2])
async def test_greedy_answers_equal_those_of_masked_logits(golden, world_size, sampler):
    config, grammar = config_for(golden.folder, world_size=world_size, chunk_size=300), grammar_of(regex(PATTERN))
    prompts = [golden.prompt[:40], golden.prompt[100:150], draw_ids(30, 3), draw_ids(30, 4)]
    biases = [{}, {}, {END: -50.0}, {END: 50.0}]
    async with running(config) as engine:
        found = await asyncio.gather(
            *(ask(engine, golden, p, grammar, logit_bias=b) for p, b in zip(prompts, biases, strict=True))
        )
    for prompt, bias, [(ids, _, reason)] in zip(prompts, biases, found, strict=True):
        wanted, text = masked_by_hand(golden, prompt, bias)
        assert ids == wanted
        assert text in LANGUAGE
        assert reason == ("end_token" if ids[-1] == END else "stop")
    assert {reason for [(_, _, reason)] in found} == {"end_token", "stop"}


async def test_logprobs_are_those_of_the_model(golden, sampler):
    grammar, prompt = grammar_of(regex(PATTERN)), golden.prompt[:40]
    async with running(config_for(golden.folder, world_size=1)) as engine:
        [(ids, tokens, _)] = await ask(engine, golden, prompt, grammar, num_logprobs=2)
    logits_TV = load_plain(golden.folder)(torch.tensor([[*prompt, *ids[:-1]]])).logits[0, len(prompt) - 1 :]
    wanted_TV = torch.log_softmax(logits_TV.double(), dim=-1).detach()
    for index, token in enumerate(tokens):
        top = wanted_TV[index].topk(2)
        assert token.logprobs.logprob == pytest.approx(float(wanted_TV[index, token.id]), abs=1e-3)
        assert [each.token_id for each in token.logprobs.top] == top.indices.tolist()


async def test_unconstrained_answers_are_unchanged_beside_constrained_ones(golden, sampler):
    samplings = [
        {"temperature": 0.8, "top_p": 0.9, "seed": 1, "num_logprobs": 3},
        {"temperature": 1.5, "top_k": 50, "min_p": 0.02, "seed": 2},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
        {},
    ]
    config, grammar = config_for(golden.folder, world_size=1), grammar_of(json_schema(SCHEMA))
    prompts = [golden.prompt[: 50 + i] for i in range(len(samplings))]
    async with running(config) as engine:
        free = [ask(engine, golden, p, "", ignore_end_token=True, **s) for p, s in zip(prompts, samplings, strict=True)]
        alone = await asyncio.gather(*free)
        free = [ask(engine, golden, p, "", ignore_end_token=True, **s) for p, s in zip(prompts, samplings, strict=True)]
        bound = [ask(engine, golden, p, grammar, **s) for p, s in zip(prompts, samplings, strict=True)]
        beside = await asyncio.gather(*free, *bound)
    assert [each[0][0] for each in beside[: len(free)]] == [each[0][0] for each in alone]


async def test_sampled_answers_validate(golden, sampler):
    """With samples, penalties and filters. In some steps fewer tokens are allowed than top-k keeps."""
    _, tokenizer = token_texts(golden)
    grammar, validator = grammar_of(json_schema(SCHEMA)), jsonschema.Draft202012Validator(SCHEMA)
    samplings = [
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 2},
        {"temperature": 1.5, "min_p": 0.05, "repetition_penalty": 1.2, "seed": 3, "num_logprobs": 1},
        {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 1.0, "top_k": 5, "seed": 4},
    ]
    async with running(config_for(golden.folder, world_size=1)) as engine:
        found = await asyncio.gather(
            *(ask(engine, golden, golden.prompt[:60], grammar, 4, max_tokens=200, **each) for each in samplings)
        )
        again = await ask(engine, golden, golden.prompt[:60], grammar, 4, max_tokens=200, **samplings[1])
    finished = [ids for answers in found for ids, _, reason in answers if reason != "length"]
    assert len(finished) >= 8
    for ids in finished:
        validator.validate(json.loads(tokenizer.decode(ids)))
    assert [each[0] for each in again] == [each[0] for each in found[1]]
    assert len({tuple(ids) for answers in found for ids, _, _ in answers}) > 8


async def test_answer_that_becomes_too_complex_ends_alone(golden, sampler):
    """With an error that names the constraint; an answer in the same steps continues."""
    hostile, grammar = grammar_of(regex("(a{1,1000}){1,1000}")), grammar_of(regex("b{40}"))
    async with running(config_for(golden.folder, world_size=1)) as engine:
        alone = ask(engine, golden, golden.prompt[:40], hostile, max_tokens=900, logit_bias={END: -100.0})
        beside = ask(engine, golden, golden.prompt[:40], grammar, max_tokens=60)
        failed, [(ids, _, reason)] = await asyncio.gather(alone, beside, return_exceptions=True)
    assert isinstance(failed, InvalidArgument)
    assert failed.field == "constraint"
    assert "lexer error: too many expressions constructed" in failed.description
    _, tokenizer = token_texts(golden)
    assert (tokenizer.decode(ids), reason) == ("b" * 40, "stop")


@pytest.mark.parametrize(("share", "most", "world_size"), [(0.8, 24, 2), (1.0, 24, 1), (0.5, 40, 1)])
async def test_drafts_do_not_change_constrained_answers(golden, sampler, monkeypatch, share, most, world_size):
    """Right and wrong drafts, drafts that the grammar refuses, and drafts behind the end of the answer."""
    grammars = [grammar_of(regex(PATTERN)), grammar_of(json_schema(SCHEMA)), grammar_of(regex("(ab|ba){3,9}c"))]
    samplings = [
        {},
        {"temperature": 1.0, "seed": 1},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "temperature": 0.8, "seed": 2},
    ]
    config = config_for(golden.folder, world_size=world_size, block_size=16)
    questions = [(golden.prompt[: 40 + i], grammar, each) for i, each in enumerate(samplings) for grammar in grammars]

    async def answers():
        async with running(config) as engine:
            requests = [ask(engine, golden, p, g, max_tokens=most, **each) for p, g, each in questions]
            return [(ids, reason) for [(ids, _, reason)] in await asyncio.gather(*requests)]

    wanted = await answers()
    drafter = KnowingDrafter(config.block_size, [[*ids, END, 7, 7] for ids, _ in wanted], share)
    monkeypatch.setattr("coordinator.scheduling.scheduler.Drafter", lambda *_: drafter)
    assert await answers() == wanted
    assert drafter.num_right > 20
    assert drafter.num_wrong > 0


async def test_failure_behind_drafts_is_that_of_the_grammar(golden, sampler, monkeypatch):
    hostile = grammar_of(regex("(a{1,1000}){1,1000}"))
    config = config_for(golden.folder, world_size=1)
    drafter = KnowingDrafter(config.block_size, [[token_texts(golden)[0].index("a")] * 900], 1.0)
    monkeypatch.setattr("coordinator.scheduling.scheduler.Drafter", lambda *_: drafter)
    async with running(config) as engine:
        with pytest.raises(InvalidArgument, match="too many expressions constructed"):
            await ask(engine, golden, golden.prompt[:40], hostile, max_tokens=900, logit_bias={END: -100.0})


async def test_forced_text_is_drafted(golden, sampler, monkeypatch):
    """Where the model divides it into the same tokens, several are accepted in a step."""
    text = "the answer is no and the reason is none"
    config, vocabulary = config_for(golden.folder, world_size=2, block_size=16), read_vocabulary(golden.folder)
    divided = vocabulary.tokens.greedy_tokenize(text)
    options = {"max_drafts": 7, "max_tokens": 60, "logit_bias": dict.fromkeys(divided, 50.0)}
    drafter = Drafter(64, 7, config.block_size)
    drafter._policy = RandomPolicy(random.Random(0))
    counts = []
    for _ in range(2):
        async with running(config) as engine:
            answers = [ask(engine, golden, golden.prompt[:40], grammar_of(regex(f"{text}(!|[?])")), **options)]
            answers.append(ask(engine, golden, golden.prompt[:50], grammar_of(regex(PATTERN))))
            counts.append([(ids, reason) for [(ids, _, reason)] in await asyncio.gather(*answers)])
            drafted = engine._scheduler.drafts
        monkeypatch.setattr("coordinator.scheduling.scheduler.Drafter", lambda *_: drafter)
    assert counts[0] == counts[1]
    assert drafted.num_accepted >= 8
