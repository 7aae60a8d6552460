"""Whether logits of the sharded path are those of plain attention, judged from a comparison of both."""

from typing import NamedTuple

from longleaf.rank_protocol.step import ComparisonRow

MAX_DIFFERENCE = 1e-4
"""Allowed between two logits in float32, as a share of the largest: right paths of small random checkpoints, whose
logits are the most easily upset, differed by 3e-6."""
TIMES_PLAIN = {"float16": 2.0, "bfloat16": 2.0, "int8": 4.0}
"""Distance from float32, as a multiple of that of plain attention. On 16 families of small random checkpoints, right
paths came to 1.4 in float16 and bfloat16; to 1.6, and once, with experts, to 2.8 in int8; without what one of three
ranks had to say it was 7.6 or more."""
TELLING = 1 / 3
"""Share of the logits' spread by which an error is told: without what one of three ranks had to say they were 0.38 of
it off, or more."""


class Verdict(NamedTuple):
    """What is made of a comparison."""

    tolerance: float
    is_conclusive: bool
    passed: bool


def judge(found: ComparisonRow) -> Verdict:
    """In float32 every logit counts; in coarser types how far plain attention itself is from float32. What is further
    off than that is wrong; what is not is right only where a wrong path would be further off."""
    if found.failure:
        return Verdict(0.0, is_conclusive=False, passed=False)
    if found.dtype not in TIMES_PLAIN:
        tolerance = MAX_DIFFERENCE * found.max_logit
        return Verdict(tolerance, is_conclusive=True, passed=found.max_difference <= tolerance)
    tolerance = TIMES_PLAIN[found.dtype] * found.plain_distance
    is_within = found.distance <= tolerance
    is_conclusive = not is_within or tolerance <= TELLING
    return Verdict(tolerance, is_conclusive=is_conclusive, passed=is_within and is_conclusive)
