"""What bench.merge and bench.attention measured on this machine, and the constants that follow from it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from bench.model.fit import Error, Fit, Point, fit
from bench.model.formulas import FLOAT32, Cluster, Library, Shape, Terms, Work, query_ring_work, ring_work, tree_work
from bench.model.libraries import gloo, nccl, shared_memory

LIBRARIES: dict[str, Library] = {"gloo": gloo, "nccl": nccl, "shared_memory": shared_memory}
RINGS = {"ring": ring_work, "ring_pass_q": query_ring_work}
ONE_HOST = "loopback"
"""The network of ranks that are on one host."""


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
        return Point(name, placed(work, self.transport, ONE_HOST, self), self.latency_us_median / 1e6)


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
    machine: Machine = Machine()

    @property
    def group(self) -> str:
        return f"attention, {self.transport}, {self.network}"

    def point(self) -> Point:
        shape = Shape(rows=self.batch, heads=self.heads, kv_heads=self.kv_heads, dim=self.head_dim, key_width=FLOAT32)
        cluster = Cluster(self.nodes, self.world_size // self.nodes, is_uplink_shared=True)
        library = LIBRARIES[self.transport]
        if self.method in RINGS:
            work = RINGS[self.method](cluster, shape, self.context_tokens, library)
        else:
            work = tree_work(self.merge or self.method, cluster, shape, self.context_tokens, library)
        name = f"{self.method}, {cluster.num_nodes}x{cluster.ranks_per_node}, {self.context_tokens} tokens"
        return Point(name, placed(work, self.transport, self.network, self), self.latency_us_median / 1e6)


Row = MergeRow | AttentionRow
KINDS: dict[str, tuple[type[Row], str]] = {
    "merge.json": (MergeRow, "python -m bench.merge --json > bench/results/merge.json"),
    "attention.json": (AttentionRow, "python -m bench.attention --json > bench/results/attention.json"),
}
"""By file: its rows, and the command that makes it."""


class Missing(Exception):
    """A file of measurements that is not there, or not what it should be; tells how to make it."""


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
        raise Missing(f"{path} has no rows as expected ({error}); make it anew with: {command}") from error


def fits(rows: list[Row], seed: int) -> list[dict[str, Any]]:
    """By transport and network, constants and errors; a group of too few rows has the reason instead."""
    groups: dict[str, list[Point]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row.point())
    return [{"kind": "fitted", "group": group, **_fitted(points, seed)} for group, points in sorted(groups.items())]


def placed(work: Work, transport: str, network: str, row: Row) -> Work:
    """The work as it falls on this machine.

    Ranks without a processor of their own take turns, so what takes a processor counts as often as ranks share one.
    Between hosts bytes are copied like all others, and go over the link besides. On one host there is no such link, but
    shared memory leaves what crosses between nodes to gloo, and that has its own constants.
    """
    if transport == "nccl":
        return work
    turns = max(1.0, row.world_size / row.machine.logical_cores)
    is_apart = network != ONE_HOST or transport == "shared_memory"
    return work.scaled(_turns(turns, is_apart=is_apart))


def _turns(turns: float, *, is_apart: bool) -> Callable[[Terms], Terms]:
    def scale(terms: Terms) -> Terms:
        copied = terms.near_bytes + (0.0 if is_apart else terms.far_bytes)
        return Terms(
            calls=turns * terms.calls,
            operations=turns * terms.operations,
            near_rounds=terms.near_rounds + (0.0 if is_apart else terms.far_rounds),
            far_rounds=terms.far_rounds if is_apart else 0.0,
            messages=turns * terms.messages,
            near_bytes=turns * copied,
            far_bytes=terms.far_bytes if is_apart else 0.0,
            key_bytes=turns * terms.key_bytes,
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
    used = {name: value for name, value in found.constants._asdict().items() if value > 0}
    return {
        f"{name}_per_s" if name.endswith("bytes") else f"{name}_us": float(
            f"{1 / v if 'bytes' in name else 1e6 * v:.4g}"
        )
        for name, v in used.items()
    }


def _rounded(error: Error) -> dict[str, Any]:
    return {
        "points": error.num_points,
        "median_relative_error": round(error.median, 3),
        "worst_relative_error": round(error.worst, 3),
        "worst_point": error.worst_point,
    }
