"""The sampler of GPUs, in the interpreter, against the operations of fixed shape and the definition."""

import random

import pytest
import torch

from longleaf.rank_protocol.step import PenaltyHistory, SamplingTerms
from longleaf.sampling import SamplingParams
from workers.sampling import distribution, fixed_shape, fused
from workers.sampling.device_sampler import Batch, DeviceSequenceSampler, parameters_of
from workers.sampling.fused import SamplerTuning
from workers.sampling.history import TokenHistories

SIZE = 150
TUNING = SamplerTuning(block=64, warps=4, levels=32, tile=64)
TUNINGS = {
    "all candidates are in the buffer": TUNING,
    "tokens above the candidates are kept unseen": TUNING._replace(small=0),
    "candidates are read from the row": TUNING._replace(small=0, capacity=4),
    "coarse levels": TUNING._replace(levels=16, tile=16, small=30),
}
CUTS = [
    {"top_p": 0.9},
    {"top_p": 0.3, "min_p": 0.01},
    {"top_k": 20},
    {"top_k": 1 << 30, "top_p": 0.5},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
    {"min_p": 0.05},
    {"top_k": 1},
    {"top_p": 1e-20},
    {},
]


def logits(seed: int, num_rows: int, size: int = SIZE) -> torch.Tensor:
    """Flat, peaked, with equal ones, or with tokens that are ruled out."""
    found = torch.randn(num_rows, size, generator=torch.Generator().manual_seed(seed)) * [0.5, 2.0, 4.0, 8.0][seed % 4]
    if seed % 3 == 0:
        found = found.round()
    if seed % 5 == 0:
        found[:, : size // 3] = -torch.inf
    return found.to(torch.bfloat16) if seed % 2 else found


def sampled(logits_RV, samplings, drawn, tuning, histories=None, places=None, before_RM=None):
    """The results of `fixed_shape.choose` and of `fused.choose`."""
    size = logits_RV.shape[1]
    histories = histories or TokenHistories(size, 4, "cpu")
    samplers = [DeviceSequenceSampler(*pair) for pair in zip(samplings, places or [0] * len(samplings), strict=True)]
    batch = Batch(samplers, size)
    parameters = parameters_of(torch.from_numpy(batch.numbers([0] * len(samplers))))
    parameters.uniform.copy_(torch.tensor(drawn, dtype=torch.float64))
    arguments = (logits_RV, parameters, histories, batch.needs, before_RM)
    return fixed_shape.choose(*arguments), fused.choose(*arguments, tuning=tuning)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", TUNINGS)
def test_tokens_are_those_of_the_operations_of_fixed_shape(name, seed):
    draws = random.Random(f"{name} {seed}")
    samplings = [SamplingParams(temperature=draws.choice([0.3, 1.0, 30.0]), **cut) for cut in draws.sample(CUTS, 4)]
    wanted, found = sampled(logits(seed, 4), samplings, [draws.random() for _ in samplings], TUNINGS[name])
    assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize("cut", [{"top_p": 0.5}, {"top_k": 3}, {"top_k": 9, "top_p": 0.4}])
@pytest.mark.parametrize("drawn", [0.0, 1.0])
def test_of_equal_scores_those_of_smaller_ids_are_dropped(cut, drawn):
    """At both ends of the random number, so that the first and the last kept token are seen."""
    logits_RV = torch.zeros(1, 100)
    logits_RV[0, 50:53] = 1.0
    sampling = SamplingParams(temperature=1.0, **cut)
    for tuning in (TUNING, TUNING._replace(small=0), TUNING._replace(small=0, capacity=4)):
        _, found = sampled(logits_RV, [sampling], [drawn], tuning)
        assert found.tolist() == [[distribution.draw(logits_RV[0].double(), sampling, drawn)]]


def test_penalties_and_biases_are_those_of_the_operations_of_fixed_shape():
    histories, places = TokenHistories(SIZE, 4, "cpu"), []
    samplings = [
        SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.3, logit_bias={3: 5.0, 70: -9.0, 149: 3.0}),
        SamplingParams(frequency_penalty=0.5, presence_penalty=-0.5, logit_bias={0: 2.0}, num_logprobs=0),
        SamplingParams(temperature=0.7, top_k=9, frequency_penalty=0.3, repetition_penalty=0.8),
        SamplingParams(temperature=1.0),
    ]
    for sampling in samplings:
        seen = PenaltyHistory((1, 5, 70, 149), (2, 2, 9, 140)) if sampling.has_penalties else None
        places.append(histories.begin(SamplingTerms(sampling, seen)))
    before_RM = torch.tensor([[7, -3], [9, 2], [-3, -3], [1, 1]])
    for seed in (1, 2):
        drawn = [0.3 * seed, 0.0, 0.4 * seed, 0.5]
        wanted, found = sampled(logits(seed, 4), samplings, drawn, TUNING, histories, places, before_RM)
        assert found[:, 0].tolist() == wanted[:, 0].tolist()


def test_logprobs_are_those_of_the_logits():
    for seed in (1, 3, 4):
        logits_RV = logits(seed, 2)
        samplings = [SamplingParams(num_logprobs=20), SamplingParams(temperature=1.0, num_logprobs=5)]
        wanted, found = sampled(logits_RV, samplings, [0.0, 0.6], TUNING)
        torch.testing.assert_close(found[:, :22], wanted[:, :22], rtol=0, atol=1e-12)
        ids_RN = found[:, 22:].long()
        assert all(len(set(ids)) == 20 for ids in ids_RN.tolist())
        # of equal logits any may be reported
        assert torch.equal(logits_RV.gather(1, ids_RN), logits_RV.gather(1, wanted[:, 22:].long()))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy in the interpreter
def test_rows_that_are_not_finite_have_no_token():
    logits_RV = logits(1, 5).float()
    logits_RV[0, 7], logits_RV[1, 149], logits_RV[2], logits_RV[3, 9] = torch.nan, torch.inf, -torch.inf, -torch.inf
    samplings = [SamplingParams(temperature=1.0, top_p=0.9)] * 4 + [SamplingParams()]
    wanted, found = sampled(logits_RV, samplings, [0.5] * 5, TUNING)
    assert wanted[:3].flatten().tolist() == [fixed_shape.NOT_FINITE] * 3
    assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize("drawn", [0.0, 1 - 2**-53, 1.0])
def test_an_eligible_token_is_drawn_at_both_ends_of_the_parameters(drawn):
    samplings = [SamplingParams(temperature=1.0, **cut) for cut in ({}, {"top_p": 0.0}, {"min_p": 1.0}, {"top_k": 5})]
    logits_RV = logits(2, 4, 50)
    logits_RV[:, -9:] = -torch.inf
    _, found = sampled(logits_RV, samplings, [drawn] * 4, TUNING)
    rows = zip(logits_RV.double(), samplings, strict=True)
    assert found[:, 0].tolist() == [distribution.draw(logits_V, sampling, drawn) for logits_V, sampling in rows]
