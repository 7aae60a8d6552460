"""Sampling against transformers' own processors, by exact probabilities."""

import torch

from longleaf.sampling import Sampling
from workers.sampler import distribution, sample, uniform

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, 3.0])


def test_greedy_takes_the_largest():
    assert sample(LOGITS, Sampling(), 0) == 4


def test_temperature_divides_the_logits():
    found = distribution(LOGITS, Sampling(temperature=2.0))
    torch.testing.assert_close(found, torch.softmax(LOGITS.double() / 2, 0))


def test_top_k_and_top_p_keep_the_most_likely():
    assert distribution(LOGITS, Sampling(temperature=1.0, top_k=2)).nonzero().flatten().tolist() == [0, 4]
    assert distribution(LOGITS, Sampling(temperature=1.0, top_p=0.1)).nonzero().flatten().tolist() == [4]


def test_a_draw_depends_on_seed_and_index_alone():
    draws = [uniform(7, index) for index in range(100)]
    assert draws == [uniform(7, index) for index in range(100)]
    assert len(set(draws)) == 100
    assert uniform(8, 0) != uniform(7, 0)
    assert all(0 <= draw < 1 for draw in draws)


def test_draws_follow_the_distribution_by_inversion():
    sampling = Sampling(temperature=1.0, seed=3)
    cumulative = distribution(LOGITS, sampling).cumsum(0)
    for index in range(200):
        token = sample(LOGITS, sampling, index)
        draw = uniform(3, index)
        assert cumulative[token - 1] * (token > 0) <= draw < cumulative[token]


def test_tokens_without_probability_are_never_drawn():
    sampling = Sampling(temperature=1.0, top_k=1)
    assert {sample(LOGITS, sampling, index) for index in range(50)} == {4}
