"""Weights of every numeric type: never further from float32 than twice what the plain model of that type is."""

import itertools

import pytest
import torch

from bench.families import FAMILIES
from coordinator.events import Prompt
from longleaf.sampling import Sampling
from tests.golden.conftest import load_plain
from tests.golden.states import ingest, running
from tests.golden.test_generate import LIVELY
from tests.threads import config_for

PROMPT, STEPS = 700, 24


@torch.inference_mode()
def plain_logits(golden, dtype=torch.float32):
    """Logits [STEPS, V] of the plain model after the prompt and each further token that the service is led to take."""
    ids = torch.tensor([golden.prompt[: PROMPT + STEPS - 1]])
    return load_plain(golden.folder, dtype)(ids, logits_to_keep=STEPS).logits[0].float()


async def served_logits(golden, held=(), **settings):
    """The same of the service: a prompt, then decode steps that are told which token to take.

    With `held` the prompt goes on from a fork of a context, in the middle of the last of the parts that end there.
    """
    seen = []

    def lead(_, rank):
        def choose(rows, logits_RV):
            seen.append(logits_RV[0].float())
            return [golden.prompt[PROMPT + len(seen) - 1]], {}

        rank._sampler.choose = choose

    sampling = Sampling(max_tokens=STEPS, ignore_end_token=True)
    async with running(config_for(golden.folder, chunk_size=320, **settings), lead) as engine:
        for start, end in itertools.pairwise((0, *held)):
            await ingest(engine, "book", golden.prompt[start:end])
        fork = "fork" if held else None
        num_held = engine.fork_context("book", "fork", held[-1] - 10).tokens if fork else 0
        prompt = Prompt(context=fork, token_ids=golden.prompt[num_held:PROMPT], sampling=sampling)
        _ = [event async for event in engine.submit(prompt)]
    return torch.stack(seen[:STEPS])


async def check_half_precision(golden, dtype):
    """With experts in the median over the steps: where two experts come close, rounding alone chooses the other one, in
    the plain model as well, and this step is then off by a hundred times as much."""
    exact, plain = plain_logits(golden), plain_logits(golden, getattr(torch, dtype))
    found = await served_logits(golden, world_size=3, dtype=dtype)
    has_experts = "expert" in (golden.folder / "config.json").read_text()
    for norm in (2, float("inf")):
        by_step = [torch.linalg.vector_norm(logits - exact, norm, dim=1) for logits in (found, plain)]
        error, allowed = (far.median() if has_experts else torch.linalg.vector_norm(far, norm) for far in by_step)
        assert error <= 2 * allowed


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", LIVELY)
async def test_half_precision_stays_close_to_the_plain_model(goldens, family, dtype):
    await check_half_precision(goldens(family), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in LIVELY])
async def test_half_precision_of_every_family(goldens, family, dtype):
    await check_half_precision(goldens(family), dtype)
