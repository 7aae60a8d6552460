"""One decode attention step over keys on several ranks: tree, the paper's merge, two rings and a single device.

All methods use the same local kernel on one thread per rank, see the same random keys, and take turns; a turn lasts as
long as its slowest rank. `tree` is the merge that was the fastest when the ranks started, per transport; `one_device`
is rank 0 holding all keys. Methods communicate over gloo; the tree can also use shared memory inside hosts.

Networks: `loopback` is one host. `two-tier` is several hosts, which are network namespaces with limited rates
(bench/harness/hosts.py; needs root). `--sweep` adds SWEEP_TOKENS on SWEEP_RANKS ranks over rates up to no limit.

Memory is the peak of resident memory in a step beyond the keys that every rank holds; `peak_bytes_per_rank` includes
the keys. Bytes are those that the kernel counted on the hosts' interfaces. Usage:

    python -m bench.attention --json --sweep
    python -m bench.attention --network two-tier --world-size 4 --length 262144 --between 2.5 --out /tmp/results
    python -m bench.attention --ray-address 10.0.0.1:6379 --world-size 16 --out /tmp/results

With `--ray-address` ranks compute on the CPUs of that cluster, and the byte counts include the other traffic of its
machines.

Without `--out` the rows and the picture replace the published ones in bench/results.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import psutil

from bench.attention import steps
from bench.attention.chart import draw
from bench.attention.steps import ONE_DEVICE, RING, Key, Row, Size
from bench.harness.arguments import RESULTS, add_ray_address, check_ray_address, log, unwind_on_terminate
from bench.harness.hosts import LOOPBACK, TWO_TIER, Network, hosts, obstacle, one_host, rate
from bench.harness.machine import describe
from bench.harness.ranks import Placement, run
from bench.harness.ray_ranks import joined, run_on_ray
from bench.harness.timing import latency, slowest

LENGTHS = (4_096, 16_384, 65_536, 262_144, 1_048_576)
SWEEP_TOKENS, SWEEP_RANKS = 262_144, 4
SWEEP = ((10, 1), (10, 2.5), (10, 5), (10, 10), (25, 25), (0, 0))
"""Gbit/s inside hosts and between them; 0 means no limit."""
RANK_BYTES = 400 << 20
"""Of a rank without keys."""


def main() -> None:
    unwind_on_terminate()
    options = parse()
    rows: list[Row] = []
    try:
        for row in on_ray(options) if options.ray_address else on_networks(options):
            rows.append(row)  # noqa: PERF402 rows measured before an error are kept
    finally:
        if rows:
            write(rows, options.out)
    print(json.dumps(rows, indent=2) if options.json else "\n".join(lines(rows)))


def write(rows: list[Row], folder: Path) -> None:
    """The rows as JSON and as a picture."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {"machine": describe(), "rows": rows}
    (folder / "attention.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(rows, folder / "attention.png")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench.attention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print a list of rows as JSON")
    parser.add_argument("--network", dest="networks", nargs="+", choices=(LOOPBACK, TWO_TIER), default=None)
    parser.add_argument("--length", dest="lengths", nargs="+", type=int, default=LENGTHS, metavar="TOKENS")
    parser.add_argument("--world-size", dest="world_sizes", nargs="+", type=int, default=(1, 2, 4, 8), metavar="RANKS")
    parser.add_argument("--hosts", type=int, choices=(2, 3, 4), default=2, help="hosts of the two-tier network")
    parser.add_argument("--inside", type=rate, default=10, metavar="GBIT", help="rate inside a host; 0: no limit")
    parser.add_argument("--between", type=rate, default=1, metavar="GBIT", help="rate between hosts; 0: no limit")
    parser.add_argument("--sweep", action="store_true", help="additionally sweep the rates of the two-tier network")
    parser.add_argument("--heads", type=int, default=16, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=50, help="timed turns of each method, at most")
    parser.add_argument("--seconds", type=float, default=20, help="approximate time limit per row of methods")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of attention.json and attention.png")
    add_ray_address(parser)
    options = parser.parse_args(arguments)
    check_ray_address(parser, options, network=options.networks, sweep=options.sweep)
    if min(options.repeats, options.kv_heads, options.head_dim, *options.lengths, *options.world_sizes) < 1:
        parser.error("--repeats, --kv-heads, --head-dim, --length and --world-size: at least 1")
    if options.heads % options.kv_heads or options.heads < 1:
        parser.error(f"--heads: {options.heads} is no multiple of --kv-heads, {options.kv_heads}")
    options.networks = options.networks or [LOOPBACK, TWO_TIER]
    return options


def on_ray(options: argparse.Namespace) -> Iterator[Row]:
    """The rows of ranks that Ray places."""
    with joined(options.ray_address):
        for world_size in options.world_sizes:
            shrink = sizes_of(options.lengths, world_size, options)
            if not shrink:
                continue
            placement, found = run_on_ray(steps.measure, world_size, "cpu", shrink, options.repeats, options.seconds)
            log(f"{title(placement.network)}, {placement.topology}")
            for i, size in enumerate(shrink):
                yield from rows_of(placement, size, [rank[i] for rank in found])


def on_networks(options: argparse.Namespace) -> Iterator[Row]:
    """The rows of ranks on this machine."""
    for network in options.networks:
        yield from on_network(network, options)


