"""Counters of the engine: increments are cheap, and no reader is required."""

from bisect import bisect_left
from dataclasses import dataclass, field

STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the buckets into which steps are counted."""


class StepTimes:
    """How many steps of one kind there were, and how long rank 0 computed in them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.buckets = [0] * (len(STEP_SECONDS) + 1)
        """Steps by the bound that they kept, each in one of them; the last are longer than all bounds."""

    def add(self, seconds: float) -> None:
        """Takes in one step."""
        self.seconds += seconds
        self.buckets[bisect_left(STEP_SECONDS, seconds)] += 1

    @property
    def count(self) -> int:
        return sum(self.buckets)


@dataclass
class Counts:
    """Totals since the start of the engine, and current values."""

    steps: dict[str, StepTimes] = field(default_factory=dict[str, StepTimes])
    """By kind of step: `prefill`, `decode`, `move` or `restore`. A step has one kind."""
    merge_bytes: int = 0
    """Bytes of packed partials that rank 0 gave to merges."""
    num_preempted: int = 0
    """Times that an answer went back to the queue, to make room for others."""
    reread_tokens: int = 0
    """Tokens whose keys were gone, with lost ranks or while they were parked, and were computed again."""
    num_drafted: int = 0
    """Tokens of answers that were drafted, and tried in a step."""
    num_accepted: int = 0
    """Those of them that became tokens of answers."""
    num_sampled: int = 0
    """Tokens of answers."""
    num_row_steps: int = 0
    """Steps that gave these; a step counts once for each answer in it."""
    num_contexts: int = 0
    """Contexts that there are."""
    snapshot_bytes: int | None = None
    """Bytes of keys and values on storage; None where there is none."""

    def add_step(self, kind: str, seconds: float, merge_bytes: int) -> None:
        """Takes in one step."""
        self.merge_bytes += merge_bytes
        if (times := self.steps.get(kind)) is None:
            times = self.steps[kind] = StepTimes()
        times.add(seconds)
