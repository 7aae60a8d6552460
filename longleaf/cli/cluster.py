"""`longleaf cluster`."""

import time
from collections.abc import Sequence
from itertools import zip_longest
from operator import itemgetter
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import replace
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from longleaf.cli.console import output_console
from longleaf.cli.flags import takes_server
from longleaf.cli.options import AsJson, ServerOptions, connect, exactness_line, print_json
from longleaf.formatting import human_angle, human_bytes, human_seconds
from longleaf.positions import UNLIMITED_TOKENS
from longleaf.shares import NUM_PARTS
from longleaf.topology import Topology
from longleaf.types import Cluster, Drafting, Loss, ModelInfo, Recovery, Storage

Watch = Annotated[bool, typer.Option("--watch", help="Show every change until interrupted.")]
Interval = Annotated[float, typer.Option(help="With --watch: minimum time between updates.", metavar="SECONDS")]


@takes_server
def cluster(server: ServerOptions, watch: Watch = False, interval: Interval = 1.0, as_json: AsJson = False) -> None:
    """Show the model, the ranks and the load.

    The output includes the kernels, the merges, the memory of each rank, the number of running and waiting generations,
    and lost ranks. With --watch, the service sends an update for every change; with --json, one object per line.

    Examples:

      longleaf cluster
      longleaf cluster --watch
    """
    if watch:
        _watch(server, interval, as_json)
        return
    with connect(server) as client:
        found = client.cluster()
    if as_json:
        print_json(to_json(found))
        return
    for line in lines_of(found, time.time()):
        print(line)
    output_console().print(workers_table(found))


def _watch(server: ServerOptions, interval: float, as_json: bool) -> None:
    with connect(server) as client:
        changes = client.watch_cluster(min_interval=interval)
        if as_json:
            for found in changes:
                print_json(to_json(found))
            return
        with Live(console=output_console(), auto_refresh=False) as live:
            for found in changes:
                head = Text("\n".join(lines_of(found, time.time())))
                live.update(Group(head, workers_table(found)), refresh=True)


def is_hidden(found: Cluster) -> bool:
    """Whether the service hides the load from this caller, as from users of a service with tenants: pids are then 0."""
    return any(worker.pid == 0 for worker in found.workers)


def to_json(found: Cluster) -> object:
    """The JSON output, with null for hidden values."""
    if not is_hidden(found):
        return found
    fields: dict[str, Any] = msgspec.to_builtins(found)
    fields |= dict.fromkeys(("running", "waiting", "window_tokens", "states"))
    fields["workers"] = [
        worker | dict.fromkeys(("pid", "address", "tokens", "kv_bytes")) for worker in fields["workers"]
    ]
    for part, names in (("storage", ("url", "error")), ("recovery", ("lost_tokens", "recovered_tokens"))):
        if fields[part] is not None:
            fields[part] |= dict.fromkeys(names)
    return fields


def lines_of(found: Cluster, now: float) -> list[str]:
    """The lines above the table; `now` in seconds since the epoch."""
    return [
        *headlines(found),
        *storage_lines(found.storage),
        *recovery_lines(found.recovery),
        *loss_lines(found.losses, now),
    ]


def headlines(found: Cluster) -> list[str]:
    """The model, the process group and the load."""
    model = found.model
    return [
        f"{model.name} ({model.architecture}, {model.dtypes}), up to {model.max_context_tokens:,} tokens of context"
        + (" and more, with --allow-long" if model.is_long_allowed else ""),
        *position_lines(model),
        f"world size {found.world_size} by {found.launcher}, epoch {found.epoch}",
        *merge_lines(found),
        *window_lines(found),
        *state_lines(found),
        *weight_lines(found),
        f"answers are {exactness_line(found)}",
        *([] if is_hidden(found) else [f"{found.running} running, {found.waiting} waiting"]),
        *drafting_lines(found.drafting),
    ]


def position_lines(model: ModelInfo) -> list[str]:
    """The kind of rotary positions, and their precision."""
    if not model.rope:
        return []
    errors = f"{human_angle(model.float32_phase_error)} in float32, {human_angle(model.float64_phase_error)} in float64"
    return [f"{model.rope} rotary positions, phases off by at most {errors}"]


def merge_lines(found: Cluster) -> list[str]:
    """The merge of partials, with its measurements."""
    if found.world_size == 1:
        return []
    lines = [f"merge {found.merge} over {found.transport}", *tier_lines(found)]
    for timing in found.merge_timings:
        times = ", ".join(f"{name} {us:,.0f}" for name, us in sorted(timing.microseconds.items(), key=itemgetter(1)))
        lines.append(f"  up to {timing.rows} rows: {timing.merge} (microseconds: {times})")
    return lines


def tier_lines(found: Cluster) -> list[str]:
    """The merges inside and between nodes, if there are several."""
    if not found.inter_node_transport:
        return []
    inside = f"{found.intra_node_transport} inside nodes, " if found.intra_node_transport else ""
    lines = [f"  {inside}{found.inter_node_transport} between {Topology(nodes_of(found))}"]
    for tier in found.tier_merges:
        rows = f"up to {tier.rows} rows" if tier.rows else "any number of rows"
        first = f"{tier.intra_node} inside nodes, then {tier.inter_node} between them"
        lines.append(f"  {rows}: {first if tier.intra_node else f'{tier.inter_node} over all ranks at once'}")
    return lines


