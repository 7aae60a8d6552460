"""Quality of the merge selection: the merge that `choose` selected at the start compared with the fastest one.

In each of several runs, each with separate processes and groups, the ranks choose as they do when a service starts;
then all merges take turns. Per number of rows, `ratio` is the median latency of the chosen merge over that of the
fastest one: the median over the runs, and the worst. `seconds` is the duration of the selection on the slowest rank.
Usage:

    python -m bench.choose --json
    python -m bench.choose --world-size 4 --runs 1 --out /tmp/results
"""

import argparse
import functools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.harness.arguments import RESULTS, log, unwind_on_terminate
from bench.harness.hosts import one_host
from bench.harness.machine import describe
from bench.harness.ranks import Placement, Rank, run
from bench.harness.timing import slowest
from longleaf.attention import Partial
from longleaf.kernels import registry
from longleaf.merge import MERGES, PartialCodec, choose_merge, make_merge

HEADS, DIM = 16, 128

Row = dict[str, Any]


def main() -> None:
    unwind_on_terminate()
    options = parse()
    rows: list[Row] = []
    with one_host() as network:
        for num_nodes in options.nodes:
            for world_size in options.world_sizes:
                placement = Placement(world_size, num_nodes, network)
                log(str(placement.topology))
                rows += judge(placement, [run(race, placement, options.repeats) for _ in range(options.runs)])
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "choose.json").write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")
    print(json.dumps(rows, indent=2) if options.json else "\n".join(lines(rows)))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a list of rows as JSON")
    parser.add_argument("--world-size", dest="world_sizes", nargs="+", type=int, default=(2, 4, 8), metavar="RANKS")
    parser.add_argument("--nodes", nargs="+", type=int, help="simulated nodes to deal the ranks among: 1 and 2")
    parser.add_argument("--runs", type=int, default=3, help="starts, each with separate groups")
    parser.add_argument("--repeats", type=int, default=30, help="timed turns of each merge")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of choose.json")
    options = parser.parse_args(arguments)
    options.nodes = options.nodes or [1, 2][: max(1, min(options.world_sizes))]
    if min(options.runs, options.repeats, *options.world_sizes, *options.nodes) < 1:
        parser.error("all numbers must be at least 1")
    if max(options.nodes) > min(options.world_sizes):
        parser.error(f"--nodes: {max(options.nodes)} is above {min(options.world_sizes)}, the smallest --world-size")
    return options


def race(rank: Rank, repeats: int) -> Row:
    """On one rank: the duration and result of the choice; by number of rows, the seconds of each merge's turns."""
    groups, wire = list(rank.groups.values())[-1], PartialCodec(registry.choose("auto", rank.device, torch.float32))
    rank.barrier()
    begin = time.perf_counter()
    chosen = choose_merge(groups, wire, HEADS, DIM, rank.device)
    seconds = time.perf_counter() - begin
    raced = chosen.timings[0].microseconds
    merges = {name: make_merge(name, groups, wire) for name in MERGES if name in raced}
    turns: dict[int, dict[str, list[float]]] = {}
    for timing in chosen.timings:
        partial = Partial(torch.randn(timing.rows, HEADS, DIM), torch.randn(timing.rows, HEADS))
        calls = {str(name): functools.partial(merge.to_all, partial) for name, merge in merges.items()}
        turns[timing.rows] = rank.take_turns(calls, repeats=repeats, warm_up=3, in_a_row=4)
    choices = {timing.rows: timing.merge for timing in chosen.timings}
    return {"transport": groups.node.transport, "seconds": seconds, "choices": choices, "turns": turns}


def judge(placement: Placement, runs: Sequence[Sequence[Row]]) -> Iterator[Row]:
    """A row per number of rows, from the measurements of the ranks in each run."""
    for num_rows in runs[0][0]["choices"]:
        chosen: list[str] = [ranks[0]["choices"][num_rows] for ranks in runs]
        medians = [
            {name: median(times) for name, times in slowest([rank["turns"][num_rows] for rank in ranks]).items()}
            for ranks in runs
        ]
        ratios = [found[name] / min(found.values()) for name, found in zip(chosen, medians, strict=True)]
        overall = {name: median(found[name] for found in medians) for name in medians[0]}
        yield {
            "transport": runs[0][0]["transport"],
            "world_size": placement.world_size,
            "nodes": placement.num_nodes,
            "rows": num_rows,
            "chosen": chosen,
            "fastest": min(overall, key=overall.__getitem__),
            "ratio": round(median(ratios), 3),
            "ratio_worst": round(max(ratios), 3),
            "seconds": round(max(rank["seconds"] for ranks in runs for rank in ranks), 3),
            "latency_us": {name: round(seconds * 1e6, 1) for name, seconds in overall.items()},
        }


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """The rows for people."""
    yield (
        f"{'ranks':>5} {'nodes':>5} {'rows':>4}  {'transport':13} {'fastest':10} {'ratio':>6} {'worst':>6} "
        f"{'choosing s':>10}  chosen"
    )
    for row in rows:
        yield (
            f"{row['world_size']:>5} {row['nodes']:>5} {row['rows']:>4}  {row['transport']:13} {row['fastest']:10} "
            f"{row['ratio']:>6.2f} {row['ratio_worst']:>6.2f} {row['seconds']:>10.2f}  {', '.join(row['chosen'])}"
        )


if __name__ == "__main__":
    main()
