"""Sampling against transformers' own processors, by exact probabilities."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from longleaf.rank_protocol.step import PenaltyHistory, Row, SamplingTerms
from longleaf.sampling import MAX_LOGPROBS, SamplingParams
from workers.sampling.distribution import distribution
from workers.sampling.logprobs import logprobs, logprobs_of
from workers.sampling.penalties import Penalties
from workers.sampling.sampler import CpuSampler
from workers.sampling.uniforms import uniform

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, 3.0])
V = len(LOGITS)


def transformers_probabilities(logits_V: Tensor, sampling: SamplingParams, token_ids: list[int]) -> Tensor:
    """Probabilities [V] of the processors that `generate` builds, in its order, after `token_ids`."""
    processors: list[Any] = []
    if sampling.logit_bias:
        processors.append(SequenceBiasLogitsProcessor({(i,): b for i, b in sampling.logit_bias.items()}))
    if sampling.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(MinPLogitsWarper(sampling.min_p))
    ids = torch.tensor([token_ids], dtype=torch.long)
    return torch.softmax(LogitsProcessorList(processors)(ids, logits_V[None].double())[0], dim=-1)


def adjusted(logits_V: Tensor, sampling: SamplingParams, history: PenaltyHistory | None = None) -> Tensor:
    """Logits [V], float64, after bias and penalties."""
    scores_V = logits_V.double()
    Penalties(SamplingTerms(sampling, history), len(logits_V)).adjust(scores_V)
    return scores_V


def sample(logits_V: Tensor, sampling: SamplingParams, token_index: int) -> int:
    return CpuSampler().choose([row(1, sampling, token_index)], logits_V[None])[0].id


def seen(prompt: list[int], answer: list[int]) -> PenaltyHistory:
    return PenaltyHistory(tuple(set(prompt)), tuple(answer))


token_lists = st.lists(st.integers(0, V - 1), max_size=8)


@given(
    logits=st.lists(st.floats(-8, 8, width=32), min_size=V, max_size=V),
    prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=8),
    answer=token_lists,
    bias=st.dictionaries(st.integers(0, V - 1), st.floats(-100, 100, width=32).filter(bool), max_size=3),  # as sent
    repetition=st.floats(0.25, 4),
    temperature=st.floats(0.25, 4),
    top_k=st.integers(0, V),
    top_p=st.floats(0.125, 1),
    min_p=st.floats(0, 1),
)
@settings(max_examples=200, deadline=None)
def test_probabilities_are_those_of_transformers(
    logits: list[float],
    prompt: list[int],
    answer: list[int],
    bias: dict[int, float],
    repetition: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    sampling = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        logit_bias=bias,
    )
    logits_V = torch.tensor(logits)
    found = distribution(adjusted(logits_V, sampling, seen(prompt, answer)), sampling)
    torch.testing.assert_close(found, transformers_probabilities(logits_V, sampling, prompt + answer))


@pytest.mark.parametrize("answer", [[], [1], [1, 1, 4]])
def test_presence_and_frequency_count_only_the_answer(answer: list[int]) -> None:
    sampling = SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=-0.25)
    wanted = LOGITS.double()
    for token_id in range(V):
        wanted[token_id] -= 0.5 * (token_id in answer) - 0.25 * answer.count(token_id)
    found = adjusted(LOGITS, sampling, seen([0, 2], answer))
    torch.testing.assert_close(found, wanted)


def test_penalties_apply_after_the_bias() -> None:
    """A bias changes the sign of a logit, and so the effect of the repetition penalty."""
    sampling = SamplingParams(logit_bias={0: -4.0}, repetition_penalty=2.0, presence_penalty=1.0)
    assert adjusted(LOGITS, sampling, seen([], [0]))[0] == (2.0 - 4.0) * 2.0 - 1.0


def test_ids_without_a_logit_are_ignored() -> None:
    sampling = SamplingParams(temperature=1.0, logit_bias={V: 5.0}, repetition_penalty=2.0)
    found = distribution(adjusted(LOGITS, sampling, seen([V, V + 1], [])), sampling)
    torch.testing.assert_close(found, torch.softmax(LOGITS.double(), 0))


def row(sequence: int, sampling: SamplingParams | None, index: int = 0, history: PenaltyHistory | None = None) -> Row:
    """A row that includes the sequence's sampling terms, unless `sampling` is None."""
    return Row(sequence, (0,), index, (), (), index, SamplingTerms(sampling, history) if sampling else None)


def test_step_mixes_all_kinds_of_rows() -> None:
    sampler = CpuSampler()
    rows = [
        row(1, SamplingParams()),
        row(2, SamplingParams(logit_bias={3: 50.0}, num_logprobs=2)),
        row(3, SamplingParams(temperature=1.0, seed=3, num_logprobs=0)),
        row(4, SamplingParams(presence_penalty=2.0), history=PenaltyHistory((), (4,))),
    ]
    tokens = sampler.choose(rows, LOGITS.repeat(4, 1))
    assert [token.id for token in tokens] == [4, 3, sample(LOGITS, SamplingParams(temperature=1.0, seed=3), 0), 0]
    logprobs_V = torch.log_softmax(LOGITS.double(), 0)
    plain, two, none, penalized = (token.logprobs for token in tokens)
    assert plain is penalized is None
    assert two is not None and none is not None
    assert two.logprob == pytest.approx(float(logprobs_V[3]))
    assert [top.token_id for top in two.top] == [4, 0]
    assert none.top == ()


