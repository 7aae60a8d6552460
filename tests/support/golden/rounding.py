"""The distance of half-precision logits from float32 logits, and the rounding error of the plain model."""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from coordinator.engine_messages import Prompt
from longleaf.sampling import Sampling, Token
from tests.support.golden.asking import ingest
from tests.support.golden.plain import Golden, load_plain
from tests.support.golden.states import running
from tests.support.threads import config_for


class Length(NamedTuple):
    """The tokens of a prompt and its continuation; both are prefixes of a golden prompt."""

    prompt: int
    steps: int


USUAL = Length(700, 24)
ALLOWED = 2.0
"""The maximum error of the service as a multiple of the plain model's error."""


@torch.inference_mode()
def plain_logits(golden: Golden, dtype: str = "float32", length: Length = USUAL) -> Tensor:
    """Logits [T, V] of the plain model after the prompt and each further token that the service is led to take."""
    ids = torch.tensor([golden.prompt[: length.prompt + length.steps - 1]])
    return load_plain(golden.folder, getattr(torch, dtype))(ids, logits_to_keep=length.steps).logits[0].float()


async def served_logits(golden: Golden, prefix=(), length: Length = USUAL, **settings) -> Tensor:
    """The logits of the service: a prompt, then decode steps with given tokens.

    With `prefix`, the prompt continues a fork of a context, in the middle of the last of the parts that end there.
    """
    seen = []

    def lead(_, rank):
        def choose(rows, logits_RV):
            seen.append(logits_RV[0].float())
            return [Token(golden.prompt[length.prompt + len(seen) - 1])]

        rank.sampler.choose = choose

    sampling = Sampling(max_tokens=length.steps, ignore_end_token=True)
    async with running(config_for(golden.folder, **{"chunk_size": 320, **settings}), lead) as engine:
        for start, end in itertools.pairwise((0, *prefix)):
            await ingest(engine, "book", golden.prompt[start:end])
        fork = "fork" if prefix else None
        num_resident = (await engine.fork_context("book", "fork", prefix[-1] - 10)).tokens if fork else 0
        prompt = Prompt(context=fork, token_ids=golden.prompt[num_resident : length.prompt], sampling=sampling)
        _ = [event async for event in engine.submit(prompt)]
    return torch.stack(seen[: length.steps])


def ratio(golden: Golden, found: Tensor, plain: Tensor, exact: Tensor) -> float:
    """The error of the service over that of the plain model, in the Euclidean or the largest distance.

    With experts the median over the steps: where two experts are close, rounding can select the other one, in the plain
    model as well, and the error of this step is then a hundred times as large.
    """
    has_experts = "expert" in (golden.folder / "config.json").read_text()

    def distance(logits: Tensor, norm: float) -> Tensor:
        by_step = torch.linalg.vector_norm(logits - exact, norm, dim=1)
        return by_step.median() if has_experts else torch.linalg.vector_norm(by_step, norm)

    return max(float(distance(found, norm) / distance(plain, norm)) for norm in (2.0, torch.inf))
