"""Draft lengths for given acceptance rates and step times."""

import math

import pytest

from coordinator.speculation.acceptance import Acceptance, ShadowDrafts
from coordinator.speculation.draft_length import DraftLengthPolicy
from coordinator.speculation.ngram_drafter import NO_DRAFT, Draft
from coordinator.speculation.step_cost_model import EXPLORE_EVERY, FORGOTTEN_AFTER, GAP_AFTER, GAP_AHEAD, StepCostModel

SURE = [1.0] * 15


def tiled_costs(num_sequences: int, tile: int = 8, seconds: float = 0.01) -> StepCostModel:
    """Rows are computed in tiles that each take the same time, regardless of their number of rows."""
    costs = StepCostModel()
    for num_drafts in range(16):
        costs.measure(num_sequences, num_drafts, seconds * math.ceil((num_sequences + num_drafts) / tile))
    return costs


def test_drafts_fill_a_tile_and_begin_no_other() -> None:
    assert DraftLengthPolicy(64, 8, tiled_costs(1)).lengths([SURE]) == [7]
    assert DraftLengthPolicy(64, 8, tiled_costs(2)).lengths([SURE, [0.5] * 8]) == [6, 0]
    assert DraftLengthPolicy(64, 3, tiled_costs(2)).lengths([SURE, [0.5] * 8]) == [3, 3]


def test_first_sequence_gets_more_of_equally_likely_drafts() -> None:
    assert DraftLengthPolicy(5, 8, tiled_costs(2)).lengths([[0.5, 0.5], [0.5, 0.5]]) == [2, 1]


def test_every_sequence_of_a_step_must_gain() -> None:
    costs = StepCostModel()
    for num_sequences in (1, 8):
        costs.measure(num_sequences, 0, 0.01)
        costs.measure(num_sequences, 4, 0.015)
    assert DraftLengthPolicy(64, 4, costs).is_worth_waiting([[0.8] * 4])
    assert not DraftLengthPolicy(64, 4, costs).is_worth_waiting([[0.8] * 4] + [[]] * 7)


def test_step_waits_only_if_drafts_outweigh_the_gap() -> None:
    costs = StepCostModel()
    costs.measure(1, 0, 0.001)
    policy, chances = DraftLengthPolicy(64, 4, costs), [[0.4]]
    assert (costs.gap(is_ahead=True), costs.gap(is_ahead=False)) == (GAP_AHEAD, GAP_AFTER)
    assert not policy.is_worth_waiting(chances)  # 1.4 tokens in 1.6 ms, or 1 in 1.1
    assert policy.lengths(chances) == [1]  # after the wait a draft pays off
    costs.measure_gap(0.0002, is_ahead=False)
    assert policy.is_worth_waiting(chances)
    costs.measure_gap(0.0, is_ahead=True)
    assert costs.gap(is_ahead=True) == 0.0


def test_no_drafts_at_a_full_batch_or_without_measurements() -> None:
    assert not DraftLengthPolicy(2, 8, tiled_costs(2)).is_worth_waiting([SURE, SURE])
    assert DraftLengthPolicy(2, 8, tiled_costs(2)).lengths([SURE, SURE]) == [0, 0]
    assert not DraftLengthPolicy(64, 8, tiled_costs(2)).is_worth_waiting([SURE])
    assert DraftLengthPolicy(64, 8, tiled_costs(2)).lengths([SURE]) == [0]
    assert DraftLengthPolicy(64, 8, tiled_costs(2)).lengths([[], []]) == [0, 0]
    assert DraftLengthPolicy(64, 8, StepCostModel()).lengths([]) == []


def test_step_times_are_interpolated_and_tiles_are_searched_occasionally() -> None:
    costs = StepCostModel()
    costs.measure(1, 0, 1.0)
    costs.measure(1, 4, 3.0)
    costs.measure(1, 0, 0.0)  # was not measured
    assert [costs.seconds(1, count) for count in (0, 1, 2, 3, 4, 9)] == [1.0, 1.5, 2.0, 2.5, 3.0, 3.0]
    are_optimistic = list[bool]()
    for _ in range(2 * EXPLORE_EVERY):
        are_optimistic.append(costs.seconds(1, 2) == 1.0)
        costs.measure(1, 0, 1.0)
    assert sum(are_optimistic) == 4


def test_steps_with_drafts_update_the_time_without_drafts() -> None:
    costs = StepCostModel()
    costs.measure(1, 0, 1.0)
    costs.measure(1, 4, 1.5)
    for _ in range(40):
        costs.measure(1, 4, 15.0)  # a context ten times as long
    assert costs.seconds(1, 0) == pytest.approx(10.0, rel=0.5)
    assert costs.seconds(1, 4) == pytest.approx(15.0, rel=0.1)


def test_single_slow_step_is_forgotten() -> None:
    costs = StepCostModel()
    costs.measure(1, 0, 1.0)
    costs.measure(1, 4, 100.0)
    for _ in range(FORGOTTEN_AFTER):
        costs.measure(1, 0, 1.0)
    assert costs.seconds(1, 4) == 1.0


def test_acceptance_is_learned_per_position_and_ngram_kind() -> None:
    acceptance = Acceptance(4)
    assert acceptance.expected() == [0.0] * 4
    assert acceptance.probabilities(NO_DRAFT) == []
    for _ in range(30):
        acceptance.verified(Draft(9, (1, 2, 3)), 2)
        acceptance.verified(Draft(1, (1, 2, 3)), 0)
        acceptance.verified(NO_DRAFT, 0)
    expected, long, short = (
        acceptance.expected(),
        acceptance.probabilities(Draft(8, (1, 2, 3))),
        acceptance.probabilities(Draft(1, (1,))),
    )
    assert 0.2 < expected[0] < 0.45
    assert long[1] > 0.7
    assert long[2] < 0.15
    assert len(long) == 3
    assert short[0] < 0.15


def test_unmeasured_position_has_the_acceptance_of_the_previous_one() -> None:
    acceptance = Acceptance(4)
    for _ in range(50):
        acceptance.verified(Draft(4, (1, 2)), 2)
    _, second, third, fourth = acceptance.expected()
    assert fourth / third == pytest.approx(third / second)
    assert fourth > 0.6


def test_sampled_tokens_are_compared_with_unused_drafts() -> None:
    compared, verified = Acceptance(3), Acceptance(3)
    comparison = ShadowDrafts(compared)
    drafts = iter([Draft(2, (11, 12, 99)), Draft(5, (15, 16)), NO_DRAFT, Draft(1, (20,))])
    for token_id in (10, 11, 12, 13, 15, 16, 17, 18):  # 13 is in place of 99, 17 comes with the second draft
        comparison.record(token_id, lambda: next(drafts))
    verified.verified(Draft(2, (11, 12, 99)), 2)
    verified.verified(Draft(5, (15, 16)), 2)
    verified.verified(NO_DRAFT, 0)
    assert compared.expected() == verified.expected()
    before = compared.expected()
    comparison.drop()
    comparison.record(21, lambda: Draft(3, (22,)))
    assert compared.expected() == before
    comparison.record(22, lambda: NO_DRAFT)
    assert compared.expected()[0] > before[0]
