"""An answer that was interrupted and resumed in another engine equals the uninterrupted one, token for token."""

import pytest

from coordinator.engine_messages import Prompt, Tokens
from longleaf.sampling import Sampling
from tests.support.golden.asking import ingest
from tests.support.golden.plain import NEW_TOKENS
from tests.support.golden.states import running
from tests.support.thinned import thinned
from tests.support.threads import config_for

CONTEXT_TOKENS = 900
"""Tokens of the prompt that a context holds, where there is one."""
CUTS = ((0, 1), (1, 9), (14, None), (NEW_TOKENS - 1, 3))
"""Delivered tokens of each of two samples; None: all of them."""
SAMPLINGS = {
    "greedy": {},
    "penalised": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "seeded": {"temperature": 0.9, "seed": 7, "top_k": 40, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
}
WAYS = (("llama", 1, "plain"), ("gemma3", 3, "context"), ("deepseek_v3", 2, "plain"), ("gpt_oss", 2, "context"))
COVER = [(*WAYS[i % 4], list(SAMPLINGS)[i % 3]) for i in range(12)]
"""Every way with every sampling; the first ones have each once at least."""


async def read(engine, prompt):
    """Tokens by sample; the indices continue after the delivered ones."""
    reported = dict.fromkeys(range(prompt.num_samples), ()) if prompt.generated is None else prompt.generated
    found = {sample: [] for sample in reported}
    async for event in engine.submit(prompt):
        if isinstance(event, Tokens):
            assert event.index == len(reported[event.sample]) + len(found[event.sample])
            found[event.sample] += event.tokens
    return found


async def prompt_in(engine, golden, state, options):
    context = None if state == "plain" else "book"
    if context is not None:
        await ingest(engine, context, golden.prompt[:CONTEXT_TOKENS])
    requested = golden.prompt if context is None else golden.prompt[CONTEXT_TOKENS:]
    sampling = Sampling(max_tokens=NEW_TOKENS, ignore_end_token=True, num_logprobs=2, **options)
    return Prompt(context=context, token_ids=requested, sampling=sampling, num_samples=2)


def check_same(found, wanted):
    assert [token.id for token in found] == [token.id for token in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-3)
        assert len(one.logprobs.top) == len(other.logprobs.top) == 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("family", "world_size", "state", "sampling"), thinned(COVER, 4))
async def test_an_answer_goes_on_in_another_engine(goldens, family, world_size, state, sampling):
    golden, options = goldens(family), SAMPLINGS[sampling]
    config = config_for(golden.folder, world_size=world_size)
    async with running(config) as engine:
        wanted = await read(engine, await prompt_in(engine, golden, state, options))
    if not options:
        assert [token.id for token in wanted[0]] == list(golden.tokens)
    async with running(config) as engine:
        whole = await prompt_in(engine, golden, state, options)
        for counts in CUTS:
            reported = {sample: count for sample, count in enumerate(counts) if count is not None}
            generated = {sample: [token.id for token in wanted[sample][:count]] for sample, count in reported.items()}
            prompt = Prompt(
                context=whole.context,
                token_ids=whole.token_ids,
                sampling=whole.sampling,
                num_samples=2,
                generated=generated,
            )
            found = await read(engine, prompt)
            assert found.keys() == reported.keys()
            for sample, count in reported.items():
                check_same(found[sample], wanted[sample][count:])
