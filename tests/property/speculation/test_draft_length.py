"""Lengths of drafts, for any acceptance rates and step times."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.speculation.acceptance import Acceptance, ShadowDrafts
from coordinator.speculation.draft_length import LEAST_CHANCE, DraftLengthPolicy
from coordinator.speculation.ngram_drafter import NO_DRAFT, Draft
from coordinator.speculation.step_cost_model import FORGOTTEN_AFTER, StepCostModel

MAX_DRAFTS = 7
SECONDS = st.floats(1e-4, 10.0)
CHANCES = st.lists(st.floats(0, 1), max_size=9).map(lambda chances: sorted(chances, reverse=True))
FEW_CHANCES = CHANCES.map(lambda chances: chances[:3])
RATIOS = st.lists(st.floats(0, 0.8), min_size=MAX_DRAFTS, max_size=MAX_DRAFTS)


def costs_of(num_sequences: int, seconds: float, measured: dict[int, float]) -> StepCostModel:
    costs = StepCostModel()
    costs.measure(num_sequences, 0, seconds)
    for num_drafts, ratio in measured.items():
        costs.measure(num_sequences, num_drafts, seconds * ratio)
    return costs


@given(st.lists(CHANCES, min_size=1, max_size=5), st.integers(1, 12), SECONDS, st.data())
def test_no_limit_is_passed(offered: list[list[float]], max_rows: int, seconds: float, data: st.DataObject) -> None:
    measured = data.draw(st.dictionaries(st.integers(1, 30), st.floats(0.5, 5.0), max_size=5))
    policy = DraftLengthPolicy(max_rows, 4, costs_of(len(offered), seconds, measured))
    lengths = policy.lengths(offered)
    assert lengths == policy.lengths(offered)
    assert all(0 <= length <= min(4, len(chances)) for length, chances in zip(lengths, offered, strict=True))
    assert sum(lengths) <= max(0, max_rows - len(offered))
    if len(offered) >= max_rows:
        assert not policy.is_worth_waiting(offered)


@given(
    st.lists(CHANCES.map(lambda chances: chances[:3]), min_size=1, max_size=3), st.integers(3, 9), SECONDS, st.data()
)
def test_no_other_lengths_give_more_tokens_per_second(
    offered: list[list[float]], max_rows: int, seconds: float, data: st.DataObject
) -> None:
    measured = data.draw(st.dictionaries(st.integers(1, 9), st.floats(0.5, 5.0), max_size=5))
    costs = costs_of(len(offered), seconds, measured)

    def rate(lengths: tuple[int, ...]) -> float:
        tokens = len(offered) + sum(sum(each[:length]) for each, length in zip(offered, lengths, strict=True))
        return tokens / (costs.seconds(len(offered), sum(lengths)) + costs.gap(is_ahead=False))

    likely = [sum(chance >= LEAST_CHANCE for chance in chances) for chances in offered]
    choices = product(*(range(count + 1) for count in likely))
    best = max(rate(each) for each in choices if sum(each) <= max_rows - len(offered))
    lengths = DraftLengthPolicy(max_rows, 3, costs).lengths(offered)
    assert rate(tuple(lengths)) >= best * (1 - 1e-9)


class Loop:
    """Steps of one sequence whose drafts have `num_right` right tokens, with step times `seconds`."""

    def __init__(self, seconds: list[float], num_right: int) -> None:
        self.seconds = seconds
        self.num_right = num_right
        """Tokens that are right of each draft."""
        self.costs = StepCostModel()
        self.policy = DraftLengthPolicy(64, MAX_DRAFTS, self.costs)
        self.acceptance = Acceptance(MAX_DRAFTS)
        self.comparison = ShadowDrafts(self.acceptance)
        self.num_generated = 0

    def draft(self) -> Draft:
        """Counts on from where the answer is, and goes wrong after so many tokens."""
        right = range(self.num_generated, self.num_generated + self.num_right)
        return Draft(4, (*right, *[-1] * MAX_DRAFTS)[:MAX_DRAFTS])

    def step(self) -> int:
        """Tokens drafted."""
        draft = NO_DRAFT
        if self.policy.is_worth_waiting([self.acceptance.expected()]):
            draft = self.draft()
            draft = draft.cut(self.policy.lengths([self.acceptance.of(draft)])[0])
        count = len(draft.token_ids)
        self.costs.measure(1, count, self.seconds[count])
        if count:
            num_accepted = min(count, self.num_right)
            self.acceptance.verified(draft, num_accepted)
            self.comparison.drop()
            self.num_generated += num_accepted + 1
        else:
            self.num_generated += 1
            self.comparison.take(self.num_generated - 1, self.draft)
        return count

    def rate(self, count: int) -> float:
        """Tokens per second of steps with so many drafts that are all right."""
        return (count + 1) / (self.seconds[count] + self.costs.gap(is_ahead=count == 0))


def rising(seconds: float, steps: list[float]) -> list[float]:
    """Times of steps with 0, 1, ... drafts."""
    return [seconds * (1 + sum(steps[:count])) for count in range(len(steps) + 1)]


@settings(max_examples=50)
@given(SECONDS, RATIOS, st.integers(0, 40))
def test_who_is_always_wrong_ends_at_none_and_stays_there(seconds: float, ratios: list[float], num_good: int) -> None:
    loop = Loop(rising(seconds, ratios), num_right=MAX_DRAFTS)
    for _ in range(num_good):
        loop.step()
    loop.num_right = 0
    for _ in range(60):
        loop.step()
    assert [loop.step() for _ in range(200)] == [0] * 200


@settings(max_examples=50)
@given(SECONDS, RATIOS, st.integers(0, 40))
def test_who_is_always_right_comes_to_the_best_length(seconds: float, ratios: list[float], num_bad: int) -> None:
    loop = Loop(rising(seconds, ratios), num_right=0)
    for _ in range(num_bad):
        loop.step()
    loop.num_right = MAX_DRAFTS
    for _ in range(FORGOTTEN_AFTER // 2):
        loop.step()
    counts = [loop.step() for _ in range(32)]
    best = max(map(loop.rate, range(MAX_DRAFTS + 1)))
    assert sorted(map(loop.rate, counts))[len(counts) // 4] >= 0.9 * best
