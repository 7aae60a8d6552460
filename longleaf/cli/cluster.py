"""`longleaf cluster`."""

import time
from collections.abc import Sequence
from itertools import zip_longest
from operator import itemgetter
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import replace
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from longleaf.cli.flags import takes_server
from longleaf.cli.options import AsJson, ServerOptions, connect, dtypes_told, exactness_told, print_json
from longleaf.formatting import human_angle, human_bytes, human_seconds
from longleaf.positions import UNLIMITED_TOKENS
from longleaf.topology import Topology
from longleaf.types import Cluster, Drafting, Loss, ModelInfo, Recovery, Storage

Watch = Annotated[bool, typer.Option("--watch", help="Go on, and show every change until interrupted.")]
Interval = Annotated[float, typer.Option(help="With --watch: least seconds between two changes shown.")]


@takes_server
def cluster(server: ServerOptions, watch: Watch = False, interval: Interval = 1.0, as_json: AsJson = False) -> None:
    """Show the model, the ranks, what they hold, which were lost, and how many generations run and wait.

    Nothing is polled: with --watch the service tells what changed, one JSON object per line with --json.

    Example: longleaf cluster --watch
    """
    if watch:
        _watch(server, interval, as_json)
        return
    with connect(server) as client:
        found = client.cluster()
    if as_json:
        print_json(shown(found))
        return
    for line in lines_of(found, time.time()):
        print(line)
    Console().print(workers_table(found))


def _watch(server: ServerOptions, interval: float, as_json: bool) -> None:
    with connect(server) as client:
        changes = client.watch_cluster(min_interval=interval)
        if as_json:
            for found in changes:
                print_json(shown(found))
            return
        with Live(console=Console(highlight=False), auto_refresh=False) as live:
            for found in changes:
                head = Text("\n".join(lines_of(found, time.time())))
                live.update(Group(head, workers_table(found)), refresh=True)


def is_hidden(found: Cluster) -> bool:
    """Whether a service with tenants told a user nothing by which others could be seen: no process has the number 0."""
    return any(worker.pid == 0 for worker in found.workers)


def shown(found: Cluster) -> object:
    """For programs: null where the service hides it."""
    if not is_hidden(found):
        return found
    reported: dict[str, Any] = msgspec.to_builtins(found)
    reported |= dict.fromkeys(("running", "waiting", "window_tokens"))
    reported["workers"] = [
        worker | dict.fromkeys(("pid", "address", "tokens", "kv_bytes")) for worker in reported["workers"]
    ]
    for part, names in (("storage", ("url", "trouble")), ("recovery", ("lost_tokens", "recovered_tokens"))):
        if reported[part] is not None:
            reported[part] |= dict.fromkeys(names)
    return reported


def lines_of(found: Cluster, now: float) -> list[str]:
    """All that stands above the table; `now` in seconds since the epoch."""
    return [
        *headlines(found),
        *storage_lines(found.storage),
        *recovery_lines(found.recovery),
        *loss_lines(found.losses, now),
    ]


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
        f"answers are {exactness_told(found)}",
        *([] if is_hidden(found) else [f"{found.running} running, {found.waiting} waiting"]),
        *drafting_lines(found.drafting),
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
    lines = [f"merge {found.merge} over {found.transport}", *tier_lines(found)]
    for timing in found.merge_timings:
        times = ", ".join(f"{name} {us:,.0f}" for name, us in sorted(timing.microseconds.items(), key=itemgetter(1)))
        lines.append(f"  up to {timing.rows} rows: {timing.merge} (microseconds: {times})")
    return lines


def tier_lines(found: Cluster) -> list[str]:
    """What happens inside the nodes and between them, where there are several."""
    if not found.between_transport:
        return []
    inside = f"{found.inside_transport} inside nodes, " if found.inside_transport else ""
    lines = [f"  {inside}{found.between_transport} between {Topology(nodes_of(found))}"]
    for tier in found.tier_merges:
        rows = f"up to {tier.rows} rows" if tier.rows else "any number of rows"
        first = f"{tier.inside} inside nodes, then {tier.between} between them"
        lines.append(f"  {rows}: {first if tier.inside else f'{tier.between} over all ranks at once'}")
    return lines


