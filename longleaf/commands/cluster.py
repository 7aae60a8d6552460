"""`longleaf cluster`."""

from operator import itemgetter
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from longleaf.commands.options import AsJson, Server, connect, dtypes_told, print_json
from longleaf.geometry import UNLIMITED_TOKENS
from longleaf.messages import Cluster, ModelInfo
from longleaf.units import human_angle, human_bytes

Watch = Annotated[bool, typer.Option("--watch", help="Go on, and show every change until interrupted.")]
Interval = Annotated[float, typer.Option(help="With --watch: least seconds between two changes shown.")]


def cluster(server: Server, watch: Watch = False, interval: Interval = 1.0, as_json: AsJson = False) -> None:
    """Show the model, the ranks, what they hold, and how many generations run and wait.

    Nothing is polled: with --watch the service tells what changed, one JSON object per line with --json.

    Example: longleaf cluster --watch
    """
    if watch:
        _watch(server, interval, as_json)
        return
    with connect(server) as client:
        found = client.cluster()
    if as_json:
        print_json(found)
        return
    for line in headlines(found):
        print(line)
    Console().print(workers_table(found))


def _watch(server: str, interval: float, as_json: bool) -> None:
    with connect(server) as client:
        changes = client.watch_cluster(min_interval=interval)
        if as_json:
            for found in changes:
                print_json(found)
            return
        with Live(console=Console(highlight=False), auto_refresh=False) as live:
            for found in changes:
                head = Text("\n".join(headlines(found)))
                live.update(Group(head, workers_table(found)), refresh=True)


def headlines(found: Cluster) -> list[str]:
    """The model, the group and the load."""
    model = found.model
    dtypes = dtypes_told(model)
    return [
        f"{model.name} ({model.architecture}, {dtypes}), up to {model.max_context_tokens:,} tokens of context"
        + (" and more, by --allow-long" if model.is_long_allowed else ""),
        *position_lines(model),
        f"world size {found.world_size} by {found.launcher}, epoch {found.epoch}",
        *merge_lines(found),
        *window_lines(found),
        "answers are exact" if found.is_exact else "answers are not exact",
        f"{found.running} running, {found.waiting} waiting",
    ]


def position_lines(model: ModelInfo) -> list[str]:
    """Which rotary positions the model has, and how exact they are."""
    if not model.rope:
        return []
    errors = f"{human_angle(model.float32_phase_error)} in float32, {human_angle(model.float64_phase_error)} in float64"
    return [f"{model.rope} rotary positions, phases off by at most {errors}"]


def merge_lines(found: Cluster) -> list[str]:
    """How partials are merged, and why so."""
    if found.world_size == 1:
        return []
    lines = [f"merge {found.merge} over {found.transport}"]
    for timing in found.merge_timings:
        times = ", ".join(f"{name} {us:,.0f}" for name, us in sorted(timing.microseconds.items(), key=itemgetter(1)))
        lines.append(f"  up to {timing.rows} rows: {timing.merge} (microseconds: {times})")
    return lines


def window_lines(found: Cluster) -> list[str]:
    """What lies on every rank."""
    if not found.max_window_tokens:
        return []
    held = f"{found.window_tokens:,} of {found.max_window_tokens:,} tokens"
    return [f"keys of windowed layers on every rank, {held}"]


def workers_table(found: Cluster) -> Table:
    table = Table("rank", "node", "pid", "device", "kernels", "tokens held", "of", "keys and values")
    for worker in found.workers:
        place = (str(worker.rank), worker.node, str(worker.pid), worker.device, worker.kernels)
        most = "no limit" if worker.max_tokens >= UNLIMITED_TOKENS else f"{worker.max_tokens:,}"
        table.add_row(*place, f"{worker.tokens:,}", most, human_bytes(worker.kv_bytes))
    return table
