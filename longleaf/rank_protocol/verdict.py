"""Comparison of distributed attention with plain attention, and the verdict on it."""

import msgspec
from msgspec.structs import replace

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


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of the logits of an answer from distributed attention with those of plain attention on rank 0.

    Rank 0 measures. `judge` adds the verdict, and the coordinator the number of prompt tokens and ranks.
    """

    passed: bool = False
    """No failure, the judged difference is within the tolerance, and the result is conclusive."""
    max_difference: float = 0.0
    """Largest absolute difference between a logit and that of plain attention in float32, over all compared tokens and
    the vocabulary; NaN if one of the two is NaN. Judged if `dtype` is float32."""
    tolerance: float = 0.0
    max_logit: float = 0.0
    """Largest absolute logit of plain attention."""
    dtype: str = ""
    """Least precise numeric type among weights, keys and values, and transmitted partials."""
    distance: float = 0.0
    """Distance of a token's logits from those of plain attention in float32, relative to the spread of the latter:
    ratio of norms, median over the tokens. Judged if `dtype` is less precise than float32."""
    reference_distance: float = 0.0
    """The same distance for plain attention in `reference_dtype`: the effect of rounding on this model."""
    reference_dtype: str = ""
    """`dtype`, or bfloat16 if that is int8, which plain attention does not support."""
    is_conclusive: bool = False
    """False if there is nothing to compare with, or if rounding is so large that wrong ranks might pass."""
    worst_index: int = 0
    """Index in the answer of the token with the largest difference."""
    prompt_tokens: int = 0
    compared_tokens: int = 0
    """Compared tokens of the answer; the first one follows the prompt."""
    equal_tokens: int = 0
    """Tokens for which both attentions select the same token greedily. If `passed`, the others are near ties."""
    holding_ranks: int = 0
    """Ranks that held keys of the prompt or the answer; other ranks were not tested."""
    world_size: int = 0
    reference_seconds: float = 0.0
    """Duration of plain attention, during which all streams waited."""
    failure: str = ""
    """Reason why there was nothing to compare with; empty otherwise."""


def judge(found: Verification) -> Verification:
    """Adds the verdict to a comparison. In float32 every logit is judged. In less precise types the tolerance is a
    multiple of plain attention's own distance from float32. A larger distance fails; a smaller one passes only if a
    wrong implementation would exceed it.
    """
    if found.failure:
        return found
    if found.dtype not in TIMES_PLAIN:
        tolerance = MAX_DIFFERENCE * found.max_logit
        return replace(found, tolerance=tolerance, is_conclusive=True, passed=found.max_difference <= tolerance)
    tolerance = TIMES_PLAIN[found.dtype] * found.reference_distance
    is_within = found.distance <= tolerance
    is_conclusive = not is_within or tolerance <= CONCLUSIVE_RATIO
    return replace(found, tolerance=tolerance, is_conclusive=is_conclusive, passed=is_within and is_conclusive)