def nodes_of(found: Cluster) -> tuple[str, ...]:
    """The machine of each rank."""
    return tuple(worker.node for worker in found.workers)


def window_lines(found: Cluster) -> list[str]:
    """What lies on every rank."""
    if not found.max_window_tokens:
        return []
    resident = "" if is_hidden(found) else f"{found.window_tokens:,} of "
    return [f"keys of windowed layers on every rank, {resident}{found.max_window_tokens:,} tokens"]


def drafting_lines(drafting: Drafting | None) -> list[str]:
    """What drafts have brought, where there were any."""
    if drafting is None or not drafting.drafted_tokens:
        return []
    accepted = f"{drafting.accepted_tokens:,} of {drafting.drafted_tokens:,} drafted tokens accepted"
    return [f"{accepted}, {drafting.tokens_per_step:.2f} tokens a step"]


def storage_lines(storage: Storage | None) -> list[str]:
    """Where contexts lie beside the ranks, and what is wrong there."""
    if storage is None:
        return ["contexts end with the service: it has no --data-dir"]
    outage = [f"  nothing can be written there now: {storage.trouble}"] if storage.trouble else []
    return [f"snapshots {storage.snapshots}" + (f", storage {storage.url}" if storage.url else ""), *outage]


def recovery_lines(recovery: Recovery | None) -> list[str]:
    """How far the recovery is, or how the last one ended."""
    if recovery is None:
        return []
    tokens = f"{recovery.recovered_tokens:,} of {recovery.lost_tokens:,}" if recovery.lost_tokens else "all"
    taken = human_seconds(recovery.seconds)
    under_way = f"recovering: {tokens} tokens, {taken}" if recovery.lost_tokens else f"recovering: {taken}"
    message = f"recovered {tokens} lost tokens in {taken}" if recovery.is_over else under_way
    return [message, *([f"  given up for want of room: {', '.join(recovery.given_up)}"] if recovery.given_up else [])]


def loss_lines(losses: Sequence[Loss], now: float) -> list[str]:
    """A line for each loss. Why a place stays empty is said of the last one there."""
    lines = list[str]()
    for loss, follower in zip_longest(losses, losses[1:]):
        is_said_later = follower is not None and follower.slot_reason == loss.slot_reason
        lines.append(loss_line(replace(loss, slot_reason="") if is_said_later else loss, now))
    return lines


def loss_line(loss: Loss, now: float) -> str:
    """Who was lost, when and why, and what became of its place."""
    who = f"member {loss.member}" if loss.rank is None else f"rank {loss.rank} of epoch {loss.epoch}"
    node = f" on node {loss.node}" if loss.node else ""
    place = slot_told(loss, now)
    since = human_seconds(round(max(0.0, now - loss.time)))
    return f"{who}{node} was lost {since} ago: {loss.reason}" + (f"; its place {place}" if place else "")


def slot_told(loss: Loss, now: float) -> str:
    """What became of the place of a lost rank; empty where this client does not know."""
    match loss.slot:
        case "waiting":
            wait = 0.0 if loss.refill_time is None else max(0.0, loss.refill_time - now)
            return f"will be filled in {human_seconds(round(wait))}" if wait else "will be filled"
        case "filling":
            return "is being filled"
        case "filled":
            return "is filled"
        case "given_up":
            return "stays empty" + (f": {loss.slot_reason}" if loss.slot_reason else "")
        case "unspecified":
            return ""


def workers_table(found: Cluster) -> Table:
    """A row per rank; addresses only where there are several nodes, for elsewhere it is the loopback."""
    has_several = len(set(nodes_of(found))) > 1
    place = ("rank", "node", *(("address",) if has_several else ()), "pid", "device", "kernels")
    table = Table(*place, "tokens held", "of", "keys and values")
    for worker in found.workers:
        address = (worker.address,) if has_several else ()
        pid, *resident = map(str, (worker.pid, f"{worker.tokens:,}", human_bytes(worker.kv_bytes)))
        if not worker.pid:
            pid = resident[0] = resident[1] = "hidden"
        most = "no limit" if worker.max_tokens >= UNLIMITED_TOKENS else f"{worker.max_tokens:,}"
        table.add_row(
            *(str(worker.rank), worker.node, *address, pid, worker.device, worker.kernels),
            *(resident[0], most, resident[1]),
        )
    return table
