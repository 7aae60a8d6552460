"""Selects the cases of a parametrized test for `make test`."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any


def sample(cases: Sequence[frozenset[Any]], count: int) -> set[int]:
    """Greedy cover: indices of `count` cases with the most distinct parameter values, and then with the most distinct
    pairs of values; ties go to the earlier case."""
    left, taken = list(range(len(cases))), set[int]()
    pairs = [set(map(frozenset, combinations(case, 2))) for case in cases]
    seen, seen_pairs = set[Any](), set[frozenset[Any]]()
    while left and len(taken) < count:
        best = max(left, key=lambda number: (len(cases[number] - seen), len(pairs[number] - seen_pairs)))
        left.remove(best)
        seen |= cases[best]
        seen_pairs |= pairs[best]
        taken.add(best)
    return taken


def parameter_values(item: Any) -> frozenset[tuple[str, str]]:
    """Names and values of a case's parameters; tuples count per element."""
    found = set[tuple[str, str]]()
    for name, value in item.callspec.params.items():
        parts = value if isinstance(value, tuple | list) else (value,)
        found |= {(f"{name} {place}", repr(part)) for place, part in enumerate(parts)}
    return frozenset(found)
