"""Measured quantities, and their conversion to rows."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Decoded:
    """One timed generation, or several at once, whose tokens then follow one another. `decode_seconds` runs from the
    first generated token to the last, `wall_seconds` from the call to its return."""

    token_ids: Sequence[int]
    decode_seconds: float
    wall_seconds: float
    num_sequences: int = 1

    @property
    def decode_rate(self) -> float:
        """Tokens per second, without each generation's first."""
        return (len(self.token_ids) - self.num_sequences) / self.decode_seconds

    @property
    def answers(self) -> list[Sequence[int]]:
        """The tokens of each generation; all have the same number."""
        length = len(self.token_ids) // self.num_sequences
        return [self.token_ids[i * length : (i + 1) * length] for i in range(self.num_sequences)]

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


def slowest(ranks: Sequence[Mapping[Name, Sequence[float]]]) -> dict[Name, list[float]]:
    """By call and turn, the seconds of the rank that took longest, from those of all ranks."""
    return {name: [max(turn) for turn in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}


def latency(seconds: Sequence[float]) -> dict[str, float]:
    """Median and 95th percentile in microseconds, the latter between the two nearest turns."""
    high = quantiles(seconds, n=20, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
    return {"latency_us_median": round(median(seconds) * 1e6, 1), "latency_us_p95": round(high * 1e6, 1)}


def percentiles(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """`name`_p50, _p95 and _p99 in milliseconds, between the two nearest values; None when there is none."""
    cuts = quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else list(seconds) * 99
    return {f"{name}_p{rank}": round(cuts[rank - 1] * 1e3, 2) if cuts else None for rank in (50, 95, 99)}
