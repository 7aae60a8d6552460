"""The device sampler, run on a CPU: its tokens equal those of the CPU sampler and of the definition."""

import itertools
import random

import pytest
import torch

from longleaf.rank_protocol.step import PenaltyHistory, Row, SamplingTerms
from longleaf.sampling import SamplingParams
from workers.sampling import device_sampler, distribution
from workers.sampling.acceptance import NOT_FINITE
from workers.sampling.device_sampler import DeviceSampler, make_sampler
from workers.sampling.fixed_shape import Parameters
from workers.sampling.history import TokenHistories
from workers.sampling.sampler import CpuSampler
from workers.sampling.uniforms import uniform, uniforms

NUM_ROWS = 48


def settings() -> list[SamplingParams]:
    """Settings of all kinds and in all combinations: 4 x 8 x 3 x 5."""
    temperatures = [0.0, 0.3, 1.0, 30.0]
    cuts = [
        {},
        {"top_p": 0.9},
        {"top_p": 0.3, "min_p": 0.01},
        {"top_k": 20},
        {"top_k": 1 << 30, "top_p": 0.5},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
        {"min_p": 0.05},
        {"top_k": 1},
    ]
    reported = [{}, {"num_logprobs": 0}, {"num_logprobs": 20}]
    extra = [
        {},
        {"logit_bias": {3: 5.0, 70: -9.0, 1 << 20: 1.0}},
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.5, "presence_penalty": -0.5},
        {"logit_bias": {0: 2.0}, "repetition_penalty": 0.8, "presence_penalty": 1.0},
    ]
    parts = itertools.product(temperatures, cuts, reported, extra)
    return [SamplingParams(temperature=t, **cut, **say, **more) for t, cut, say, more in parts]


class Service:
    """Sequences that begin and end in random order, and steps with a part of them, for two samplers."""

    def __init__(self, seed: int, size: int) -> None:
        self._random = random.Random(seed)
        self._size = size
        self._kinds = itertools.cycle(self._random.sample(settings(), len(settings())))
        self._numbers = itertools.count()
        self._live: dict[int, int] = {}
        """The index of the next token by sequence."""
        self._drawing: set[int] = set()

    def count_drawn(self, rows: list[Row]) -> int:
        """Rows that are not greedy."""
        self._drawing |= {row.sequence for row in rows if row.terms and not row.terms.sampling.is_greedy}
        return sum(row.sequence in self._drawing for row in rows)

    def step(self) -> tuple[list[Row], list[int]]:
        """Rows, and the sequences that ended before."""
        ended = [sequence for sequence in self._live if self._random.random() < 0.02]
        for sequence in ended:
            del self._live[sequence]
        rows = [self._row(sequence) for sequence in self._live if self._random.random() < 0.95]
        while len(self._live) < NUM_ROWS:
            rows.append(self._begin(next(self._numbers)))
        return rows, ended

    def _row(self, sequence: int) -> Row:
        index = self._live[sequence]
        self._live[sequence] += 1
        return Row(sequence, (0,), index, (), (), index)

    def _begin(self, sequence: int) -> Row:
        sampling, first = next(self._kinds), self._random.choice([0, 0, 5])
        drawn = [self._random.randrange(self._size + 9) for _ in range(30)]  # some have no logit
        seen = PenaltyHistory(tuple({*drawn[:20]}), tuple(i % self._size for i in drawn[: 2 * first]))
        # few seeds, so that equal seeds occur
        terms = SamplingTerms(sampling.of_sample(sequence % 7), seen if sampling.has_penalties else None)
        self._live[sequence] = first + 1
        return Row(sequence, (0,), first, (), (), first, terms)


