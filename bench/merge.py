"""Every merge on every transport of this machine: latency, collectives and bytes.

Ranks are processes on one machine, as one simulated node or several. Within a world size all merges of all transports
take turns, each starting at a barrier; a turn lasts as long as its slowest rank. Collectives are counted as they are
called. Bytes are those that the kernel counted on the ranks' own network interface (including headers and
acknowledgements, less the background traffic), and those that ranks wrote into shared memory; for NCCL, which uses
neither, they are unknown. Transports: `gloo`; `shared_memory` inside nodes and gloo between them; `nccl` with a GPU per
rank. Usage:

    python -m bench.merge --json
    python -m bench.merge --world-size 4 --nodes 2 --batch 1 --calls 10 --out /tmp/results
    python -m bench.merge --ray-address 10.0.0.1:6379 --world-size 16 --out /tmp/results

With `--ray-address` the ranks are where a service of that cluster would place them, and the byte counts include the
other traffic of its machines.

Without `--out` the rows replace the published ones in bench/results.
"""

import argparse
import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.harness.arguments import RESULTS, add_ray_address, check_ray_address, log, unwind_on_terminate
from bench.harness.hosts import Network, one_host
from bench.harness.machine import describe
from bench.harness.ranks import Placement, Rank, run
from bench.harness.ray_ranks import joined, num_gpus, run_on_ray
from bench.harness.timing import latency, slowest
from longleaf.attention import Partial
from longleaf.comm import Groups
from longleaf.config import MergeName
from longleaf.kernels import registry
from longleaf.merge import MERGES, Merge, PartialCodec, make_merge
from tests.support.counting_comm import counting

BASELINE = ("gloo", "paper")
TOLERANCE = 1e-5

Key = tuple[str, MergeName]
"""Transport and merge."""
Row = dict[str, Any]


def main() -> None:
    unwind_on_terminate()
    options = parse()
    rows = on_ray(options) if options.ray_address else here(options)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "merge.json").write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")
    print(json.dumps(rows, indent=2) if options.json else "\n".join(lines(rows)))


def here(options: argparse.Namespace) -> list[Row]:
    """The rows of ranks on this machine."""
    rows: list[Row] = []
    with one_host() as network:
        for placement in placements(options, network):
            log(f"{placement.topology} on {placement.device}")
            rows += rows_of(placement, run(turns, placement, options), options)
    return rows


def on_ray(options: argparse.Namespace) -> list[Row]:
    """The rows of ranks that Ray places; on GPUs too, where there is one for each."""
    rows: list[Row] = []
    with joined(options.ray_address):
        for world_size in options.world_sizes:
            for device in ("cpu", "cuda") if num_gpus() >= world_size else ("cpu",):
                placement, found = run_on_ray(turns, world_size, device, options)
                log(f"{placement.topology} on {device}")
                rows += rows_of(placement, found, options)
    return rows


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a list of rows as JSON")
    parser.add_argument("--world-size", dest="world_sizes", nargs="+", type=int, default=(2, 4, 8), metavar="RANKS")
    parser.add_argument("--nodes", nargs="+", type=int, help="simulated nodes to deal the ranks among: 1 and 2")
    parser.add_argument("--batch", dest="batches", nargs="+", type=int, default=(1, 8, 64), metavar="ROWS")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=100, help="timed turns of each merge")
    parser.add_argument("--calls", type=int, default=1, help="calls per turn, in a row as in the layers of a model")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of merge.json")
    add_ray_address(parser)
    options = parser.parse_args(arguments)
    check_ray_address(parser, options, nodes=options.nodes)
    options.nodes = options.nodes or [1, 2][: max(1, min(options.world_sizes))]
    counts = (options.repeats, options.calls, options.heads, options.head_dim, *options.batches, *options.world_sizes)
    if min(*counts, *options.nodes) < 1:
        parser.error("all numbers must be at least 1")
    if max(options.nodes) > min(options.world_sizes):
        parser.error(f"--nodes: {max(options.nodes)} is above {min(options.world_sizes)}, the smallest --world-size")
    return options


def placements(options: argparse.Namespace, network: Network) -> Iterator[Placement]:
    """On CPUs always; on GPUs where there is one for each rank."""
    for num_nodes, world_size in itertools.product(options.nodes, options.world_sizes):
        yield Placement(world_size, num_nodes, network)
        if torch.cuda.device_count() >= world_size:
            yield Placement(world_size, num_nodes, network, device="cuda")


