"""Tokens that the device chooses, against those that a CPU chooses from the same logits."""

from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch

from bench.gpu import ground
from tests.gpu.place import Place

NUM_STEPS = 5
TOLERANCE = 1e-9
"""Of a logprob, in float64."""


def tokens_of_the_cpu(place: Place) -> None:
    """Rows of all kinds, one of which is not finite; nothing waits for the device before tokens are read."""
    ground.need(ground.NEEDED_BY_RANKS)
    from longleaf.rank_protocol.step import PenaltyHistory, Row, SamplingTerms
    from longleaf.sampling import SamplingParams
    from workers.sampling.device_sampler import DeviceSampler
    from workers.sampling.sampler import CpuSampler

    kinds = (
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9, num_logprobs=5, seed=1),
        SamplingParams(temperature=1.0, top_k=40, min_p=0.02, seed=2),
        SamplingParams(temperature=0.8, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1, seed=3),
        SamplingParams(logit_bias={3: 5.0}, num_logprobs=0),
    )
    num_rows, size = 8 * len(kinds), 152_000 if place.is_gpu else 700
    here, there = DeviceSampler(place.device, 64), CpuSampler()
    for step in range(NUM_STEPS):
        terms = (
            [SamplingTerms(kind, PenaltyHistory((1, 2, 3), ())) for kind in kinds * 8]
            if step == 0
            else [None] * num_rows
        )
        rows = [Row(i, (0,), step, (), (), step, terms[i]) for i in range(num_rows)]
        logits = place.drawn(step, num_rows, size, dtype=torch.float32)
        logits[7] = float("nan") if step == 3 else logits[7]
        with place.without_synchronization() if step else nullcontext():
            choice = here.start(rows, logits)
        assert_same(choice.tokens(), there.start(rows, logits.cpu()).tokens())
    assert here.broken == there.broken == {7}


def assert_same(found: list, wanted: list) -> None:
    assert [[token.id for token in row] for row in found] == [[token.id for token in row] for row in wanted]
    for ours, theirs in zip(chain(*found), chain(*wanted), strict=True):
        if theirs.logprobs:
            pairs = zip((ours.logprobs, *ours.logprobs.top), (theirs.logprobs, *theirs.logprobs.top), strict=True)
            assert all(abs(a.logprob - b.logprob) < TOLERANCE for a, b in pairs)


def tokens_of_the_operations_of_fixed_shape(place: Place) -> None:
    """The kernels that sort no row, over flat and peaked logits, equal ones, and top-k and top-p of any size; and a
    replayed graph."""
    ground.need(ground.NEEDED_BY_RANKS)
    from longleaf.sampling import SamplingParams
    from workers.sampling import fixed_shape, fused
    from workers.sampling.device_sampler import Batch, DeviceSequenceSampler, parameters_of
    from workers.sampling.history import TokenHistories

    cuts: tuple[dict[str, Any], ...] = (
        {"top_p": 0.9},
        {"top_p": 0.3, "min_p": 0.01},
        {"top_k": 50, "top_p": 0.95},
        {"top_k": 100_000, "top_p": 0.5},
        {"min_p": 0.05},
        {"top_k": 1},
        {"top_p": 0.999},
        {},
    )
    size = 152_000 if place.is_gpu else 300
    temperatures = (0.5, 1.0, 30.0) if place.is_gpu else (1.0,)
    samplings = [SamplingParams(temperature=t, num_logprobs=20, **cut) for t in temperatures for cut in cuts]
    batch = Batch([DeviceSequenceSampler(sampling, 0) for sampling in samplings], size)
    numbers = torch.from_numpy(batch.numbers([0] * len(samplings))).to(place.device)
    parameters, histories = parameters_of(numbers), TokenHistories(size, 1, place.device)
    tunings = [fused.DEFAULT, fused.DEFAULT._replace(small=0), fused.DEFAULT._replace(small=0, capacity=16)]
    tunings = tunings if place.is_gpu else [fused.SamplerTuning(block=128, levels=32, tile=64)]
    logits, wanted = torch.empty(0), torch.empty(0)
    for seed, spread in enumerate((0.5, 3.0, 3.0, 8.0) if place.is_gpu else (3.0,)):
        logits = spread * place.drawn(seed, len(samplings), size)
        logits = logits.round() if seed == 2 else logits.to(torch.bfloat16 if seed % 2 else torch.float32)
        parameters.uniform.copy_(place.drawn(seed, len(samplings)).double().sigmoid())
        wanted = fixed_shape.choose(logits, parameters, histories, batch.needs)
        for tuning in tunings:
            found = fused.choose(logits, parameters, histories, batch.needs, tuning=tuning)
            assert found[:, 0].tolist() == wanted[:, 0].tolist(), (spread, tuning)
            torch.testing.assert_close(found[:, :22], wanted[:, :22], rtol=0, atol=TOLERANCE)
    if place.is_gpu:
        with torch.inference_mode():
            graph, wanted = torch.cuda.CUDAGraph(), wanted.clone()
            with torch.cuda.graph(graph):
                found = fused.choose(logits, parameters, histories, batch.needs)
            found.zero_()
            graph.replay()
            assert found[:, 0].tolist() == wanted[:, 0].tolist()
