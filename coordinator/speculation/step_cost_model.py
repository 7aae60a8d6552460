"""Durations of steps with several rows, learned from measurements. Pure: measured times are passed in, in seconds."""

from bisect import bisect_right

LEVEL_DECAY = 0.75
"""Factor by which a step reduces the weight of earlier ones with the same number of sequences."""
RATIO_DECAY = 0.75
"""Factor by which a step reduces the weight of earlier ones with the same numbers of sequences and drafts."""
FORGOTTEN_AFTER = 512
"""Number of steps with the same number of sequences after which the measurement of an unused number of drafts
expires."""
EXPLORE_EVERY = 16
"""One of this many steps with the same number of sequences is planned as if drafts up to the next measured number cost
nothing more: kernels process rows in tiles, so the cost may not rise until a tile is full."""
GAP_AHEAD = 0.1e-3
GAP_AFTER = 0.6e-3
"""Initial estimates of the seconds between two steps: if the second is sent ahead (GAP_AHEAD), and if it waits for the
result of the first (GAP_AFTER)."""


class _Mean:
    """A mean that weights recent measurements most."""

    def __init__(self, decay: float, value: float = 0.0) -> None:
        self.value = value
        self._decay = decay
        self._count = 0.0

    def add(self, value: float) -> None:
        count = self._count * self._decay
        self.value = (self.value * count + value) / (count + 1)
        self._count = count + 1


class _Ratio:
    """Ratio of the duration of steps with a given number of drafts to that of steps without drafts."""

    def __init__(self) -> None:
        self.mean = _Mean(RATIO_DECAY)
        self.last_step = 0


class _StepTimes:
    """Durations of steps with the same number of sequences. Steps without drafts have ratio 1. Every step updates the
    level, because changes in the contexts affect all steps alike."""

    def __init__(self) -> None:
        self.level = _Mean(LEVEL_DECAY)
        """Seconds of a step without drafts."""
        self._ratios = dict[int, _Ratio]()
        """Ratios by number of drafts."""
        self._count = 0
        self._measured, self._values = [0], [1.0]
        """Measured numbers of drafts, ascending, and their ratios."""

    def add(self, num_drafts: int, seconds: float) -> None:
        self._count += 1
        if num_drafts == 0:
            self.level.add(seconds)
        elif self.level.value:
            ratio = self._ratios.setdefault(num_drafts, _Ratio())
            if ratio.mean.value:
                self.level.add(seconds / ratio.mean.value)
            ratio.mean.add(seconds / self.level.value)
            ratio.last_step = self._count
        oldest = self._count - FORGOTTEN_AFTER
        self._ratios = {num: ratio for num, ratio in sorted(self._ratios.items()) if ratio.last_step > oldest}
        self._measured = [0, *self._ratios]
        self._values = [1.0, *(ratio.mean.value for ratio in self._ratios.values())]

    def seconds(self, num_drafts: int) -> float:
        above = bisect_right(self._measured, num_drafts)
        ratio = self._values[above - 1]
        is_exploring = (
            self._count % EXPLORE_EVERY >= EXPLORE_EVERY - 2
        )  # covers `needs_previous_result` and `lengths` of one step
        if above < len(self._measured) and not is_exploring:
            low, high = self._measured[above - 1], self._measured[above]
            ratio += (self._values[above] - ratio) * (num_drafts - low) / (high - low)
        return self.level.value * ratio


class StepCostModel:
    """Estimated durations of steps, by numbers of sequences and drafts, and of the gaps between steps.

    Durations between two measured numbers of drafts are interpolated. More drafts than the largest measured number are
    assumed to cost nothing, so that they are tried and measured.
    """

    def __init__(self) -> None:
        self._by_sequences = dict[int, _StepTimes]()
        self._gap_ahead = _Mean(LEVEL_DECAY, GAP_AHEAD)
        self._gap_after = _Mean(LEVEL_DECAY, GAP_AFTER)

    def measure(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        """Records the duration of a decode step with one row per sequence and one per draft. 0 seconds means that the
        step was not measured."""
        if seconds > 0:
            self._by_sequences.setdefault(num_sequences, _StepTimes()).add(num_drafts, seconds)

    def measure_gap(self, seconds: float, *, is_ahead: bool) -> None:
        """Records the time between two consecutive decode steps. `is_ahead`: the second step was sent before the first
        one had ended."""
        (self._gap_ahead if is_ahead else self._gap_after).add(seconds)

    def gap(self, *, is_ahead: bool) -> float:
        return (self._gap_ahead if is_ahead else self._gap_after).value

    def has_measured(self, num_sequences: int) -> bool:
        """Whether a step with `num_sequences` sequences and no drafts was measured."""
        steps = self._by_sequences.get(num_sequences)
        return steps is not None and steps.level.value > 0

    def seconds(self, num_sequences: int, num_drafts: int) -> float:
        """Estimated duration of a step. Requires that `has_measured` is true for `num_sequences`."""
        return self._by_sequences[num_sequences].seconds(num_drafts)
