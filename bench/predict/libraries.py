"""How collective libraries carry out an operation: rounds, messages, and which bytes cross between nodes.

NCCL: all-reduce as a chain in each node and a tree across them, up and down; all-gather as one ring; everything else as
messages sent at once (src/graph/tuning.cc, ncclTopoTuneModel). gloo: all-reduce as one ring, reduce-scatter then
all-gather, in two segments per rank (gloo/allreduce.cc); all-to-all sent at once (gloo/alltoall.cc), and all-gather
likewise, as longleaf/comm/process_group.py does it.
"""

from math import ceil, log2

from bench.predict.formulas import Cluster, Operation, Terms, sent_bytes


def nccl(operation: Operation, cluster: Cluster) -> Terms:
    nodes, ranks = cluster.group(operation.scope)
    match operation.kind:
        case "all_reduce":
            near, far = 2.0 * (ranks - 1), 2.0 * ceil(log2(nodes))
            return _chained(operation, cluster).plus(Terms(operations=1, near_rounds=near, far_rounds=far))
        case "all_gather":
            near, far = float(nodes * ranks - nodes), nodes - 1.0
            return _chained(operation, cluster).plus(Terms(operations=1, near_rounds=near, far_rounds=far))
        case _:
            return _at_once(operation, cluster)


def gloo(operation: Operation, cluster: Cluster) -> Terms:
    """A processor copies every byte, wherever it goes: the near bytes are all that a rank sends."""
    nodes, ranks = cluster.group(operation.scope)
    copied = sent_bytes(operation, cluster)
    if operation.kind != "all_reduce":
        calls = 2 if operation.kind in ("shift", "swap") else 1  # a permutation is an isend and an irecv
        return _at_once(operation, cluster)._replace(operations=calls, near_bytes=copied)
    hops = 2.0 * (nodes * ranks - 1)
    terms = _chained(operation, cluster).plus(_rounds(hops, nodes))
    return terms._replace(operations=1, messages=2 * hops, near_bytes=copied)


def shared_memory(operation: Operation, cluster: Cluster) -> Terms:
    """Inside a node each rank writes its tensor once and reads those of the others; gloo between nodes."""
    nodes, ranks = cluster.group(operation.scope)
    if nodes > 1:
        # memory copies cost something else than gloo's, which are counted with the bytes between nodes
        return gloo(operation, cluster)._replace(near_bytes=0)
    reads_all = operation.kind in ("all_gather", "all_reduce")
    copied = operation.num_bytes * (1 + (ranks if reads_all else 1))
    return Terms(operations=1, near_rounds=1, near_bytes=copied)


def _at_once(operation: Operation, cluster: Cluster) -> Terms:
    """Every rank sends to every other without waiting; a shift or a swap is one message."""
    nodes, ranks = cluster.group(operation.scope)
    size = nodes * ranks
    sent = sent_bytes(operation, cluster)
    if operation.kind == "shift":
        return _chained(operation, cluster).plus(Terms(operations=1, messages=1)).plus(_rounds(1, nodes))
    is_swap = operation.kind == "swap"
    far = 0.0 if nodes == 1 else sent if is_swap else sent * (size - ranks) / (size - 1)
    users = cluster.ranks_per_node if cluster.is_uplink_shared else 1
    messages = 1 if is_swap else size - 1
    terms = Terms(operations=1, messages=messages, near_bytes=sent - far, far_bytes=far * users)
    return terms.plus(_rounds(1, nodes))


def _chained(operation: Operation, cluster: Cluster) -> Terms:
    """The bytes of a chain of ranks: all links work at once, so those between nodes, the slowest, set the pace."""
    nodes, _ = cluster.group(operation.scope)
    sent = sent_bytes(operation, cluster)
    if nodes == 1:
        return Terms(near_bytes=sent)
    users = cluster.ranks_per_node if cluster.is_uplink_shared and operation.scope == "rail" else 1
    return Terms(far_bytes=sent * users)


def _rounds(number: float, num_nodes: int) -> Terms:
    """Rounds over the slowest link of a group."""
    return Terms(far_rounds=number) if num_nodes > 1 else Terms(near_rounds=number)
