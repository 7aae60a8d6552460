"""Sampling of rows in a batch: the computed values, and that each row gets the token that it would get without the
others."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.sampling import one_by_one
from longleaf.rank_protocol.step import PenaltyHistory, Row, SamplingTerms
from longleaf.sampling import SamplingParams
from workers.sampling import distribution, draws
from workers.sampling.sampler import CpuSampler

ROWS, V = 16, 20_000


class OperationSizes(TorchDispatchMode):
    """Records the sizes of the tensors that operations receive."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.sizes: list[tuple[str, int]] = []
        self._names = names

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (name := func.overloadpacket.__name__) in self._names:
            self.sizes.append((name, args[0].numel()))
        return func(*args, **(kwargs or {}))


def logits(rows: int = ROWS, size: int = V, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * spread


def rows(*samplings: SamplingParams, seen: PenaltyHistory | None = None) -> list[Row]:
    """A first row for each of the sequences."""
    return [
        Row(
            i,
            (0,),
            0,
            (),
            (),
            0,
            SamplingTerms(sampling, (seen or PenaltyHistory((), ())) if sampling.has_penalties else None),
        )
        for i, sampling in enumerate(samplings)
    ]


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0], ids=["flat", "normal", "peaked"])
def test_top_p_sorts_a_small_part_of_a_row(spread):
    requested = rows(*(SamplingParams(temperature=1.0, top_p=0.9, seed=i) for i in range(ROWS)))
    with OperationSizes("sort") as watch:
        CpuSampler().choose(requested, logits(spread=spread))
    assert sum(size for _, size in watch.sizes) < ROWS * V / 20


def test_probabilities_of_all_rows_are_computed_together():
    requested = rows(*(SamplingParams(temperature=0.5 + i / 8, seed=i, num_logprobs=2) for i in range(ROWS)))
    with OperationSizes("_softmax", "_log_softmax") as watch:
        CpuSampler().choose(requested, logits(size=512))
    assert [size for _, size in watch.sizes] == [ROWS * 512] * 2  # the candidates and the reported tokens


def test_penalties_affect_only_seen_tokens():
    seen = PenaltyHistory(tuple(range(0, 200, 2)), (3, 5, 5))
    requested = rows(SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5), seen=seen)
    logits_RV = logits(1)
    with OperationSizes("nonzero", "where", "mul", "gt", "sub", "add") as watch:
        CpuSampler().choose(requested, logits_RV)
    assert all(size <= 200 for _, size in watch.sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_p_keeps_larger_ids_of_equally_likely_tokens(dtype):
    """This holds on every processor: the order in which torch sorts them depends on its instruction set."""
    values = torch.arange(640) % 4
    logits_V = values.log().to(dtype)  # 160 tokens each of no weight, of weight 1, 2 and 3
    sampling = SamplingParams(temperature=1.0, top_p=(3 * 160 + 2 * 30 - 1) / (6 * 160))
    retained = {i for i in range(640) if values[i] == 3 or (values[i] == 2 and i >= 640 - 4 * 30)}
    chosen = [CpuSampler().choose([row], logits_V[None])[0].id for row in every_draw(sampling, 600)]
    assert set(chosen) <= retained
    assert {i for i in range(640) if distribution.distribution(logits_V.double(), sampling)[i] > 0} == retained


def every_draw(sampling: SamplingParams, count: int) -> list[Row]:
    return [Row(1, (0,), index, (), (), index, SamplingTerms(sampling)) for index in range(count)]


def settings() -> list[SamplingParams]:
    """Settings of all kinds."""
    cuts = [
        {"top_p": 0.9},
        {"top_p": 0.3, "min_p": 0.01},
        {"top_k": 20},
        {"top_k": 200, "top_p": 0.8},
        {"min_p": 0.05},
        {},
    ]
    extra = [{}, {"logit_bias": {3: 5.0, 700: -9.0}, "frequency_penalty": 0.5}, {"repetition_penalty": 1.3}]
    kinds = enumerate(itertools.product([0.3, 0.7, 1.0, 1.0, 1.5, 30.0], cuts))
    return [SamplingParams(temperature=t, seed=i, **cut, **extra[i % 3]) for i, (t, cut) in kinds]


def at_a_limit(logits_V: torch.Tensor, num_tokens: int) -> list[SamplingParams]:
    """Settings with a top-p that this number of tokens reaches, except for rounding, and a min-p with one more."""
    shares_V = torch.softmax(logits_V.double(), 0).sort(descending=True).values
    top_p, min_p = float(shares_V[:num_tokens].sum()), float(shares_V[num_tokens] / shares_V[0])
    kinds = {"top_p": top_p}, {"min_p": min_p}, {"min_p": min_p, "top_k": 2 * num_tokens}
    return [SamplingParams(temperature=1.0, seed=num_tokens, **kind) for kind in kinds]


def test_top_k_keeps_all_tokens_tied_with_the_last():
    logits_RV = torch.arange(500.0).clamp(min=5.0, max=450.0)[None]
    sampling = SamplingParams(temperature=1.0, top_k=2, seed=1)
    drawn = {CpuSampler().choose([row], logits_RV)[0].id for row in every_draw(sampling, 1000)}
    assert drawn == set(range(450, 500))


@pytest.mark.parametrize("size", [63, 200, 1000])
def test_top_p_that_rounding_never_reaches_keeps_a_token(size):
    sampling = SamplingParams(temperature=1.0, top_p=1 - 2**-53)
    for seed in range(60):
        scores_RV = logits(1, size, seed=seed).double()
        [drawn] = draws.draw(scores_RV.clone(), [sampling], [0.5])
        assert drawn in (None, distribution.draw(scores_RV[0], sampling, 0.5))


@pytest.mark.parametrize("num_steps", [20, pytest.param(210, marks=pytest.mark.slow, id="ten thousand draws")])
def test_batched_tokens_equal_those_of_single_rows(monkeypatch, num_steps):
    """Some rows depend on rounding, and some cannot be sampled from."""
    num_left = 0

    def counted(*arguments):
        nonlocal num_left
        drawn = draw(*arguments)
        num_left += drawn.count(None)
        return drawn

    draw = draws.draw
    monkeypatch.setattr(draws, "draw", counted)
    found, wanted = CpuSampler(), one_by_one.Sampler()
    fixed = logits(4, 3000).repeat_interleave(3, dim=0)
    requested = [*settings(), *itertools.chain(*(at_a_limit(fixed[3 * i], 2 + i) for i in range(4)))]
    first = rows(*requested, seen=PenaltyHistory(tuple(range(0, 3000, 5)), (1, 2, 2)))
    for step in range(num_steps):
        logits_RV = torch.cat((logits(36, 3000, spread=[0.5, 2.0, 4.0, 8.0][step % 4], seed=step), fixed))
        if step % 50 == 7:
            logits_RV[step // 10] = torch.nan
        at = [Row(row.sequence, (0,), step, (), (), step, row.terms if step == 0 else None) for row in first]
        assert found.choose(at, logits_RV) == wanted.choose(at, logits_RV)
    assert len(first) == 48
    assert num_left > 8 * num_steps


@pytest.mark.parametrize("size", [64, 3000, 4096])
@pytest.mark.parametrize("num", [1, 20, 64])
def test_highest_tokens_equal_those_of_topk(size, num):
    logits_RV = logits(3, size).double()
    values, ids = draws.highest(logits_RV, num)
    assert torch.equal(values, logits_RV.topk(num).values)
    assert torch.equal(ids, logits_RV.topk(num).indices)
