"""Counts of a step of attention: calls, rounds, messages, bytes. No number here was measured.

An algorithm is a list of operations; a library turns an operation into rounds and messages; a cluster determines which
of them cross between nodes. Multiplied with the seconds that each term costs, the counts give a latency.

Sources: Tree Attention (arXiv 2408.04093, equations 8 to 14) for the volumes of all-reduces and ring; NCCL's
src/graph/tuning.cc for its trees and rings; gloo's allreduce.cc and alltoall.cc.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Literal, NamedTuple

from longleaf.merge.butterfly import rounds

Kind = Literal["all_gather", "all_to_all", "all_reduce", "broadcast", "shift", "swap"]
"""A shift is a permutation where each rank sends to the next; in a swap all ranks of a node send to another node."""
Scope = Literal["world", "node", "rail"]

FLOAT32 = 4


class Terms(NamedTuple):
    """Counts of one rank's operations; or, as the constants of a machine, the seconds that each one costs.

    `near` is inside a node, `far` between nodes. `joins` are the times that a rank joins partials, `operations` calls
    of the library, `rounds` messages of which each waits for the one before, `messages` those a rank must post.
    """

    joins: float = 0.0
    operations: float = 0.0
    near_rounds: float = 0.0
    far_rounds: float = 0.0
    messages: float = 0.0
    near_bytes: float = 0.0
    far_bytes: float = 0.0
    key_bytes: float = 0.0

    def plus(self, other: "Terms") -> "Terms":
        return Terms(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> "Terms":
        return Terms(*(factor * a for a in self))

    def seconds(self, constants: "Terms") -> float:
        return sum(a * b for a, b in zip(self, constants, strict=True))


NOTHING = Terms()


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of equally many ranks. On a shared uplink the ranks of a node share one link to the other nodes."""

    num_nodes: int
    ranks_per_node: int
    is_uplink_shared: bool = False

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node

    def group(self, scope: Scope) -> tuple[int, int]:
        """Nodes and ranks per node of a group."""
        nodes, ranks = self.num_nodes, self.ranks_per_node
        return {"world": (nodes, ranks), "node": (1, ranks), "rail": (nodes, 1)}[scope]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One layer's decode step: query rows and heads, key heads, dim of a head."""

    rows: int = 1
    heads: int
    kv_heads: int
    dim: int
    key_width: int
    """Bytes of one number of a key or value."""

    @property
    def out_bytes(self) -> int:
        return FLOAT32 * self.rows * self.heads * self.dim

    @property
    def lse_bytes(self) -> int:
        return FLOAT32 * self.rows * self.heads

    def kv_bytes(self, num_tokens: float) -> float:
        """Keys and values of so many tokens."""
        return 2 * self.kv_heads * self.dim * self.key_width * num_tokens


class Operation(NamedTuple):
    """One call of the library. `num_bytes` is the tensor that a rank hands over."""

    kind: Kind
    scope: Scope
    num_bytes: float


Library = Callable[[Operation, Cluster], Terms]


@dataclass(frozen=True, slots=True)
class Work:
    """The sequential work of a step, and the hops during which a rank computes: the longer of the two counts."""

    serial: Terms
    num_hops: int = 0
    hop: Terms = NOTHING
    meanwhile: Terms = NOTHING

    def seconds(self, constants: Terms) -> float:
        return self.critical(constants).seconds(constants)

    def critical(self, constants: Terms) -> Terms:
        """The terms that the latency consists of where the constants are these."""
        longer = max(self.hop, self.meanwhile, key=lambda terms: terms.seconds(constants))
        return self.serial.plus(longer.times(self.num_hops))

    def scaled(self, scale: Callable[[Terms], Terms]) -> "Work":
        return Work(scale(self.serial), self.num_hops, scale(self.hop), scale(self.meanwhile))