def logits(num_rows: int, size: int, step: int) -> torch.Tensor:
    """Logits that are flat, peaked, partly equal, partly excluded or not finite."""
    generator = torch.Generator().manual_seed(step)
    found = torch.randn(num_rows, size, generator=generator) * [0.5, 2.0, 4.0, 8.0][step % 4]
    if step % 5 == 0:
        found = found.round()
    if step % 7 == 0:
        found[:, : size // 3] = -torch.inf
    if step % 11 == 3:
        found[step % num_rows, step % size] = [torch.nan, torch.inf][step % 2]
    return found.to(torch.bfloat16) if step % 3 == 0 else found


QUICK = pytest.param(200, 90, 2900, id="2,900 draws")
SLOW = [
    pytest.param(size, 1020, 33_400, marks=[pytest.mark.slow, pytest.mark.timeout(1800)], id=f"33,400 draws of {size}")
    for size in (61, 500, 3000)
]


@pytest.mark.parametrize(("size", "num_steps", "least"), [QUICK, *SLOW])
def test_tokens_equal_those_of_the_cpu_sampler(size, num_steps, least):
    found, wanted, service, num_draws = DeviceSampler("cpu", 512), CpuSampler(), Service(size, size), 0
    for step in range(num_steps):
        rows, ended = service.step()
        logits_RV = logits(len(rows), size, step)
        for sampler in (found, wanted):
            sampler.forget(ended)
        tokens = found.start(rows, logits_RV).tokens()
        assert comparable(tokens) == comparable(wanted.start(rows, logits_RV).tokens()), f"step {step}"
        assert found.broken == wanted.broken
        num_draws += service.count_drawn(rows)
    assert num_draws > least


def comparable(tokens):
    """Token ids and logprobs; ids of top tokens are left out because equally likely ones may differ."""
    return [
        [
            (token.id, token.logprobs and (token.logprobs.logprob, [top.logprob for top in token.logprobs.top]))
            for token in found
        ]
        for found in tokens
    ]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "cut",
    [{}, {"top_p": 0.0}, {"top_p": 1e-20}, {"min_p": 1.0}, {"top_k": 1, "top_p": 1e-20}, {"top_k": 5, "min_p": 1.0}],
)
@pytest.mark.parametrize("drawn", [0.0, 0.5, 1 - 2**-53, 1.0])
def test_extreme_settings_draw_an_allowed_token(cut, drawn, monkeypatch):
    """The smallest top-p, the largest min-p, and a random number that rounding moves past the last token."""
    monkeypatch.setattr(device_sampler, "uniforms", lambda seed, index, count: [drawn] * count)
    sampling = SamplingParams(temperature=1.0, **cut)
    for step in range(1, 40):
        logits_RV = logits(6, 50, step).nan_to_num(0.0, 9.0, -torch.inf)
        logits_RV[:, -9:] = -torch.inf
        found = (
            DeviceSampler("cpu", 512).start([row(i, 0, SamplingTerms(sampling)) for i in range(6)], logits_RV).tokens()
        )
        assert [token.id for [token] in found] == [
            distribution.draw(logits_V, sampling, drawn) for logits_V in logits_RV.double()
        ]


def test_all_settings_occur():
    kinds = settings()
    assert len(set(map(str, kinds))) == len(kinds) == 480


def row(sequence: int, index: int, terms: SamplingTerms | None = None) -> Row:
    return Row(sequence, (0,), index, (), (), index, terms)


def test_missing_tokens_are_marked_for_the_other_ranks():
    sampler = DeviceSampler("cpu", 512)
    logits_RV = torch.tensor([[0.0, 1.0], [torch.nan, 0.0], [-torch.inf, -torch.inf]])
    for index, sampling in enumerate([SamplingParams(), SamplingParams(temperature=1.0, num_logprobs=1)]):
        choice = sampler.start([row(i, index, SamplingTerms(sampling)) for i in range(3)], logits_RV)
        assert [[token.id for token in found] for found in choice.tokens()] == [[1], [], []]
        assert choice.ids().tolist() == [1, NOT_FINITE, NOT_FINITE]
        assert choice.ids().dtype == torch.long


