"""Modelled latency by sequence length as a picture."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from bench.predict.constants import CLUSTERS, SPEED_UP
from longleaf.merge import MERGES

Row = dict[str, Any]


def draw(latencies: list[Row], speed_ups: list[Row], path: Path) -> None:
    """Writes latencies on the paper's cluster, and ring over tree on all clusters, as PNG. All lines are modelled."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    for method in (*MERGES, "ring", "pass-q"):
        rows = [r for r in latencies if (r["cluster"], r["latencies"], r["method"]) == ("16x8", "solved", method)]
        style = "-" if method in MERGES else "--"
        label = f"tree, {method}" if method in MERGES else method
        left.plot([r["context_tokens"] for r in rows], [r["latency_us"] / 1e3 for r in rows], style, label=label)
    _axes(left, "Modelled: one layer's decode step, 16 x 8 H100, 16 heads of 128, bf16", "milliseconds")
    for cluster in CLUSTERS:
        rows = [r for r in speed_ups if (r["cluster"], r["latencies"]) == (cluster, "solved")]
        ratios = [r["ring_over_paper_merge"] for r in rows]
        right.plot([r["context_tokens"] for r in rows], ratios, "o-", markersize=3, label=f"modelled, {cluster}")
    last = next(r for r in speed_ups if "published" in r)
    right.plot([last["context_tokens"]], [SPEED_UP.value], "k*", markersize=11, label="published, 16x8: about 8")
    _axes(right, "Ring over tree with the paper's merge", "ratio")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _axes(axis: Any, title: str, unit: str) -> None:
    axis.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel=unit)
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8)