def merge_operations(merge: str, cluster: Cluster, shape: Shape) -> list[Operation]:
    """The operations of longleaf/tree, with float32 partials."""
    out, lse = shape.out_bytes, shape.lse_bytes

    def share(num_parts: int) -> float:
        """The packed partial of the heads of one part, the last of which is filled up."""
        return (out + lse) * ceil(shape.heads / num_parts) / shape.heads

    if merge == "paper":
        return [Operation("all_reduce", "world", size) for size in (lse, out, lse)]
    if merge == "packed":
        return [Operation("all_reduce", "world", size) for size in (lse, out + lse)]
    if merge == "gather":
        return [Operation("all_gather", "world", out + lse)]
    if merge == "exchange":
        num_parts = cluster.world_size
        part = share(num_parts)
        return [Operation("all_to_all", "world", num_parts * part), Operation("all_gather", "world", part)]
    if merge == "hierarchy":
        part = share(cluster.ranks_per_node)
        inside = Operation("all_to_all", "node", cluster.ranks_per_node * part)
        between = [Operation("all_gather", "rail", part)] if cluster.num_nodes > 1 else []
        return [inside, *between, Operation("all_gather", "node", part)]
    if merge == "butterfly":
        return [Operation("swap", scope, out + lse) for scope in butterfly_scopes(cluster)]
    raise ValueError(f"merge: no formula for {merge}")


def butterfly_scopes(cluster: Cluster) -> list[Scope]:
    """For each round of the butterfly, whether some rank's peer is on another node."""
    size, width = cluster.world_size, cluster.ranks_per_node
    plans = zip(*(rounds(rank, size) for rank in range(size)), strict=True)
    return [
        "world" if any(rank // width != step.to // width for rank, step in enumerate(plan)) else "node"
        for plan in plans
    ]


def tree_work(merge: str, cluster: Cluster, shape: Shape, context_tokens: float, library: Library) -> Work:
    """Attention over a rank's local keys, then one merge. With 0 tokens, only the merge."""
    keys = shape.kv_bytes(context_tokens / cluster.world_size)
    operations = merge_operations(merge, cluster, shape)
    joins = {"butterfly": max(1, len(operations)), "hierarchy": min(2, cluster.num_nodes)}.get(merge, 1)
    return Work(total(operations, cluster, library).plus(Terms(joins=joins, key_bytes=keys)))


def ring_work(cluster: Cluster, shape: Shape, context_tokens: float, library: Library) -> Work:
    """Keys travel around the ring: in each of N - 1 hops a rank passes a block on, and computes on the one it has.

    The computation on the last block overlaps with no transfer.
    """
    block = shape.kv_bytes(context_tokens / cluster.world_size)
    hop = library(Operation("shift", "world", block), cluster)
    keys = Terms(key_bytes=block)
    return Work(keys.plus(Terms(joins=cluster.world_size)), cluster.world_size - 1, hop, keys)


def query_ring_work(cluster: Cluster, shape: Shape, context_tokens: float, library: Library) -> Work:
    """Pass-Q: shares of the heads go round with their partials, then one all-gather of the finished shares."""
    size = cluster.world_size
    share = ceil(shape.heads / size)
    kv_heads_per_share = ceil(share * shape.kv_heads / shape.heads)
    keys = shape.kv_bytes(context_tokens / size) * kv_heads_per_share / shape.kv_heads
    finished = FLOAT32 * shape.rows * share * (shape.dim + 1)
    query = FLOAT32 * shape.rows * share * shape.dim
    moves = [Operation("shift", "world", query + finished)] * (size - 1)
    moves.append(Operation("all_gather", "world", finished))
    return Work(total(moves, cluster, library).plus(Terms(joins=size, key_bytes=size * keys)))


def total(operations: list[Operation], cluster: Cluster, library: Library) -> Terms:
    """All operations in sequence. A single rank needs none."""
    terms = NOTHING
    for operation in operations:
        if cluster.world_size > 1:
            terms = terms.plus(library(operation, cluster))
    return terms


def sent_bytes(operation: Operation, cluster: Cluster) -> float:
    """Bytes that one rank sends; the same in every library here."""
    nodes, ranks = cluster.group(operation.scope)
    size = nodes * ranks
    others = size - 1
    factors = {"all_gather": others, "all_to_all": others / size, "all_reduce": 2 * others / size}
    return operation.num_bytes * factors.get(operation.kind, float(size > 1))
