"""Exponential backoff."""

MAX_DOUBLINGS = 64
"""Limit on the exponent, so that no number of retries overflows."""


def backoff_delay(number: int, first: float, longest: float) -> float:
    """Seconds before retry `number`, counted from 1: `first`, then twice the previous delay, at most `longest`."""
    return min(longest, first * 2 ** min(number - 1, MAX_DOUBLINGS))