def nodes_of(found: Cluster) -> tuple[str, ...]:
    """The node of each rank."""
    return tuple(worker.node for worker in found.workers)


def window_lines(found: Cluster) -> list[str]:
    """The use of the pool of replicated windows."""
    if not found.max_window_tokens:
        return []
    resident = "" if is_hidden(found) else f"{found.window_tokens:,} of "
    return [f"keys of windowed layers on every rank, {resident}{found.max_window_tokens:,} tokens"]


def state_lines(found: Cluster) -> list[str]:
    """The use of the pool of recurrent states."""
    if not found.max_states:
        return []
    resident = "" if is_hidden(found) else f"{found.states:,} of "
    return [f"recurrent states on every rank, {resident}{found.max_states:,}, {human_bytes(found.state_bytes)} each"]


def weight_lines(found: Cluster) -> list[str]:
    """The parts of sharded weights on each rank, and the fraction for which answers wait."""
    workers = [worker for worker in found.workers if worker.weight_parts]
    shares = ", ".join(f"rank {one.rank} {human_bytes(one.weight_bytes)} ({one.weight_parts})" for one in workers)
    waiting = f"waiting: {found.missing_weights:.0%} of the weights are on no rank" if found.missing_weights else ""
    return [*([f"weights in {NUM_PARTS} parts: {shares}"] if shares else []), *([f"  {waiting}"] if waiting else [])]


def drafting_lines(drafting: Drafting | None) -> list[str]:
    """The acceptance rate of drafts, if there were any."""
    if drafting is None or not drafting.drafted_tokens:
        return []
    accepted = f"{drafting.accepted_tokens:,} of {drafting.drafted_tokens:,} drafted tokens accepted"
    return [f"{accepted}, {drafting.tokens_per_step:.2f} tokens a step"]


def storage_lines(storage: Storage | None) -> list[str]:
    """The storage of contexts, and its current error."""
    if storage is None:
        return ["contexts are lost when the service ends: it has no --data-dir"]
    outage = [f"  storage cannot be written: {storage.error}"] if storage.error else []
    return [f"snapshots {storage.snapshots}" + (f", storage {storage.url}" if storage.url else ""), *outage]


def recovery_lines(recovery: Recovery | None) -> list[str]:
    """The progress of the recovery, or the result of the last one."""
    if recovery is None:
        return []
    tokens = f"{recovery.recovered_tokens:,} of {recovery.lost_tokens:,}" if recovery.lost_tokens else "all"
    taken = human_seconds(recovery.seconds)
    under_way = f"recovering: {tokens} tokens, {taken}" if recovery.lost_tokens else f"recovering: {taken}"
    message = f"recovered {tokens} lost tokens in {taken}" if recovery.is_done else under_way
    names = recovery.dropped_contexts
    return [message, *([f"  dropped for lack of space: {', '.join(names)}"] if names else [])]


def loss_lines(losses: Sequence[Loss], now: float) -> list[str]:
    """A line for each loss. The reason for an empty slot is in the line of its last loss."""
    lines = list[str]()
    for loss, follower in zip_longest(losses, losses[1:]):
        is_said_later = follower is not None and follower.slot_reason == loss.slot_reason
        lines.append(loss_line(replace(loss, slot_reason="") if is_said_later else loss, now))
    return lines


def loss_line(loss: Loss, now: float) -> str:
    """The lost rank, the time, the reason, and the state of its slot."""
    who = f"member {loss.member}" if loss.rank is None else f"rank {loss.rank} of epoch {loss.epoch}"
    node = f" on node {loss.node}" if loss.node else ""
    place = slot_summary(loss, now)
    since = human_seconds(round(max(0.0, now - loss.time)))
    return f"{who}{node} was lost {since} ago: {loss.reason}" + (f"; its slot {place}" if place else "")


def slot_summary(loss: Loss, now: float) -> str:
    """The state of the slot of a lost rank; empty if this client does not know it."""
    match loss.slot:
        case "waiting":
            wait = 0.0 if loss.retry_time is None else max(0.0, loss.retry_time - now)
            return f"will be filled in {human_seconds(round(wait))}" if wait else "will be filled"
        case "starting":
            return "is being filled"
        case "replaced":
            return "is filled"
        case "abandoned":
            return "stays empty" + (f": {loss.slot_reason}" if loss.slot_reason else "")
        case "unspecified":
            return ""


def workers_table(found: Cluster) -> Table:
    """A row per rank. Addresses are shown only for several nodes; on one node they are the loopback address."""
    has_several = len(set(nodes_of(found))) > 1
    place = ("rank", "node", *(("address",) if has_several else ()), "pid", "device", "kernels")
    table = Table(*place, "tokens", "of", "keys and values")
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
