"""Accuracy by length and depth as a picture."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from bench.needle.answers import DEPTHS
from longleaf.runs import ceil_div

Row = dict[str, Any]


def draw(rows: list[Row], path: Path) -> None:
    """Writes a heat map per task, length by depth, as PNG. Tasks whose questions have no depth have one band."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lengths = sorted({row["context_tokens"] for row in rows})
    num_columns = ceil_div(len(tasks), 2)
    size = (3.2 * num_columns + 1, 6.4)
    figure, axes = pyplot.subplots(2, num_columns, figsize=size, squeeze=False, layout="constrained")
    panels = list(axes.flat)
    image: Any = None
    for axis, task in zip(panels, tasks, strict=False):
        image = _panel(axis, [row for row in rows if row["task"] == task], task, lengths)
    for axis in panels[len(tasks) :]:
        axis.set_axis_off()
    figure.colorbar(image, ax=axes, label="share of right answers", shrink=0.7)
    figure.suptitle(f"Right answers by length and depth: {rows[0]['model']}")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(axis: Any, rows: list[Row], task: str, lengths: list[int]) -> Any:
    by_depth = {(row["depth"], row["context_tokens"]): row["accuracy"] for row in rows}
    has_depths = any(depth is not None for depth, _ in by_depth)
    depths = [i / DEPTHS for i in range(DEPTHS)] if has_depths else [None]
    grid = [[by_depth.get((depth, length), float("nan")) for length in lengths] for depth in depths]
    image = axis.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    whole = [by_depth.get((None, length)) for length in lengths]
    labels = [
        f"{short(n)}\n{share:.0%}" if share is not None else short(n) for n, share in zip(lengths, whole, strict=True)
    ]
    axis.set_xticks(range(len(lengths)), labels, fontsize=8)
    axis.set_yticks([0, len(depths) - 1] if has_depths else [], ["start", "end"] if has_depths else [], fontsize=8)
    axis.set_title(task.replace("_", " "), fontsize=10)
    return image


def short(tokens: int) -> str:
    """A length as an axis label."""
    return f"{tokens // 1_000_000}M" if tokens >= 1_000_000 else f"{tokens // 1000}k"
