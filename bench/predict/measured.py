"""Measurements of bench.merge and bench.attention on this machine, and the constants derived from them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from bench.predict.fit import Error, Fit, Point, fit
from bench.predict.formulas import FLOAT32, Cluster, Library, Shape, Terms, query_ring_work, ring_work, tree_work
from bench.predict.libraries import gloo, nccl, shared_memory

LIBRARIES: dict[str, Library] = {"gloo": gloo, "nccl": nccl, "shared_memory": shared_memory}
RINGS = {"ring": ring_work, "ring_pass_q": query_ring_work}
TWO_TIER = "two-tier"
"""Networks of hosts that are joined by links; their rates follow the name."""
ONE_DEVICE = "one_device"


class Machine(msgspec.Struct, frozen=True):
    """The part of a machine's description that the formulas need."""

    logical_cores: int = 1


class MergeRow(msgspec.Struct, frozen=True):
    """A row of bench.merge."""

    merge: str
    transport: str
    world_size: int
    nodes: int
    batch: int
    heads: int
    head_dim: int
    latency_us_median: float
    machine: Machine = Machine()

    @property
    def group(self) -> str:
        return f"merge, {self.transport}"

    def point(self) -> Point:
        shape = Shape(rows=self.batch, heads=self.heads, kv_heads=self.heads, dim=self.head_dim, key_width=FLOAT32)
        cluster = Cluster(self.nodes, self.world_size // self.nodes)
        work = tree_work(self.merge, cluster, shape, 0, LIBRARIES[self.transport])
        name = f"{self.merge}, {cluster.num_nodes}x{cluster.ranks_per_node}, {self.batch} rows"
        # for gloo, nodes on one host are only groups; shared memory leaves the traffic between them to gloo
        scale = turns(self.transport, self.world_size, self.machine, has_links=self.transport != "gloo")
        return Point(name, work.scaled(scale), self.latency_us_median / 1e6)


class AttentionRow(msgspec.Struct, frozen=True):
    """A row of bench.attention."""

    method: str
    network: str
    world_size: int
    nodes: int
    context_tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    latency_us_median: float
    transport: str = "gloo"
    merge: str | None = None
    batch: int = 1
    between_gbit: float = 0
    """Rate of the links between hosts; 0 means no limit."""
    machine: Machine = Machine()

    @property
    def has_links(self) -> bool:
        return self.network.startswith(TWO_TIER)

    @property
    def group(self) -> str:
        network = f"{TWO_TIER}, far bytes at 1 Gbit/s" if self.has_links else self.network
        return f"attention, {self.transport}, {network}"

    def point(self) -> Point:
        shape = Shape(rows=self.batch, heads=self.heads, kv_heads=self.kv_heads, dim=self.head_dim, key_width=FLOAT32)
        cluster = Cluster(self.nodes, self.world_size // self.nodes, is_uplink_shared=True)
        library = LIBRARIES[self.transport]
        if self.method in RINGS:
            work = RINGS[self.method](cluster, shape, self.context_tokens, library)
        else:
            merge = "gather" if self.method == ONE_DEVICE else self.merge or self.method  # a single rank needs no merge
            work = tree_work(merge, cluster, shape, self.context_tokens, library)
        name = (
            f"{self.method}, {self.network}, {cluster.num_nodes}x{cluster.ranks_per_node}, {self.context_tokens} tokens"
        )
        scale = turns(self.transport, self.world_size, self.machine, has_links=self.has_links)
        return Point(name, work.scaled(scale).scaled(self._at_1_gbit), self.latency_us_median / 1e6)

    def _at_1_gbit(self, terms: Terms) -> Terms:
        """Bytes between hosts as if their link had 1 Gbit/s, so that rows of all rates share one constant."""
        return terms._replace(far_bytes=terms.far_bytes / self.between_gbit if self.between_gbit else 0.0)


Row = MergeRow | AttentionRow
KINDS: dict[str, tuple[type[Row], str]] = {
    "merge.json": (MergeRow, "python -m bench.merge"),
    "attention.json": (AttentionRow, "python -m bench.attention --sweep"),
}
"""By file: its rows, and the command that makes it."""


class Missing(Exception):
    """The file of measurements is missing or invalid; the message describes how to create it."""


def load(path: Path) -> list[Row]:
    """The rows of a file of KINDS: a list, or an object with `rows` and perhaps the `machine` of all of them."""
    kind, command = KINDS[path.name]
    if not path.exists():
        raise Missing(f"{path} is missing; make it with: {command}")
    try:
        found: Any = msgspec.json.decode(path.read_bytes())
        common: dict[str, Any] = {}
        if isinstance(found, dict):
            common = {"machine": found["machine"]} if "machine" in found else {}
            found = found.get("rows")
        return [msgspec.convert({**common, **row}, kind) for row in found]
    except (msgspec.MsgspecError, TypeError) as error:
        raise Missing(f"{path} has no rows as expected ({error}); regenerate it with: {command}") from error


def fits(rows: list[Row], seed: int) -> list[dict[str, Any]]:
    """By transport and network, constants and errors; a group of too few rows has the reason instead.

    Rows of uneven nodes are left out: the formulas know even ones.
    """
    groups: dict[str, list[Point]] = {}
    for row in (row for row in rows if row.world_size % row.nodes == 0):
        groups.setdefault(row.group, []).append(row.point())
    return [{"kind": "fitted", "group": group, **_fitted(points, seed)} for group, points in sorted(groups.items())]


def turns(transport: str, world_size: int, machine: Machine, *, has_links: bool) -> Callable[[Terms], Terms]:
    """Scales the terms for this machine, where ranks without a separate processor take turns.

    Terms that use a processor count as often as ranks share one; waiting and the links between hosts do not. Without
    such links a round counts once, and bytes are only copied. On GPUs every rank has a processor. Where logical
    processors are threads of one core and the system does not report it, ranks get less than is assumed here, which
    shows in the errors.
    """
    times = 1.0 if transport == "nccl" else max(1.0, world_size / machine.logical_cores)

    def scale(terms: Terms) -> Terms:
        return terms._replace(
            joins=times * terms.joins,
            operations=times * terms.operations,
            near_rounds=terms.near_rounds if has_links else terms.near_rounds + terms.far_rounds,
            far_rounds=terms.far_rounds if has_links else 0.0,
            messages=times * terms.messages,
            near_bytes=times * terms.near_bytes,
            far_bytes=terms.far_bytes if has_links else 0.0,
            key_bytes=times * terms.key_bytes,
        )

    return scale


def _fitted(points: list[Point], seed: int) -> dict[str, Any]:
    try:
        found = fit(points, seed)
    except ValueError as error:
        return {"error": str(error)}
    return {"constants": _constants(found), "fitted_on": _rounded(found.trained), "held_out": _rounded(found.held_out)}


def _constants(found: Fit) -> dict[str, float]:
    """Microseconds each, and bytes per second; terms that cost nothing are left out."""
    shown: dict[str, float] = {}
    for name, seconds in found.constants._asdict().items():
        if seconds > 0:
            is_rate = name.endswith("bytes")
            shown[f"{name}_per_s" if is_rate else f"{name}_us"] = float(
                f"{1 / seconds if is_rate else 1e6 * seconds:.4g}"
            )
    return shown


def _rounded(error: Error) -> dict[str, Any]:
    return {
        "points": error.num_points,
        "median_relative_error": round(error.median, 3),
        "worst_relative_error": round(error.worst, 3),
        "worst_point": error.worst_point,
    }
