"""Judges from a comparison whether the logits of distributed attention are correct."""

from typing import NamedTuple

from longleaf.rank_protocol.step import ComparisonRow

MAX_DIFFERENCE = 1e-4
"""Tolerance between two logits in float32, relative to the largest logit. Correct implementations differed by 3e-6 on
small random checkpoints, whose logits are the most sensitive."""
TIMES_PLAIN = {"float16": 2.0, "bfloat16": 2.0, "int8": 4.0}
"""Tolerated distance from float32, as a multiple of that of plain attention. On 16 families of small random
checkpoints, correct implementations reached 1.4 in float16 and bfloat16, and 1.6 in int8 (2.8 once, with experts);
without the partials of one of three ranks it was 7.6 or more."""
CONCLUSIVE_RATIO = 1 / 3
"""Share of the logits' spread from which an error is detectable: without the partials of one of three ranks, the error
was at least 0.38."""


class Verdict(NamedTuple):
    """Result of judging a comparison."""

    tolerance: float
    is_conclusive: bool
    passed: bool


def judge(found: ComparisonRow) -> Verdict:
    """In float32 every logit is judged. In less precise types the tolerance is a multiple of plain attention's own
    distance from float32. A larger distance fails; a smaller one passes only if a wrong implementation would exceed it.
    """
    if found.failure:
        return Verdict(0.0, is_conclusive=False, passed=False)
    if found.dtype not in TIMES_PLAIN:
        tolerance = MAX_DIFFERENCE * found.max_logit
        return Verdict(tolerance, is_conclusive=True, passed=found.max_difference <= tolerance)
    tolerance = TIMES_PLAIN[found.dtype] * found.plain_distance
    is_within = found.distance <= tolerance
    is_conclusive = not is_within or tolerance <= CONCLUSIVE_RATIO
    return Verdict(tolerance, is_conclusive=is_conclusive, passed=is_within and is_conclusive)