def on_network(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """The rows of one network; none, with a printed reason, if it cannot be created."""
    if name == LOOPBACK:
        with one_host() as network:
            for world_size in options.world_sizes:
                yield from measure(Placement(world_size, 1, network), options.lengths, options)
        return
    reason = obstacle()
    if reason is not None:
        log(f"skipped {TWO_TIER}: {reason}")
        return
    with hosts(options.hosts, inside_gbit=options.inside, between_gbit=options.between) as network:
        for world_size in options.world_sizes:
            if world_size >= options.hosts:
                yield from measure(Placement(world_size, options.hosts, network), options.lengths, options)
    for inside, between in SWEEP if options.sweep else ():
        with hosts(options.hosts, inside_gbit=inside, between_gbit=between) as network:
            for row in measure(Placement(SWEEP_RANKS, options.hosts, network), [SWEEP_TOKENS], options):
                yield row | {"is_sweep": True}


def measure(placement: Placement, lengths: list[int], options: argparse.Namespace) -> list[Row]:
    """The rows of one world size on one network."""
    shrink = sizes_of(lengths, placement.world_size, options)
    tokens = ", ".join(f"{size.context_tokens:,}" for size in shrink)
    log(f"{title(placement.network)}, {placement.topology}: {tokens} tokens")
    if not shrink:
        return []
    found = run(steps.measure, placement, shrink, options.repeats, options.seconds)
    return [row for i, size in enumerate(shrink) for row in rows_of(placement, size, [rank[i] for rank in found])]


def sizes_of(lengths: list[int], world_size: int, options: argparse.Namespace) -> list[Size]:
    """Those of these lengths for which the memory suffices."""
    sizes = [Size(tokens, options.heads, options.kv_heads, options.head_dim) for tokens in lengths]
    return [size for size in sizes if fits(size, world_size)]


def fits(size: Size, world_size: int) -> bool:
    """Whether the machine has the memory: all keys twice, for the ranks and for one device, and ring's two buffers."""
    needed = size.key_bytes(size.context_tokens) * (2 + min(2, world_size - 1)) + world_size * RANK_BYTES
    has = psutil.virtual_memory().available
    if needed > has:
        log(f"skipped {size.context_tokens:,} tokens on {world_size} ranks: {needed:,} bytes needed, {has:,} free")
    return needed <= has


def rows_of(placement: Placement, size: Size, ranks: list[Row]) -> Iterator[Row]:
    """A row per method, from the measurements of the ranks at one size."""
    seconds = slowest([rank["seconds"] for rank in ranks])
    times = {key: latency(taken) for key, taken in seconds.items()}
    network, plain = placement.network, next(transport for method, transport in seconds if method == RING)
    for (method, transport), taken in seconds.items():
        is_alone = method == ONE_DEVICE
        yield {
            "method": method,
            "merge": ranks[0]["merges"][transport] if method == steps.TREE else None,
            "transport": transport,
            "network": title(network),
            "inside_gbit": network.inside_gbit,
            "between_gbit": network.between_gbit,
            "world_size": 1 if is_alone else placement.world_size,
            "nodes": 1 if is_alone else placement.num_nodes,
            "beside_world_size": placement.world_size,
            "context_tokens": size.context_tokens,
            "batch": 1,
            "heads": size.heads,
            "kv_heads": size.kv_heads,
            "head_dim": size.dim,
            **times[method, transport],
            "ring_ratio": round(
                times[RING, plain]["latency_us_median"] / times[method, transport]["latency_us_median"], 3
            ),
            **moved((method, transport), size, ranks, placement.num_nodes, is_alone=is_alone),
            "repeats": len(taken),
            "is_network_private": bool(network.namespaces),
        }


def moved(key: Key, size: Size, ranks: list[Row], num_nodes: int, *, is_alone: bool) -> Row:
    """Memory of the rank that needs most, and bytes per step of the mean rank. All ranks saw all interfaces."""
    key_bytes = size.key_bytes(size.context_tokens if is_alone else max(size.lengths(len(ranks))))
    peaks = [rank["peaks"][key] for rank in ranks]
    beyond = None if None in peaks else max(peaks)
    sent = ranks[0]["sent"][key]
    return {
        "key_bytes_per_rank": key_bytes,
        "peak_beyond_keys_bytes_per_rank": beyond,
        "peak_bytes_per_rank": None if beyond is None else key_bytes + beyond,
        "bytes_sent_per_rank": round(sum(sent.values()) / len(ranks)),
        "bytes_between_hosts": round(sum(sent[name] for name in sent if name != "lo") if num_nodes > 1 else 0),
    }


def title(network: Network) -> str:
    """The network with its rates in Gbit/s, for instance `two-tier 10/1`."""
    if network.name != TWO_TIER:
        return network.name
    inside, between = (f"{gbit:g}" if gbit else "unlimited" for gbit in (network.inside_gbit, network.between_gbit))
    return f"{network.name} {inside}/{between}"


def lines(rows: list[Row]) -> Iterator[str]:
    """The rows for people."""
    yield (
        f"{'network':22} {'ranks':>5} {'tokens':>9}  {'method':11} {'transport':13} {'merge':10} {'median ms':>10} "
        f"{'p95 ms':>10} {'ring/it':>8} {'peak MiB':>9} {'bytes/rank':>13}"
    )
    for row in rows:
        ratio = f"{row['ring_ratio']:>8.2f}"
        peak = "?" if row["peak_bytes_per_rank"] is None else f"{row['peak_bytes_per_rank'] / 2**20:,.1f}"
        yield (
            f"{row['network']:22} {row['beside_world_size']:>5} {row['context_tokens']:>9,}  {row['method']:11} "
            f"{row['transport']:13} {row['merge'] or '':10} {row['latency_us_median'] / 1e3:>10,.2f} "
            f"{row['latency_us_p95'] / 1e3:>10,.2f} {ratio} {peak:>9} {row['bytes_sent_per_rank']:>13,}"
        )


if __name__ == "__main__":
    main()