def test_broken_sequence_gets_no_tokens_until_it_is_forgotten():
    sampler, sampling = DeviceSampler("cpu", 512), SamplingParams()
    assert sampler.start([row(4, 0, SamplingTerms(sampling))], torch.tensor([[torch.nan, 0.0]])).tokens() == [()]
    assert sampler.start([row(4, 1)], torch.tensor([[1.0, 0.0]])).tokens() == [()]
    sampler.forget([4])
    [[token]] = sampler.start([row(4, 0, SamplingTerms(sampling))], torch.tensor([[1.0, 0.0]])).tokens()
    assert token.id == 0


def test_parameters_are_copied_to_the_device_only_when_changed(monkeypatch):
    copies = []
    monkeypatch.setattr(device_sampler, "to_device", lambda host, device: copies.append(host.shape) or host)
    sampler, logits_RV = DeviceSampler("cpu", 512), torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    greedy = [SamplingParams(), SamplingParams(logit_bias={3: 1.0}), SamplingParams(num_logprobs=3)]
    for index in range(4):
        sampler.start([row(i, index, None if index else SamplingTerms(s)) for i, s in enumerate(greedy)], logits_RV)
    assert len(copies) == 1
    sampler.start([row(i, 4) for i in (2, 0)], logits_RV[:2])
    assert copies == [(len(Parameters._fields), 3), (len(Parameters._fields), 2)]
    for index in range(5):  # a random number for each token
        sampler.start([row(7, index, None if index else SamplingTerms(SamplingParams(temperature=1.0)))], logits_RV[:1])
    assert len(copies) == 7


def test_large_batches_are_split_without_changing_tokens(monkeypatch):
    requested = [row(i, 0, SamplingTerms(SamplingParams(temperature=1.0, seed=i, num_logprobs=2))) for i in range(10)]
    logits_RV = logits(10, 300, 1)
    together = DeviceSampler("cpu", 512).start(requested, logits_RV).tokens()
    monkeypatch.setattr(device_sampler, "MAX_LOGITS", 950)
    assert DeviceSampler("cpu", 512).start(requested, logits_RV).tokens() == together


def test_history_slots_are_released_and_reset():
    histories = TokenHistories(10, 11, "cpu")
    terms = SamplingTerms(SamplingParams(presence_penalty=1.0, logit_bias={2: 1.0}), PenaltyHistory((1, 30), (4, 4)))
    assert histories.begin(SamplingTerms(SamplingParams(temperature=1.0))) == 0
    first, second = histories.begin(terms), histories.begin(terms)
    assert first != second
    assert histories.is_seen_PV[second].nonzero().flatten().tolist() == [1, 4]
    assert histories.counts_PV[second].tolist() == [0, 0, 0, 0, 2, 0, 0, 0, 0, 0]
    histories.add(torch.tensor([second, 0]), torch.tensor([9, 9]))
    assert histories.counts_PV[second, 9] == 1
    histories.end(second)
    histories.end(0)
    assert histories.begin(SamplingTerms(SamplingParams(logit_bias={5: 2.0}))) == second
    assert not histories.is_seen_PV[second].any()
    assert not histories.counts_PV[second].any()
    assert histories.bias_ids_PB[second].nonzero().flatten().tolist() == [0]
    assert histories.biases_PB[second].sum() == 2.0
    places = {histories.begin(terms) for _ in range(9)}
    assert len(places) == 9
    assert not places & {0, first, second}
    assert histories.is_seen_PV[first].nonzero().flatten().tolist() == [1, 4]


@pytest.mark.parametrize("seed", [0, 3, 2**64 - 1])
@pytest.mark.parametrize("first", [0, 5, 1 << 20])
def test_precomputed_random_numbers_equal_those_of_each_token(seed, first):
    assert uniforms(seed, first, 70) == [uniform(seed, index) for index in range(first, first + 70)]


def test_cpus_use_the_cpu_sampler():
    assert isinstance(make_sampler("cpu", 8), CpuSampler)
    assert isinstance(make_sampler("cuda:1", 8), DeviceSampler)
