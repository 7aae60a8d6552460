"""A service whose rank 0 samples as on a GPU answers like one that samples as on a CPU."""

import asyncio

import pytest

from coordinator.engine_messages import Prompt, Tokens
from longleaf.errors import NotFinite
from longleaf.sampling import SamplingParams
from tests.support.golden.plain import make_golden
from tests.support.golden.states import running
from tests.support.threads import config_for
from workers import rank as ranks
from workers.sampling.device_sampler import DeviceSampler
from workers.sampling.sampler import CpuSampler

SAMPLINGS = (
    SamplingParams(max_tokens=12, ignore_end_token=True),
    SamplingParams(max_tokens=20, ignore_end_token=True, temperature=0.8, top_p=0.9, seed=1, num_logprobs=3),
    SamplingParams(max_tokens=7, ignore_end_token=True, temperature=1.5, top_k=50, min_p=0.02, seed=2),
    SamplingParams(
        max_tokens=15, ignore_end_token=True, repetition_penalty=1.5, frequency_penalty=0.5, logit_bias={3: 4.0}
    ),
)


async def answers(golden, world_size, watch):
    """Ids, numbers of logprobs and finish reasons of concurrent prompts. The last bits of logprobs depend on the rows
    of a step."""
    config = config_for(golden.folder, world_size=world_size, chunk_size=300)

    async def ask(sampling):
        tokens = []
        try:
            async for event in engine.submit(Prompt(token_ids=golden.prompt[-200:], sampling=sampling, context=None)):
                found = event.tokens if isinstance(event, Tokens) else ()
                tokens += [(token.id, token.logprobs and len(token.logprobs.top)) for token in found]
        except NotFinite as error:
            return tokens, error.tokens
        return tokens, ""

    async with running(config, watch) as engine:
        return await asyncio.gather(*map(ask, SAMPLINGS * 2))


def spoil(rank):
    """One token of one sequence is chosen from logits that are NaN."""
    start = rank.sampler.start

    def spoilt(rows, logits_RV):
        logits_RV = logits_RV.clone()
        for i, row in enumerate(rows):
            if (row.sequence, row.token_index) == (2, 3):
                logits_RV[i, 5] = float("nan")
        return start(rows, logits_RV)

    rank.sampler.start = spoilt


@pytest.mark.sampled(1)
@pytest.mark.parametrize("world_size", [1, 3])
async def test_device_sampler_answers_equal_those_of_the_cpu_sampler(world_size, tmp_path, monkeypatch):
    golden, made = make_golden(tmp_path, "llama"), set()

    def watch(index, rank):
        made.add(type(rank.sampler))
        spoil(rank)

    wanted = await answers(golden, world_size, watch)
    monkeypatch.setattr(ranks, "make_sampler", lambda *_: DeviceSampler("cpu", 512))
    assert await answers(golden, world_size, watch) == wanted
    assert made == {CpuSampler, DeviceSampler}
    assert [len(tokens) for tokens, _ in wanted] == [12, 20, 3, 15, 12, 20, 7, 15]
    assert [error for _, error in wanted if error] == ["token 3 of the answer"]
