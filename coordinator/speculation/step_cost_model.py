"""What steps of several rows take, learned from those that ran. Pure: measured times are passed in, in seconds."""

from bisect import bisect_right

LEVEL_DECAY = 0.75
"""What a step still counts after the next one of as many sequences."""
RATIO_DECAY = 0.75
"""What a step still counts after the next one of as many sequences and rows."""
FORGOTTEN_AFTER = 512
"""Steps of as many sequences after which a number of rows is unknown again that none of them had."""
HOPEFUL_EVERY = 16
"""Steps of as many sequences of which one is planned as if more drafts cost nothing, up to the next number that was
measured: kernels take rows in tiles, and somewhere a step is."""
GAP_AHEAD = 0.1e-3
GAP_AFTER = 0.6e-3
"""Between two steps, before that is measured: where the second is sent ahead, and where it waits for the first's
result."""


class _Mean:
    """A mean of what was measured lately."""

    def __init__(self, decay: float, value: float = 0.0) -> None:
        self.value = value
        self._decay = decay
        self._count = 0.0

    def add(self, value: float) -> None:
        count = self._count * self._decay
        self.value = (self.value * count + value) / (count + 1)
        self._count = count + 1


class _Ratio:
    """How much longer steps with some number of drafts take than those without."""

    def __init__(self) -> None:
        self.mean = _Mean(RATIO_DECAY)
        self.last_step = 0


class _StepTimes:
    """Steps of as many sequences. Those without drafts have ratio 1, and all tell how long these take now: contexts
    grow, and come and go, and what that changes is alike for all."""

    def __init__(self) -> None:
        self.level = _Mean(LEVEL_DECAY)
        """Seconds of a step without drafts."""
        self._ratios = dict[int, _Ratio]()
        """By number of drafts."""
        self._count = 0
        self._measured, self._values = [0], [1.0]
        """Numbers of drafts that are known, ascending, and their ratios."""

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
        is_hopeful = self._count % HOPEFUL_EVERY >= HOPEFUL_EVERY - 2  # from a step's waiting to its lengths
        if above < len(self._measured) and not is_hopeful:
            low, high = self._measured[above - 1], self._measured[above]
            ratio += (self._values[above] - ratio) * (num_drafts - low) / (high - low)
        return self.level.value * ratio


class StepCostModel:
    """Seconds that a step will take, by its sequences and drafts, and from its end to the next one's begin.

    What lies between two numbers of drafts that were measured is taken to lie between their times, and past the largest
    to cost nothing more; so it is tried, and known.
    """

    def __init__(self) -> None:
        self._by_sequences = dict[int, _StepTimes]()
        self._gap_ahead = _Mean(LEVEL_DECAY, GAP_AHEAD)
        self._gap_after = _Mean(LEVEL_DECAY, GAP_AFTER)

    def measure(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        """Takes in how long a decode step took that had one row for each of its sequences and one for each draft; 0 was
        not measured."""
        if seconds > 0:
            self._by_sequences.setdefault(num_sequences, _StepTimes()).add(num_drafts, seconds)

    def measure_gap(self, seconds: float, *, is_ahead: bool) -> None:
        """Takes in the time between two decode steps that followed one another, of which the second was sent before the
        first had ended (`is_ahead`), or after."""
        (self._gap_ahead if is_ahead else self._gap_after).add(seconds)

    def gap(self, *, is_ahead: bool) -> float:
        return (self._gap_ahead if is_ahead else self._gap_after).value

    def knows(self, num_sequences: int) -> bool:
        """A step of so many sequences without drafts was measured."""
        steps = self._by_sequences.get(num_sequences)
        return steps is not None and steps.level.value > 0

    def seconds(self, num_sequences: int, num_drafts: int) -> float:
        """What a step will take. Only for as many sequences as it `knows`."""
        return self._by_sequences[num_sequences].seconds(num_drafts)
