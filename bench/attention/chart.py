"""Latency of a decode step by the length of the context as a picture, after Fig. 3 of the Tree Attention paper."""

from typing import Any

import matplotlib

matplotlib.use("Agg")

from pathlib import Path

from matplotlib import pyplot

from bench.attention.steps import ONE_DEVICE, PAPER, QUERY_RING, RING, TREE

Row = dict[str, Any]
STYLES = {
    TREE: ("tree", "tab:green", "o-"),
    PAPER: ("paper's merge", "tab:blue", "s-"),
    RING: ("ring", "tab:red", "^-"),
    QUERY_RING: ("pass-Q ring", "tab:orange", "v-"),
    ONE_DEVICE: ("one device", "tab:gray", "--"),
}


def draw(rows: list[Row], path: Path) -> None:
    """Writes a panel per network and world size as PNG: networks are rows; both axes are logarithmic.

    Rows of a sweep are left out, and so is one rank, which has nothing to merge.
    """
    drawn = [row for row in rows if not row.get("is_sweep") and row["beside_world_size"] > 1] or rows
    networks = list(dict.fromkeys(row["network"] for row in drawn))
    sizes = sorted({row["beside_world_size"] for row in drawn})
    figure, axes = pyplot.subplots(
        len(networks),
        len(sizes),
        figsize=(max(8, 4.2 * len(sizes) + 0.6), 3.4 * len(networks) + 0.4),
        squeeze=False,
        sharey="row",
        layout="constrained",
    )
    for network, line in zip(networks, axes, strict=True):
        for world_size, axis in zip(sizes, line, strict=True):
            _panel(axis, [r for r in drawn if (r["network"], r["beside_world_size"]) == (network, world_size)])
            axis.set_title(f"{network}, {world_size} ranks", fontsize=10)
        line[0].set_ylabel("milliseconds per step")
    handles = {text: line for axis in axes.flat for line, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), fontsize=9)
    first = rows[0]
    shape = f"{first['heads']} query heads, {first['kv_heads']} key heads of {first['head_dim']}, float32"
    figure.suptitle(f"One decode attention step: {shape}", fontsize=11)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(axis: Any, rows: list[Row]) -> None:
    for method, transport in sorted({(row["method"], row["transport"]) for row in rows}):
        line = sorted((r for r in rows if (r["method"], r["transport"]) == (method, transport)), key=_tokens)
        label, colour, style = STYLES[method]
        is_shared = transport == "shared_memory"
        axis.plot(
            [_tokens(row) for row in line],
            [row["latency_us_median"] / 1e3 for row in line],
            style if not is_shared else "D:",
            color=colour,
            markersize=4,
            label=f"{label}, shared memory" if is_shared else label,
        )
    axis.set(xscale="log", yscale="log", xlabel="tokens of context")
    axis.grid(alpha=0.3, which="both")


def _tokens(row: Row) -> int:
    return row["context_tokens"]
