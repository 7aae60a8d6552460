"""Selects the cases of a parametrized test for `make test`."""

from collections.abc import Sequence
from typing import Any


def sample(cases: Sequence[frozenset[Any]], count: int) -> set[int]:
    """Greedy cover: indices of `count` cases with the most distinct parameter values; ties go to the earlier case."""
    left, seen, taken = list(range(len(cases))), set[Any](), set[int]()
    while left and len(taken) < count:
        best = max(left, key=lambda number: len(cases[number] - seen))
        left.remove(best)
        seen |= cases[best]
        taken.add(best)
    return taken


def parameter_values(item: Any) -> frozenset[tuple[str, str]]:
    """Names and values of a case's parameters; tuples count per element."""
    found = set[tuple[str, str]]()
    for name, value in item.callspec.params.items():
        parts = value if isinstance(value, tuple | list) else (value,)
        found |= {(f"{name} {place}", repr(part)) for place, part in enumerate(parts)}
    return frozenset(found)
