"""Counters of the engine: increments are cheap, and no reader is required."""

from bisect import bisect_left
from dataclasses import dataclass, field

STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the buckets of step durations."""


class StepTimes:
    """Number of steps of one kind, and the compute time of rank 0."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.buckets = [0] * (len(STEP_SECONDS) + 1)
        """Steps by bucket, each counted once; the last bucket has steps longer than all bounds."""

    def add(self, seconds: float) -> None:
        """Counts one step."""
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
    """Bytes of packed partials that rank 0 passed to merges."""
    num_preempted: int = 0
    """Preemptions: times that an answer returned to the queue."""
    num_recomputed_tokens: int = 0
    """Tokens recomputed because their keys were lost or evicted."""
    num_drafted: int = 0
    """Drafted tokens that a step verified."""
    num_accepted: int = 0
    """Accepted drafted tokens."""
    num_sampled: int = 0
    """Sampled tokens of answers."""
    num_row_steps: int = 0
    """Decode steps, counted once per answer in each."""
    num_contexts: int = 0
    """Number of contexts."""
    snapshot_bytes: int | None = None
    """Bytes of keys and values on storage; None without storage."""

    def add_step(self, kind: str, seconds: float, merge_bytes: int) -> None:
        """Counts one step."""
        self.merge_bytes += merge_bytes
        if (times := self.steps.get(kind)) is None:
            times = self.steps[kind] = StepTimes()
        times.add(seconds)
