"""Draft lengths that maximize the tokens per second of all sequences of a step together. Pure."""

from collections.abc import Sequence
from heapq import nlargest

from coordinator.speculation.step_cost_model import StepCostModel

LEAST_CHANCE = 0.05
"""Drafts with a lower acceptance probability are ignored."""


class DraftLengthPolicy:
    """Draft lengths for steps with one row per sequence and one per draft: at most `max_rows` rows, and `max_drafts`
    drafts per sequence."""

    def __init__(self, max_rows: int, max_drafts: int, costs: StepCostModel) -> None:
        self._max_rows = max_rows
        self._max_drafts = max_drafts
        self._costs = costs

    def is_worth_waiting(self, expected: Sequence[Sequence[float]]) -> bool:
        """Whether the next step should have drafts, so that it must wait for the result of the previous step. Otherwise
        it is sent ahead. `expected` has the result of `Acceptance.expected` for each sequence of the step: the
        probabilities that at least 1, 2, ... drafts are accepted."""
        num_sequences = len(expected)
        chances = self._chances(expected)
        if not chances:
            return False
        without = num_sequences / (self._costs.seconds(num_sequences, 0) + self._costs.gap(is_ahead=True))
        num_drafts, rate = self._best(num_sequences, [chance for chance, _ in chances])
        return num_drafts > 0 and rate > without

    def has_room(self, num_sequences: int) -> bool:
        """Whether a step of `num_sequences` sequences may have drafts."""
        return num_sequences < self._max_rows and self._costs.has_measured(num_sequences)

    def lengths(self, offered: Sequence[Sequence[float]]) -> list[int]:
        """The number of draft tokens to use for each sequence of a step, once the result of the previous step is there.
        `offered` has the result of `Acceptance.probabilities` for each sequence's draft; empty where there is none."""
        chances = self._chances(offered)
        num_drafts, _ = self._best(len(offered), [chance for chance, _ in chances])
        lengths = [0] * len(offered)
        for _, number in chances[:num_drafts]:
            lengths[-number] += 1
        return lengths

    def _chances(self, of_sequences: Sequence[Sequence[float]]) -> list[tuple[float, int]]:
        """The most probable drafts first, as many as a step has rows for, each with the number of its sequence counted
        back from the end, so that the first sequence wins ties. No draft is more probable than the one before it."""
        num_sequences = len(of_sequences)
        if not self.has_room(num_sequences):
            return []
        found = [
            (chance, num_sequences - i)
            for i, chances in enumerate(of_sequences)
            for chance in chances[: self._max_drafts]
            if chance >= LEAST_CHANCE
        ]
        return nlargest(self._max_rows - num_sequences, found)

    def _best(self, num_sequences: int, chances: Sequence[float]) -> tuple[int, float]:
        """The number of drafts to use, and the resulting tokens per second."""
        if not self._costs.has_measured(num_sequences):
            return 0, 0.0
        gap, tokens = self._costs.gap(is_ahead=False), float(num_sequences)
        best = 0, tokens / (self._costs.seconds(num_sequences, 0) + gap)
        for num_drafts, chance in enumerate(chances, 1):
            tokens += chance
            rate = tokens / (self._costs.seconds(num_sequences, num_drafts) + gap)
            if rate > best[1]:
                best = num_drafts, rate
        return best
