"""Writes bench/results/tree.md from the results of bench.merge, bench.choose, bench.attention and bench.predict. Usage:

    python -m bench.tree_page

Surprises are written by hand in tree_surprises.md beside the page, and become its last section.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.attention.steps import ONE_DEVICE, PAPER, QUERY_RING, RING, TREE
from bench.harness.arguments import RESULTS
from bench.merge import against_baseline
from bench.pages.rendering import render

BENCHES = ("merge", "choose", "attention", "predict")
COLUMNS = {
    "one device": (ONE_DEVICE, "gloo"),
    "tree": (TREE, "gloo"),
    "tree, shared memory": (TREE, "shared_memory"),
    "paper": (PAPER, "gloo"),
    "ring": (RING, "gloo"),
    "pass-Q ring": (QUERY_RING, "gloo"),
}
"""Headings, and which method on which transport stands below."""

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with the measurements and the page")
    folder = parser.parse_args().results
    (folder / "tree.md").write_text(page(folder))


def page(folder: Path) -> str:
    """The page, without the parts that were not measured."""
    files = {name: folder / f"{name}.json" for name in BENCHES}
    found = {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}
    surprises = folder / "tree_surprises.md"
    if surprises.is_file():
        found["surprises"] = surprises.read_text()
    return render(
        "tree",
        **found,
        merges=merges,
        by_network=by_network,
        places=places,
        columns=COLUMNS,
        tree=COLUMNS["tree"],
        paper=COLUMNS["paper"],
        ring=COLUMNS["ring"],
        query_ring=COLUMNS["pass-Q ring"],
    )


def merges(rows: list[Row]) -> dict[tuple[int, int], dict[tuple[str, str], dict[int, tuple[Row, float]]]]:
    """Rows, and how many times faster than the baseline: by nodes and batch, by transport and merge, by world size."""
    found: dict[tuple[int, int], dict[tuple[str, str], dict[int, tuple[Row, float]]]] = {}
    for row, ratio in zip(rows, against_baseline(rows), strict=True):
        table = found.setdefault((row["nodes"], row["batch"]), {})
        table.setdefault((row["transport"], row["merge"]), {})[row["world_size"]] = row, ratio
    return dict(sorted(found.items()))


def by_network(rows: Sequence[Row], *, is_sweep: bool) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("is_sweep", False) == is_sweep:
            found.setdefault(row["network"], []).append(row)
    return found


def places(rows: Sequence[Row]) -> dict[tuple[int, int], dict[tuple[str, str], Row]]:
    """By ranks and tokens, by method and transport."""
    found: dict[tuple[int, int], dict[tuple[str, str], Row]] = {}
    for row in rows:
        place = found.setdefault((row["beside_world_size"], row["context_tokens"]), {})
        place[row["method"], row["transport"]] = row
    return found


if __name__ == "__main__":
    main()
