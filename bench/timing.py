"""What is measured, and how measurements become rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Decoded:
    """One timed generation. `decode_seconds` runs from the first generated token to the last, `wall_seconds` from the
    call to its return."""

    token_ids: Sequence[int]
    decode_seconds: float
    wall_seconds: float

    @property
    def decode_rate(self) -> float:
        """Tokens per second."""
        return (len(self.token_ids) - 1) / self.decode_seconds

    @property
    def wall_rate(self) -> float:
        return len(self.token_ids) / self.wall_seconds


def compare(service: Sequence[float], baseline: Sequence[float]) -> dict[str, float]:
    """Medians of two lists of rates and their ratio, above 1 where the service is faster; the spread as well."""
    ratios = [a / b for a, b in zip(service, baseline, strict=True)]
    return {
        "ratio": round(median(service) / median(baseline), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "service_tokens_per_s": round(median(service), 2),
        "baseline_tokens_per_s": round(median(baseline), 2),
    }


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that two outputs have in common from the start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
