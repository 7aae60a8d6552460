"""Size of a measurement, and the format of its result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.durable.options import Goal, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How much of a part."""

    repeats: int
    """Rounds, rotations or turns."""
    seconds: float
    """Duration of each turn."""
    world_size: int


def result(options: Options, figures: Mapping[str, object], goals: Sequence[Goal]) -> Row:
    """The result of a part."""
    parameters = {"repeats": options.repeats, "seconds": options.seconds, "world_size": options.world_size}
    return {**parameters, **figures, "goals": [goal.as_row() for goal in goals]}
