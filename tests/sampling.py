"""Which cases of a parametrized test a short run takes."""

from collections.abc import Sequence
from typing import Any


def sample(cases: Sequence[frozenset[Any]], count: int) -> set[int]:
    """Numbers of `count` cases that have as many different values of parameters as possible, the earlier ones first
    where several have as many new ones."""
    left, seen, taken = list(range(len(cases))), set[Any](), set[int]()
    while left and len(taken) < count:
        best = max(left, key=lambda number: len(cases[number] - seen))
        left.remove(best)
        seen |= cases[best]
        taken.add(best)
    return taken


def values_of(item: Any) -> frozenset[tuple[str, str]]:
    """Names and values of a case's parameters; what is a row of several values counts by each of them."""
    found = set[tuple[str, str]]()
    for name, value in item.callspec.params.items():
        parts = value if isinstance(value, tuple | list) else (value,)
        found |= {(f"{name} {place}", repr(part)) for place, part in enumerate(parts)}
    return frozenset(found)
