"""Tokens that the device chooses, against those that a CPU chooses from the same logits."""

from contextlib import nullcontext
from itertools import chain

import torch

from bench.gpu import ground
from tests.gpu.place import Place

NUM_STEPS = 5
TOLERANCE = 1e-9
"""Of a logprob, in float64."""


def tokens_of_the_cpu(place: Place) -> None:
    """Of rows of all kinds together, one of which breaks; and once begun nothing waits until tokens are asked for."""
    ground.need(ground.NEEDED_BY_RANKS)
    from longleaf.rank_protocol.step import PenaltyHistory, Row, SamplingTerms
    from longleaf.sampling import SamplingParams
    from workers.sampling.device_sampler import DeviceSampler
    from workers.sampling.sampler import Sampler

    kinds = (
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9, num_logprobs=5, seed=1),
        SamplingParams(temperature=1.0, top_k=40, min_p=0.02, seed=2),
        SamplingParams(temperature=0.8, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1, seed=3),
        SamplingParams(logit_bias={3: 5.0}, num_logprobs=0),
    )
    num_rows, size = 8 * len(kinds), 152_000 if place.is_gpu else 700
    here, there = DeviceSampler(place.device, 64), Sampler()
    for step in range(NUM_STEPS):
        terms = (
            [SamplingTerms(kind, PenaltyHistory((1, 2, 3), ())) for kind in kinds * 8]
            if step == 0
            else [None] * num_rows
        )
        rows = [Row(i, (0,), step, (), (), step, terms[i]) for i in range(num_rows)]
        logits = place.drawn(step, num_rows, size, dtype=torch.float32)
        logits[7] = float("nan") if step == 3 else logits[7]
        with place.waiting_for_nobody() if step else nullcontext():
            choice = here.start(rows, logits)
        assert_same(choice.tokens(), there.start(rows, logits.cpu()).tokens())
    assert here.broken == there.broken == {7}


def assert_same(found: list, wanted: list) -> None:
    assert [[token.id for token in row] for row in found] == [[token.id for token in row] for row in wanted]
    for ours, theirs in zip(chain(*found), chain(*wanted), strict=True):
        if theirs.logprobs:
            pairs = zip((ours.logprobs, *ours.logprobs.top), (theirs.logprobs, *theirs.logprobs.top), strict=True)
            assert all(abs(a.logprob - b.logprob) < TOLERANCE for a, b in pairs)
