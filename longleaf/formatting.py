"""Numbers for people: with units and thousands separators, without exponents. Machine-readable output has bare
numbers. And names and messages that quote a file, for terminals."""

from collections.abc import Sequence
from decimal import Decimal
from itertools import pairwise
from math import isfinite

_PERIODS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def printable(text: str) -> str:
    """A name or a message, with each control character replaced, for terminals, headers and sources."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text.encode(errors="replace").decode())


def human_seconds(seconds: float) -> str:
    """A duration: 692 ms, 1.87 s, 31 min 10 s, 2 h 5 min."""
    if not isfinite(seconds):
        return f"{seconds} s"
    if round(seconds * 1e6) < 1000:
        return f"{seconds * 1e6:.0f} µs" if round(seconds * 1e6) else "0 s"
    if round(seconds * 1e3) < 1000:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    size, unit, lesser, lesser_unit = next((*more, *less) for more, less in pairwise(_PERIODS) if whole >= more[0])
    rest = whole % size // lesser
    return f"{whole // size:,} {unit}" + (f" {rest} {lesser_unit}" if rest else "")


def human_bytes(size: float) -> str:
    """A size, rounded: 1.5 MiB. Exact limits are formatted with `human_number` as bytes instead."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def human_angle(radians: float) -> str:
    """An angle, rounded: 60 nrad or 0.12 rad."""
    for unit in ("rad", "mrad", "µrad", "nrad", "prad"):
        if radians >= 0.1 or not radians:
            return f"{human_rounded(radians, 2)} {unit}"
        radians *= 1000
    return f"{human_rounded(radians, 2)} frad"


def human_rounded(value: float, digits: int = 3) -> str:
    """The number with so many significant digits, without exponent: 0.0000318 or 12,300."""
    return f"{Decimal(f'{value:.{digits}g}'):,f}"


def human_number(value: float) -> str:
    """The number, to six decimals: 1,870 or 0.05."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6f}".rstrip("0").rstrip(".")


def human_count(count: int, noun: str) -> str:
    """A count with its noun: 1 context, 1,200 contexts."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def human_list(names: Sequence[str], most: int) -> str:
    """At most `most` names, and the number of the others."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest:,} more" if rest > 0 else "")


def describe_dequantization(layouts: Sequence[str], dtype: str) -> str:
    """The stored layouts and the computed type of quantized weights: `fp8 128x128 checkpoint, computed in bfloat16`.
    Empty if there are no layouts.
    """
    return f"{human_list(layouts, 2)} checkpoint, computed in {dtype}" if layouts else ""


def describe_dtypes(dtype: str, kv_dtype: str, quantization: str = "") -> str:
    """The type of the weights, with the method of their quantization, and that of keys and values if it differs."""
    weights = f"{quantization} weights computed in {dtype}" if quantization else dtype
    return weights if kv_dtype in ("", dtype) else f"{weights}, keys in {kv_dtype}"
