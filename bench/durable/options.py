"""The options of the measurements, and the format of the results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, NamedTuple

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Defaults for values that a part does not set."""

    tokens: int
    """Tokens of the measured context."""
    repeats: int
    """Timed turns of each side."""
    world_size: int


class Goal(NamedTuple):
    """A figure and its limit."""

    name: str
    value: float
    wanted: float
    is_least: bool = False
    """Whether it should be at least so large; else at most."""

    @property
    def is_met(self) -> bool:
        return self.value >= self.wanted if self.is_least else self.value <= self.wanted

    def as_row(self) -> Row:
        bound = "at least" if self.is_least else "at most"
        return {"name": self.name, "value": round(self.value, 4), "wanted": f"{bound} {self.wanted:g}"} | {
            "is_met": self.is_met
        }


def result(options: Options, figures: Mapping[str, object], goals: Sequence[Goal]) -> Row:
    """The row of a part."""
    parameters = {"context_tokens": options.tokens, "repeats": options.repeats, "world_size": options.world_size}
    return {**parameters, **figures, "goals": [goal.as_row() for goal in goals]}


def medians(turns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By name, over turns that all have the same names."""
    return {name: round(median(turn[name] for turn in turns), 4) for name in turns[0]}


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """`name`_min and _max."""
    return {f"{name}_min": round(min(values), 4), f"{name}_max": round(max(values), 4)}


def latency(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """`name`_ms_p50 and _p95, between the two nearest."""
    cuts = quantiles(seconds, n=20, method="inclusive") if len(seconds) > 1 else list(seconds) * 19
    return {f"{name}_ms_p50": round(median(seconds) * 1e3, 3), f"{name}_ms_p95": round(cuts[-1] * 1e3, 3)}
