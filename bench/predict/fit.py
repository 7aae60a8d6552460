"""Constants of a machine from measured latencies: least squares of relative errors, no constant below 0."""

import random
from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.predict.formulas import Terms, Work

HELD_OUT = 0.3
"""Share of the points that the fit does not see."""
MAX_PASSES = 30
SMALLEST_SHARE = 0.1
"""Of a measured latency: a prediction below it weighs no more than one at it."""


class Point(NamedTuple):
    """A measured latency, and the terms that the formulas count for it."""

    name: str
    work: Work
    seconds: float


class Error(NamedTuple):
    """Relative errors of predictions, |predicted / measured - 1|."""

    num_points: int
    median: float
    worst: float
    worst_point: str


class Fit(NamedTuple):
    """Seconds per term; the errors on the points that were fitted, and on those held out."""

    constants: Terms
    trained: Error
    held_out: Error


def fit(points: Sequence[Point], seed: int) -> Fit:
    """Fits a part of the points, which follows from the seed, and checks the rest.

    Raises ValueError when there are fewer points than twice the constants.
    """
    num_constants = sum(1 for column in zip(*(_all_terms(p.work) for p in points), strict=True) if any(column))
    if len(points) < 2 * num_constants or len(points) < 2:
        raise ValueError(f"{len(points)} points are too few for {num_constants} constants")
    shuffled = random.Random(seed).sample(list(points), len(points))
    num_held_out = max(1, round(HELD_OUT * len(points)))
    held_out, trained = shuffled[:num_held_out], shuffled[num_held_out:]
    constants = solve(trained)
    return Fit(constants, error(trained, constants), error(held_out, constants))


def solve(points: Sequence[Point]) -> Terms:
    """The constants for which the sum of (predicted - measured)^2 / (predicted * measured) is least.

    Half and double the measured latency count the same. Weights, and which of two overlapped works is the longer one,
    depend on the constants: fitted again until those stay.
    """
    seconds = np.array([point.seconds for point in points])
    constants = non_negative([_all_terms(point.work) for point in points], seconds, seconds)
    for _ in range(MAX_PASSES):
        predicted = np.array([point.work.seconds(constants) for point in points])
        scale = np.sqrt(np.maximum(predicted, SMALLEST_SHARE * seconds) * seconds)
        before, constants = constants, non_negative([p.work.critical(constants) for p in points], seconds, scale)
        if np.allclose(before, constants, rtol=1e-6, atol=0):
            break
    return constants


def non_negative(terms: Sequence[Terms], seconds: NDArray[np.float64], scale: NDArray[np.float64]) -> Terms:
    """Least squares of errors in units of `scale`, no constant below 0.

    The best of the least squares over all subsets of the terms whose solution is nowhere negative: with so few terms
    that is exact and short.
    """
    rows, goal = np.array(terms, dtype=float) / scale[:, None], seconds / scale
    sizes = np.abs(rows).max(axis=0)
    used = [i for i in range(len(sizes)) if sizes[i] > 0]
    best, least = np.zeros(len(sizes)), float(goal @ goal)
    for size in range(1, len(used) + 1):
        for subset in map(list, combinations(used, size)):
            found = np.linalg.lstsq(rows[:, subset] / sizes[subset], goal)[0] / sizes[subset]
            loss = float(np.square(rows[:, subset] @ found - goal).sum())
            if found.min() >= 0 and loss < least:
                best, least = np.zeros(len(sizes)), loss
                best[subset] = found
    return Terms(*best.tolist())


def error(points: Sequence[Point], constants: Terms) -> Error:
    """How far predictions are off."""
    errors = [abs(point.work.seconds(constants) / point.seconds - 1) for point in points]
    worst = max(range(len(points)), key=errors.__getitem__)
    return Error(len(points), median(errors), errors[worst], points[worst].name)


def _all_terms(work: Work) -> Terms:
    """The terms as if nothing were overlapped."""
    return work.serial.plus(work.hop.plus(work.meanwhile).times(work.num_hops))
