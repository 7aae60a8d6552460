"""Weights of every numeric type: never further from float32 than twice what the plain model of that type is."""

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM

from coordinator.events import Prompt
from longleaf.sampling import Sampling
from tests.golden.test_generate import FACTORS, running
from tests.threads import config_for
from workers.sampler import Sampler

PROMPT, STEPS = 700, 24


@torch.inference_mode()
def plain_logits(golden, dtype="float32"):
    """Logits [STEPS, V] of the plain model after the prompt and each further token of float32's answer."""
    model = AutoModelForCausalLM.from_pretrained(golden.folder, dtype=getattr(torch, dtype))
    ids = torch.tensor([golden.prompt[: PROMPT + STEPS - 1]])
    return model(ids, logits_to_keep=STEPS).logits[0].float()


async def served_logits(golden, monkeypatch, held=(), **settings):
    """The same of the service: a prompt, then decode steps that are told which token to take.

    With `held` the prompt goes on from a fork of a context, in the middle of the last of the parts that end there.
    """
    seen = []

    def choose(sampler, rows, logits_RV):
        seen.append(logits_RV[0].float())
        return [golden.prompt[PROMPT + len(seen) - 1]], {}

    monkeypatch.setattr(Sampler, "choose", choose)
    sampling = Sampling(max_tokens=STEPS, ignore_end_token=True)
    async with running(config_for(golden.folder, chunk_size=320, **settings)) as engine:
        for start, end in itertools.pairwise((0, *held)):
            _ = [event async for event in engine.ingest("book", golden.prompt[start:end], append=start > 0)]
        fork = "fork" if held else None
        num_held = engine.fork_context("book", "fork", held[-1] - 10).tokens if fork else 0
        prompt = Prompt(context=fork, token_ids=golden.prompt[num_held:PROMPT], sampling=sampling)
        _ = [event async for event in engine.submit(prompt)]
    return torch.stack(seen[:STEPS])


def assert_at_most_twice(found, plain, exact):
    for norm in (2, float("inf")):
        error, allowed = (torch.linalg.vector_norm(logits - exact, norm) for logits in (found, plain))
        assert error <= 2 * allowed


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FACTORS["family"])
async def test_half_precision_stays_close_to_the_plain_model(goldens, monkeypatch, family, dtype):
    golden = goldens(family)
    exact, plain = plain_logits(golden), plain_logits(golden, dtype)
    found = await served_logits(golden, monkeypatch, world_size=3, dtype=dtype)
    assert_at_most_twice(found, plain, exact)