def test_penalties_include_sampled_tokens_until_the_sequence_is_forgotten() -> None:
    sampler = CpuSampler()
    sampling = SamplingParams(frequency_penalty=2.0)
    chosen = [
        sampler.choose([row(7, *((None, index) if index else (sampling, 0, PenaltyHistory((), ()))))], LOGITS[None])[
            0
        ].id
        for index in range(5)
    ]
    scores, wanted = LOGITS.tolist(), []
    for _ in range(5):
        wanted.append(max(range(V), key=lambda i: scores[i]))
        scores[wanted[-1]] -= 2.0
    assert chosen == wanted
    resumed = CpuSampler().choose([row(7, sampling, 3, PenaltyHistory((), tuple(chosen[:3])))], LOGITS[None])[0].id
    assert resumed == chosen[3]
    sampler.forget([7, 8])
    assert sampler.choose([row(7, sampling, 0, PenaltyHistory((), ()))], LOGITS[None])[0].id == chosen[0]


def test_logprobs_are_those_of_the_model() -> None:
    logprobs_V = torch.log_softmax(LOGITS.double(), 0)
    [found] = logprobs(LOGITS[None], [2], 3)
    assert found.logprob == pytest.approx(float(logprobs_V[2]), rel=1e-15)
    assert [top.token_id for top in found.top] == [4, 0, 1]
    assert [top.logprob for top in found.top] == pytest.approx(logprobs_V[[4, 0, 1]].tolist(), rel=1e-15)
    assert len(logprobs(LOGITS[None], [2], MAX_LOGPROBS)[0].top) == V
    assert logprobs(torch.tensor([[0.0, -torch.inf]]), [1], 0)[0].logprob == -torch.inf


def test_greedy_takes_the_largest():
    assert sample(LOGITS, SamplingParams(), 0) == 4


def test_temperature_divides_the_logits():
    found = distribution(LOGITS.double(), SamplingParams(temperature=2.0))
    torch.testing.assert_close(found, torch.softmax(LOGITS.double() / 2, 0))


def test_filters_keep_the_most_likely():
    assert distribution(LOGITS.double(), SamplingParams(temperature=1.0, top_k=2)).nonzero().flatten().tolist() == [
        0,
        4,
    ]
    assert distribution(LOGITS.double(), SamplingParams(temperature=1.0, top_p=0.1)).nonzero().flatten().tolist() == [4]
    assert distribution(LOGITS.double(), SamplingParams(temperature=1.0, min_p=0.1)).nonzero().flatten().tolist() == [
        0,
        1,
        4,
    ]


def test_draw_depends_only_on_seed_and_index():
    draws = [uniform(7, index) for index in range(100)]
    assert draws == [uniform(7, index) for index in range(100)]
    assert len(set(draws)) == 100
    assert uniform(8, 0) != uniform(7, 0)
    assert all(0 <= draw < 1 for draw in draws)


def test_samples_of_a_request_have_different_seeds():
    sampling = SamplingParams(temperature=1.0, seed=2**64 - 1)
    assert [sampling.of_sample(i).seed for i in range(3)] == [2**64 - 1, 0, 1]


def test_draws_follow_the_distribution_by_inversion():
    sampling = SamplingParams(temperature=1.0, seed=3)
    cumulative = distribution(LOGITS.double(), sampling).cumsum(0)
    for index in range(200):
        token = sample(LOGITS, sampling, index)
        draw = uniform(3, index)
        assert cumulative[token - 1] * (token > 0) <= draw < cumulative[token]


def test_tokens_without_probability_are_never_drawn():
    sampling = SamplingParams(temperature=1.0, top_k=1)
    assert {sample(LOGITS, sampling, index) for index in range(50)} == {4}


def test_scores_are_logprobs_of_raw_logits_and_nan_where_a_logit_is(monkeypatch):
    logits_SV = 20 * torch.randn(5, 30, generator=torch.Generator().manual_seed(0))
    ids = [3, 29, 0, 7, 7]
    wanted = torch.log_softmax(logits_SV.double(), dim=-1)[range(5), ids]
    monkeypatch.setattr("workers.sampling.logprobs.MAX_LOGITS", 61)  # two rows at once
    torch.testing.assert_close(logprobs_of(logits_SV, ids).double(), wanted, atol=1e-5, rtol=1e-6)
    logits_SV[1, 5], logits_SV[3, 8] = torch.nan, torch.inf
    assert logprobs_of(logits_SV, ids).isnan().tolist() == [False, True, False, True, False]
