"""Answers with drafts equal those without, for any ranks, merge, chunks, history and sampling."""

import pytest
import torch
from msgspec.structs import replace

from coordinator.engine_messages import DocumentPrompt, Ended, Prompt, Tokens
from longleaf.sampling import SamplingParams
from tests.golden.test_generate import COVER
from tests.support.golden.knowing import KnowingDrafter
from tests.support.golden.plain import NEW_TOKENS
from tests.support.golden.states import STATES, running
from tests.support.thinned import thinned
from tests.support.threads import config_for

SAMPLINGS = (
    SamplingParams(max_tokens=NEW_TOKENS, ignore_end_token=True, num_logprobs=2),
    SamplingParams(max_tokens=NEW_TOKENS, ignore_end_token=True, temperature=0.9, top_p=0.95, seed=4, num_logprobs=2),
    SamplingParams(max_tokens=NEW_TOKENS, ignore_end_token=True, repetition_penalty=1.4, num_logprobs=2),
    SamplingParams(
        max_tokens=NEW_TOKENS, ignore_end_token=True, frequency_penalty=1.0, logit_bias={9: 1.0}, num_logprobs=2
    ),
)
LOGPROB_TOLERANCE = 1e-4


def drafting(monkeypatch, answers, share, block_size):
    """Has the engine that is made next draft so."""
    drafter = KnowingDrafter(block_size, answers, share)
    monkeypatch.setattr("coordinator.scheduling.scheduler.Drafter", lambda *_: drafter)
    return drafter


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "way"), thinned(COVER, 9))
async def test_tokens_equal_generate(goldens, monkeypatch, family, way):
    golden, (world_size, merge, chunk_size, state, prefill) = goldens(family), way
    config = config_for(golden.folder, world_size=world_size, merge=merge, chunk_size=chunk_size, prefill=prefill)
    drafter = drafting(monkeypatch, [golden.tokens], 0.8, config.block_size)
    async with running(config) as engine:
        answers = await STATES[state](engine, golden.prompt)
    assert answers == [golden.tokens] * len(answers)
    assert drafter.num_right > 0


async def ask_all(engine, prompt, samplings=SAMPLINGS):
    """All at once about one context: tokens, logprobs, ends."""
    _ = [event async for event in engine.ingest(DocumentPrompt(context="book", token_ids=prompt[:300]))]
    prompts = [
        Prompt(context="book", token_ids=prompt[300 + i : 330 + 5 * i], sampling=sampling)
        for i, sampling in enumerate(samplings)
    ]
    streams, found = [engine.submit(one) for one in prompts], []
    for stream in streams:
        events = [event async for event in stream]
        tokens = [token for event in events if isinstance(event, Tokens) for token in event.tokens]
        found.append((tokens, [event for event in events if isinstance(event, Ended)]))
    return found


def check_same(found, wanted):
    for (tokens, ends), (others, other_ends) in zip(found, wanted, strict=True):
        assert [token.id for token in tokens] == [token.id for token in others]
        logprobs = torch.tensor([[token.logprobs.logprob for token in each] for each in (tokens, others)])
        assert (logprobs[0] - logprobs[1]).abs().max() <= LOGPROB_TOLERANCE
        reported = [
            [(end.reason, end.completion_tokens, end.prompt_tokens) for end in each] for each in (ends, other_ends)
        ]
        assert reported[0] == reported[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(
    ("family", "world_size", "settings"),
    [
        ("llama", 1, {}),
        ("llama", 3, {"merge": "paper"}),
        ("gemma3", 2, {"window_keys": "replicated"}),
        ("deepseek_v3", 2, {}),
        ("lfm2", 2, {}),
    ],
)
async def test_answers_of_a_batch_are_those_without_drafts(goldens, monkeypatch, family, world_size, settings, share):
    golden = goldens(family)
    config = config_for(golden.folder, world_size=world_size, max_draft_tokens=0, **settings)
    async with running(config) as engine:
        wanted = await ask_all(engine, golden.prompt)
    answers = [[token.id for token in tokens] for tokens, _ in wanted]
    drafter = drafting(monkeypatch, answers, share, config.block_size)
    async with running(config) as engine:
        check_same(await ask_all(engine, golden.prompt), wanted)
    assert (drafter.num_right > 0) == (share > 0)
    assert (drafter.num_wrong > 0) == (share < 1)


async def test_an_answer_ends_where_it_would_have_ended(goldens, monkeypatch):
    """In the midst of drafts that are accepted."""
    golden = goldens("llama")
    config = config_for(golden.folder, world_size=2, max_draft_tokens=0)
    async with running(config) as engine:
        wanted = await ask_all(engine, golden.prompt)
    answers = [[token.id for token in tokens] for tokens, _ in wanted]
    ends = [answer[3 + i] for i, answer in enumerate(answers)]
    drafting(monkeypatch, answers, 1.0, config.block_size)
    samplings = [replace(sampling, stop_tokens=(end,)) for sampling, end in zip(SAMPLINGS, ends, strict=True)]
    async with running(config) as engine:
        found = await ask_all(engine, golden.prompt, samplings)
    for answer, end, (tokens, [ended]) in zip(answers, ends, found, strict=True):
        assert [token.id for token in tokens] == answer[: answer.index(end) + 1]
        assert (ended.reason, ended.completion_tokens) == ("stop_token", len(tokens))


async def test_answers_that_draft_are_compared_as_others(goldens, monkeypatch):
    golden = goldens("llama")
    config = config_for(golden.folder, world_size=2)
    sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_end_token=True)
    for share in (1.0, 0.6):
        drafter = drafting(monkeypatch, [golden.tokens], share, config.block_size)
        async with running(config) as engine:
            stream = engine.submit(Prompt(context=None, token_ids=golden.prompt, sampling=sampling, is_compared=True))
            [ended] = [event async for event in stream if isinstance(event, Ended)]
        comparison = ended.comparison
        assert not comparison.failure
        assert comparison.compared_tokens == comparison.equal_tokens == NEW_TOKENS
        assert comparison.max_difference <= 1e-3 * comparison.max_logit
        assert drafter.num_right > 0
