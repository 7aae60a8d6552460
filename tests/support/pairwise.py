"""Pairwise covers of products, which have every two values of two factors in some row."""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any


def pairwise_cover(factors: Sequence[Sequence[Any]], seed: int = 0) -> Iterator[tuple[Any, ...]]:
    """Rows of the product of factors, chosen greedily: every two values of two factors are in one of them. The same
    rows for the same seed.
    """
    product = list(itertools.product(*factors))
    random.Random(seed).shuffle(product)

    def pairs(row: tuple[Any, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(row), 2))

    missing = set[Any]().union(*map(pairs, product))
    while missing:
        best = max(product, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        yield best
