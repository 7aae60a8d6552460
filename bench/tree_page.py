"""Writes bench/results/tree.md from what bench.merge, bench.choose, bench.attention and bench.predict found. Usage:

    python -m bench.tree_page

What surprised is written by hand, in tree_surprises.md beside the page, and becomes its last section.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.attention.steps import ONE_DEVICE, PAPER, QUERY_RING, RING, TREE
from bench.harness.arguments import RESULTS
from bench.merge import against_baseline
from bench.report import machine

MIB = 2**20
COLUMNS = (
    ("one device", ONE_DEVICE, "gloo"),
    ("tree", TREE, "gloo"),
    ("tree, shared memory", TREE, "shared_memory"),
    ("paper", PAPER, "gloo"),
    ("ring", RING, "gloo"),
    ("pass-Q ring", QUERY_RING, "gloo"),
)
"""Headings, and which method on which transport stands below."""

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the measurements and of the page")
    folder = parser.parse_args().results
    (folder / "tree.md").write_text("\n".join(page(folder)))


def page(folder: Path) -> Iterator[str]:
    """The page, line by line; what was not measured is left out."""
    yield from ("# Merges, and attention over many ranks", "")
    yield from ("Written by `python -m bench.tree_page`; the rows are in the JSON files beside this page.", "")
    if (folder / "merge.json").is_file():
        yield from merges(json.loads((folder / "merge.json").read_text()))
    if (folder / "choose.json").is_file():
        yield from choices(json.loads((folder / "choose.json").read_text()))
    if (folder / "attention.json").is_file():
        yield from attention(json.loads((folder / "attention.json").read_text()))
    if (folder / "predict.json").is_file():
        yield from prediction(json.loads((folder / "predict.json").read_text()))
    surprises = folder / "tree_surprises.md"
    if surprises.is_file():
        yield from ("## What surprised", "", surprises.read_text())


def merges(found: Row) -> Iterator[str]:
    """A table per number of nodes and batch: a line per merge, a column per world size."""
    rows: list[Row] = found["rows"]
    first = rows[0]
    yield from ("## Merges", "")
    yield f"Partials of {first['heads']} heads of {first['head_dim']}, float32. Each cell: microseconds, median and"
    yield "95th percentile, of the slowest rank; how many times faster than `paper` over gloo; collectives; bytes that"
    yield "a rank sends. `shared_memory` is inside nodes, with gloo between them. `python -m bench.merge`"
    cells = {
        (row["nodes"], row["batch"], row["transport"], row["merge"], row["world_size"]): merge_cell(row, ratio)
        for row, ratio in zip(rows, against_baseline(rows), strict=True)
    }
    sizes = sorted({row["world_size"] for row in rows})
    for nodes, batch in sorted({(row["nodes"], row["batch"]) for row in rows}):
        yield from ("", f"### {counted(nodes, 'node')}, {counted(batch, 'row')}", "")
        yield from head("transport", "merge", *(counted(size, "rank") for size in sizes))
        here = [row for row in rows if (row["nodes"], row["batch"]) == (nodes, batch)]
        for name in dict.fromkeys((row["transport"], row["merge"]) for row in here):
            yield line(*name, *(cells.get((nodes, batch, *name, size), "") for size in sizes))
    yield from ("", f"- {machine(found['machine'])}", "")


def merge_cell(row: Row, ratio: float) -> str:
    sent = "?" if row["bytes_sent_per_rank"] is None else f"{row['bytes_sent_per_rank']:,}"
    spread = f"{row['latency_us_median']:,.0f} ({row['latency_us_p95']:,.0f})"
    return f"{spread}, x {ratio:.1f}, {row['collectives']}, {sent} B"


def choices(found: Row) -> Iterator[str]:
    """How good the choice at the start is, and how long it takes."""
    yield from ("## The choice at the start", "")
    yield "What ranks chose in each of several starts, and how much slower than the fastest merge that is: median and"
    yield "worst of the starts. Seconds are those of the whole choice, on the slowest rank. `python -m bench.choose`"
    yield ""
    yield from head("nodes", "ranks", "rows", "transport", "chosen", "fastest", "ratio", "worst", "seconds")
    for row in sorted(found["rows"], key=lambda row: (row["nodes"], row["world_size"], row["rows"])):
        place = (row["nodes"], row["world_size"], row["rows"], row["transport"])
        took = (f"{row['ratio']:.2f}", f"{row['ratio_worst']:.2f}", f"{row['seconds']:.2f}")
        yield line(*place, ", ".join(row["chosen"]), row["fastest"], *took)
    yield from ("", f"- {machine(found['machine'])}", "")


def prediction(found: Row) -> Iterator[str]:
    """The model's errors here, and the paper's cluster: what is modelled beside what is published."""
    yield from ("## A model, here and on the paper's cluster", "")
    yield "The formulas of `bench/predict` fitted to the rows on this page. Errors are relative, on rows that the fit"
    yield from ("did not see. `python -m bench.predict`", "")
    yield from head("rows", "fitted", "held out", "median error", "worst error", "of")
    for row in found["measured_here"]["fits"]:
        yield fit_line(row)
    modelled = found["papers_cluster"]
    yield from ("", "The same formulas with published constants alone. Modelled, but for the last column:", "")
    yield from head("nodes x GPUs", "tokens", "ring / paper's merge", "ring / best merge", "best merge", "published")
    for row in modelled["speed_ups"]:
        if row["latencies"] == "solved":
            ratios = (f"{row[name]:,.1f}" for name in ("ring_over_paper_merge", "ring_over_best"))
            published = f"about {row['published']:g}" if "published" in row else ""
            yield line(row["cluster"], f"{row['context_tokens']:,}", *ratios, row["best_merge"], published)
    yield from ("", "Where model and publications part:", "", *(f"- {text}" for text in modelled["disagreements"]))
    yield from ("", "![modelled latency by length](predict.png)", "")


def fit_line(row: Row) -> str:
    """The errors of one group of rows; the reason where they were too few."""
    if "error" in row:
        return line(row["group"], row["error"], "", "", "", "")
    error = row["held_out"]
    shares = (f"{error[name]:.0%}" for name in ("median_relative_error", "worst_relative_error"))
    return line(row["group"], row["fitted_on"]["points"], error["points"], *shares, error["worst_point"])


def attention(found: Row) -> Iterator[str]:
    """Latency, memory and bytes by network, ranks and length; then the sweep."""
    rows = [row for row in found["rows"] if not row.get("is_sweep")]
    first = found["rows"][0]
    yield from ("## One decode attention step", "", "![latency by length](attention.png)", "")
    yield f"One row of {first['heads']} query heads over {first['kv_heads']} key heads of {first['head_dim']}, float32;"
    yield "one thread per rank, all on this machine's processors. Milliseconds, medians of the slowest rank."
    yield "`two-tier A/B`: hosts with A Gbit/s inside and B between. `python -m bench.attention --sweep`"
    for network in dict.fromkeys(row["network"] for row in rows):
        here = places([row for row in rows if row["network"] == network])
        yield from ("", f"### {network}", "")
        yield from head("ranks", "tokens", *(title for title, *_ in COLUMNS), "merge of tree", "ring / tree")
        for (ranks, tokens), methods in here.items():
            yield line(ranks, f"{tokens:,}", *latencies(methods), *against_ring(methods))
        yield from ("", "Peak memory per rank in MiB, keys included, and bytes that a rank sends per step:", "")
        yield from head(
            "ranks", "tokens", "tree MiB", "ring MiB", "tree / ring", "tree B", "paper B", "ring B", "pass-Q B"
        )
        for (ranks, tokens), methods in here.items():
            yield line(ranks, f"{tokens:,}", *memory(methods), *sent(methods))
    yield from sweep([row for row in found["rows"] if row.get("is_sweep")])
    yield from ("", f"- {machine(found['machine'])}", "")


def sweep(rows: Sequence[Row]) -> Iterator[str]:
    """Where ring comes close, or wins."""
    if not rows:
        return
    yield from ("", f"### Rates, {rows[0]['beside_world_size']} ranks, {rows[0]['context_tokens']:,} tokens", "")
    yield from head("network", *(title for title, *_ in COLUMNS), "merge of tree", "ring / tree")
    for network in dict.fromkeys(row["network"] for row in rows):
        (methods,) = places([row for row in rows if row["network"] == network]).values()
        yield line(network, *latencies(methods), *against_ring(methods))


def places(rows: Sequence[Row]) -> dict[tuple[int, int], dict[tuple[str, str], Row]]:
    """By ranks and tokens, by method and transport."""
    found: dict[tuple[int, int], dict[tuple[str, str], Row]] = {}
    for row in rows:
        place = found.setdefault((row["beside_world_size"], row["context_tokens"]), {})
        place[row["method"], row["transport"]] = row
    return found


def latencies(methods: dict[tuple[str, str], Row]) -> Iterator[str]:
    for _, *key in COLUMNS:
        row = methods.get((key[0], key[1]))
        yield f"{row['latency_us_median'] / 1e3:,.2f}" if row else ""


def against_ring(methods: dict[tuple[str, str], Row]) -> tuple[str, str]:
    tree = methods[TREE, "gloo"]
    return tree["merge"], f"{tree['ring_ratio']:.1f}"


def memory(methods: dict[tuple[str, str], Row]) -> tuple[str, str, str]:
    tree, ring = (methods[name, "gloo"]["peak_bytes_per_rank"] for name in (TREE, RING))
    if tree is None or ring is None:
        return "?", "?", "?"
    return f"{tree / MIB:,.1f}", f"{ring / MIB:,.1f}", f"{tree / ring:.2f}"


def sent(methods: dict[tuple[str, str], Row]) -> Iterator[str]:
    for name in (TREE, PAPER, RING, QUERY_RING):
        yield f"{methods[name, 'gloo']['bytes_sent_per_rank']:,}"


def head(*titles: object) -> tuple[str, str]:
    return line(*titles), "|" + " --- |" * len(titles)


def line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


if __name__ == "__main__":
    main()
