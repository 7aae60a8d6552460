"""A latency and bandwidth model of every merge and of ring, checked here and carried over to the paper's cluster.

Two halves, which share formulas and no constants. Measured here: the constants of this machine, fitted to rows of
bench.merge and bench.attention, with the error on rows that the fit did not see. The paper's cluster: modelled with
published figures of links and libraries, each with its source, beside the paper's own numbers. Usage:

    python -m bench.predict
    python -m bench.predict --json > bench/results/predict.json
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.harness.arguments import RESULTS, log
from bench.predict import cluster, constants
from bench.predict.chart import draw
from bench.predict.measured import KINDS, Missing, Row, fits, load
from longleaf.merge import MERGES


def main() -> None:
    options = parse()
    found = {"measured_here": here(options.results, options.seed), "papers_cluster": elsewhere()}
    modelled = found["papers_cluster"]
    options.results.mkdir(parents=True, exist_ok=True)
    draw(modelled["latencies"], modelled["speed_ups"], options.results / "predict.png")
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for line in (*fit_lines(found["measured_here"]), "", *cluster_lines(modelled)):
        print(line)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench.predict", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of merge.json and attention.json")
    parser.add_argument("--seed", type=int, default=0, help="which rows are held out")
    return parser.parse_args()


def here(folder: Path, seed: int) -> dict[str, Any]:
    """The fits to this machine's rows, and the missing rows, which are also printed to stderr."""
    rows: list[Row] = []
    missing: list[str] = []
    for name in KINDS:
        try:
            rows += load(folder / name)
        except Missing as error:
            log(str(error))
            missing.append(str(error))
    return {"fits": fits(rows, seed), "missing": missing}


def elsewhere() -> dict[str, Any]:
    """The paper's cluster: constants, latencies, ratios, and where model and publications part."""
    latencies = cluster.latencies()
    speed_ups, table = cluster.speed_ups(latencies), cluster.table_1()
    return {
        "constants": constants.figures(),
        "checks": cluster.checks(),
        "latencies": latencies,
        "speed_ups": speed_ups,
        "table_1": table,
        "disagreements": cluster.disagreements(speed_ups, table),
    }


def fit_lines(found: dict[str, Any]) -> Iterator[str]:
    """The half that was measured here."""
    yield "MEASURED HERE: constants fitted to this machine's rows, relative errors on rows held out"
    yield from (f"  {text}" for text in found["missing"])
    for row in found["fits"]:
        if "error" in row:
            yield f"  {row['group']}: {row['error']}"
            continue
        error = row["held_out"]
        yield (
            f"  {row['group']}: median {error['median_relative_error']:.0%}, worst {error['worst_relative_error']:.0%} "
            f"({error['worst_point']}) of {error['points']} held out, {row['fitted_on']['points']} fitted"
        )
        yield "    " + ", ".join(f"{name} {value:g}" for name, value in row["constants"].items())


def cluster_lines(found: dict[str, Any]) -> Iterator[str]:
    """The half of the page that uses published figures."""
    yield "PUBLISHED CONSTANTS (nothing from the half above)"
    for row in found["constants"]:
        yield f"  {row['what']}: {row['value']:g} {row['unit']} ({row['kind']}: {row['source']})"
    yield from ("", "Checks: published latencies that no constant was taken from, and the model's, us")
    for row in found["checks"]:
        yield f"  {row['what']}: published {row['published_us']}, modelled {row['modelled_us']} ({row['source']})"
    yield from ("", "MODELLED, us per layer and decode step, 16 heads of 128, bf16 keys, float32 partials")
    methods = (*MERGES, *cluster.RINGS)
    yield f"  {'':5} {'tokens':>9} " + " ".join(f"{name:>10}" for name in methods)
    latencies = {(r["cluster"], r["context_tokens"], r["method"]): r for r in found["latencies"] if _is_shown(r)}
    for name in constants.CLUSTERS:
        for length in constants.LENGTHS:
            cells = (latencies[name, length, method]["latency_us"] for method in methods)
            yield f"  {name:5} {length:>9} " + " ".join(f"{cell:>10,.0f}" for cell in cells)
    yield from ("", "Ring over tree, modelled, with the paper's merge and the best one")
    for row in filter(_is_shown, found["speed_ups"]):
        published = f"   published: {row['published']:g} ({row['source']})" if "published" in row else ""
        ratios = f"{row['ring_over_paper_merge']:>9,.1f} {row['ring_over_best']:>9,.1f} {row['best_merge']:9}"
        yield f"  {row['cluster']:5} {row['context_tokens']:>9} {ratios}{published}"
    yield from ("", "Table 1 of the paper, 8 x H100, seconds: whole decoding as published, attention as modelled")
    for row in found["table_1"]:
        yield (
            f"  {row['context_tokens']:>7} published {_pair(row['published'])}   modelled {_pair(row['modelled'])}   "
            f"ring - tree: published {row['published_difference_s']}, modelled {row['modelled_difference_s']}"
        )
    yield from ("", "Where they disagree", *(f"  - {text}" for text in found["disagreements"]))


def _is_shown(row: dict[str, Any]) -> bool:
    """Tables for people show one of the two calibrations."""
    return row["latencies"] == "solved"


def _pair(row: dict[str, float]) -> str:
    return f"tree {row['tree_s']:<6} ring {row['ring_s']:<6} ratio {row['ratio']:<5}"


if __name__ == "__main__":
    main()