def rows_of(placement: Placement, found: list[dict[int, Row]], options: argparse.Namespace) -> list[Row]:
    """The rows of one world size, from the measurements of its ranks."""
    rows: list[Row] = []
    for batch in options.batches:
        seconds = slowest([rank[batch]["seconds"] for rank in found])
        common = {"world_size": placement.world_size, "nodes": placement.num_nodes, "batch": batch}
        common |= {"heads": options.heads, "head_dim": options.head_dim}
        for (transport, merge), times in seconds.items():
            counts = [rank[batch]["counts"][transport, merge] for rank in found]
            row = {"merge": merge, "transport": transport, **common, **latency(times), **summed(transport, counts)}
            is_private = bool(placement.network.namespaces)
            rows.append(row | {"repeats": options.repeats, "calls": options.calls, "is_network_private": is_private})
    return rows


def summed(transport: str, counts: list[Row]) -> Row:
    """Combines the counts of all ranks: collectives of the busiest rank, mean bytes. All ranks share the interfaces."""
    num_bytes = (sum(one["shared_bytes"] for one in counts) + counts[0]["interface_bytes"]) / len(counts)
    return {
        "collectives": max(one["collectives"] for one in counts),
        "bytes_sent_per_rank": None if transport == "nccl" else round(num_bytes),
    }


def turns(rank: Rank, options: argparse.Namespace) -> dict[int, Row]:
    """On one rank, by batch: the seconds of each merge's turns, and the operations of one call."""
    found: dict[int, Row] = {}
    wire = PartialCodec(registry.choose("auto", rank.device, torch.float32))
    for batch in options.batches:
        generator = torch.Generator().manual_seed(rank.rank)
        out = torch.randn(batch, options.heads, options.head_dim, generator=generator)
        lse = torch.randn(batch, options.heads, generator=generator)
        partial = Partial(out.to(rank.device), lse.to(rank.device))
        merges: dict[Key, Merge] = {
            (transport, name): make_merge(name, groups, wire)
            for transport, groups in rank.groups.items()
            for name in MERGES
        }
        counts = {key: count(rank, key, wire, partial, options.repeats) for key in merges}
        used = {key: merge for key, merge in merges.items() if counts[key] is not None}
        check(used, partial)
        calls = {key: functools.partial(merge.to_all, partial) for key, merge in used.items()}
        seconds = rank.take_turns(calls, repeats=options.repeats, warm_up=5, in_a_row=options.calls)
        found[batch] = {"seconds": seconds, "counts": counts}
    return found


def count(rank: Rank, key: Key, wire: PartialCodec, partial: Partial, repeats: int) -> Row | None:
    """The operations of one call; None for a merge that does not use the transport, as all but one between nodes."""
    transport, name = key
    groups: Groups = rank.groups[transport]
    observed, counters = counting(groups)
    make_merge(name, observed, wire).to_all(partial)
    shared = [one for one in counters if one.transport == "shared_memory" and one.num_operations]
    if transport == "shared_memory" and not shared:
        return None
    merge = make_merge(name, groups, wire)
    sent = rank.count_bytes(lambda: merge.to_all(partial), repeats)
    return {
        "collectives": sum(one.num_operations for one in counters),
        "shared_bytes": sum(one.bytes_sent for one in shared),
        "interface_bytes": sum(sent.values()),
    }


def check(merges: dict[Key, Merge], partial: Partial) -> None:
    """Merges with wrong results are not measured. Raises AssertionError."""
    first, *others = (merge.to_all(partial).out_THD.clone() for merge in merges.values())
    for other in others:
        torch.testing.assert_close(other, first, atol=TOLERANCE, rtol=TOLERANCE)


def lines(rows: list[Row]) -> Iterator[str]:
    """The rows for people, with how many times faster they are than the paper's merge over gloo."""
    ratios = against_baseline(rows)
    yield (
        f"{'ranks':>5} {'nodes':>5} {'batch':>5}  {'transport':13} {'merge':10} {'median us':>10} {'p95 us':>10} "
        f"{'collectives':>11} {'bytes/rank':>10} {'x paper':>8}"
    )
    for row, ratio in zip(rows, ratios, strict=True):
        size = "?" if row["bytes_sent_per_rank"] is None else f"{row['bytes_sent_per_rank']:,}"
        yield (
            f"{row['world_size']:>5} {row['nodes']:>5} {row['batch']:>5}  {row['transport']:13} {row['merge']:10} "
            f"{row['latency_us_median']:>10,.0f} {row['latency_us_p95']:>10,.0f} {row['collectives']:>11} "
            f"{size:>10} {ratio:>8.2f}"
        )


def against_baseline(rows: list[Row]) -> list[float]:
    """For each row, the latency of the paper's merge over gloo, with the same ranks and batch, over its own."""
    places = [(row["world_size"], row["nodes"], row["batch"]) for row in rows]
    baseline = {
        place: row["latency_us_median"]
        for place, row in zip(places, rows, strict=True)
        if (row["transport"], row["merge"]) == BASELINE
    }
    return [baseline[place] / row["latency_us_median"] for place, row in zip(places, rows, strict=True)]


if __name__ == "__main__":
    main()
