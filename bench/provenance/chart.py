"""How often sources are where answers stand, by the length of the context, as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from bench.needle.answers import wilson
from bench.needle.chart import short
from bench.provenance.rows import Row

FOUND = (
    ("the first source, raw", "raw", "top1"),
    ("the first source, by contrast", "contrast", "top1"),
    ("the one with the largest drop", "raw", "drop_is_largest"),
)
"""Label, ranking and column. Drops are those of the same spans, however they are ranked."""
APART = (("by the first source's share", "area_by_share"), ("by the largest drop", "area_by_drop"))
STYLES = ("o-", "s-", "^-")
SHIFT = 0.05
"""Between points of one length, as a share of it: they would cover one another."""
LOWEST = 0.9
"""The picture begins there, or below: small differences shall look small."""


def draw(rows: Sequence[Row], path: Path) -> None:
    """Writes two panels per model as PNG: the share of right answers whose source was found, over all tasks, and how
    well these are separated from answers about absent keys. Models that have only costs get no panels.
    """
    models = list(dict.fromkeys(row["model"] for row in rows if "top1" in row))
    if not models:
        return
    size = (11, 4.2 * len(models))
    figure, axes = pyplot.subplots(len(models), 2, figsize=size, squeeze=False, layout="constrained")
    for model, (left, right) in zip(models, axes, strict=True):
        mine = [row for row in rows if row["model"] == model]
        _found(left, [row for row in mine if row.get("answers") == "right"])
        lengths = sorted({row["tokens"] for row in mine if "top1" in row})
        _axes(
            left,
            lengths,
            f"Right answers whose source is where the fact stands: {model}",
            "share, and its 95% interval",
        )
        _apart(right, [row for row in mine if "area_by_drop" in row and row["method"] == "raw"])
        _axes(right, lengths, "Right answers against keys that are not there", "area under the ROC curve")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _found(axis: Any, rows: Sequence[Row]) -> None:
    for place, (label, method, column) in enumerate(FOUND):
        here = [row for row in rows if row["method"] == method]
        lengths = sorted({row["tokens"] for row in here})
        shares, below, above = list[float](), list[float](), list[float]()
        for tokens in lengths:
            found, requested = _sums(here, tokens, column)
            low, high = wilson(found, requested)
            shares.append(found / requested)
            below.append(shares[-1] - low)
            above.append(max(0.0, high - shares[-1]))  # rounded, it may end below a share of 1
        where = _shifted(lengths, place)
        axis.errorbar(where, shares, [below, above], fmt=STYLES[place], markersize=5, capsize=3, label=label)


def _sums(rows: Sequence[Row], tokens: int, column: str) -> tuple[int, int]:
    """Over all tasks: answers whose source was found, and all answers."""
    here = [row for row in rows if row["tokens"] == tokens]
    return sum(row[column] for row in here), sum(row["of"] for row in here)


def _apart(axis: Any, rows: Sequence[Row]) -> None:
    line = sorted(rows, key=lambda row: row["tokens"])
    for place, (label, column) in enumerate(APART):
        where = _shifted([row["tokens"] for row in line], place)
        axis.plot(where, [row[column] for row in line], STYLES[place], markersize=5, label=label)


def _shifted(lengths: Sequence[int], place: int) -> list[float]:
    return [tokens * (1 + SHIFT * (place - 1)) for tokens in lengths]


def _axes(axis: Any, lengths: Sequence[int], title: str, unit: str) -> None:
    axis.set(xscale="log", xlabel="tokens of context", ylabel=unit)
    axis.set_xticks(lengths, [short(tokens) for tokens in lengths])
    axis.set_xticks([], minor=True)
    axis.set_ylim(min(LOWEST, axis.get_ylim()[0]), 1.005)
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=len(FOUND))
