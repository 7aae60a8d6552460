"""`longleaf cluster`."""

from operator import itemgetter

from rich.console import Console
from rich.table import Table

from longleaf.client import Client
from longleaf.commands.options import AsJson, Server, human_bytes, print_json
from longleaf.messages import Cluster


def cluster(server: Server, as_json: AsJson = False) -> None:
    """Show the model, the ranks and what they hold.

    Example: longleaf cluster
    """
    with Client(server) as client:
        found = client.cluster()
    if as_json:
        print_json(found)
        return
    model = found.model
    print(f"{model.name} ({model.architecture}, {model.dtype}), up to {model.max_context_tokens:,} tokens of context")
    print(f"world size {found.world_size} by {found.launcher}, epoch {found.epoch}")
    for line in merge_lines(found):
        print(line)
    print(f"{found.running} running, {found.waiting} waiting")
    Console().print(workers_table(found))


def merge_lines(found: Cluster) -> list[str]:
    """How partials are merged, and why so."""
    if found.world_size == 1:
        return []
    lines = [f"merge {found.merge} over {found.transport}"]
    for timing in found.merge_timings:
        times = ", ".join(f"{name} {us:,.0f}" for name, us in sorted(timing.microseconds.items(), key=itemgetter(1)))
        lines.append(f"  up to {timing.rows} rows: {timing.merge} (microseconds: {times})")
    return lines


def workers_table(found: Cluster) -> Table:
    table = Table("rank", "node", "pid", "device", "tokens held", "of", "keys and values")
    for worker in found.workers:
        place = (str(worker.rank), worker.node, str(worker.pid), worker.device)
        table.add_row(*place, f"{worker.tokens:,}", f"{worker.max_tokens:,}", human_bytes(worker.kv_bytes))
    return table
