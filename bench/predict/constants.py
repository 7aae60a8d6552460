"""Published figures of machines and the paper, each with its source. None was measured in this project."""

from typing import Any, Literal, NamedTuple

from bench.harness.paper import H100, PAPER
from bench.predict.formulas import Cluster, Operation, Shape, Terms
from bench.predict.libraries import nccl

Calibration = Literal["tuner", "solved"]
"""Latencies as NCCL's own tuner has them, or solved from two all-reduces that others measured."""


class Figure(NamedTuple):
    """A number in SI units, where it comes from, and whether it is published, derived from such, or assumed."""

    what: str
    value: float
    unit: str
    kind: Literal["published", "derived", "assumed"]
    source: str


TUNER = "NCCL src/graph/tuning.cc, tree with the LL protocol, as quoted in NVIDIA/nccl issue 1334"

NVLINK = Figure(
    "NVLink 4, one direction", 450e9, "bytes/s", "published", f"900 GB/s both ways: {PAPER}, section 6; H100 data sheet"
)
NDR = Figure("InfiniBand per GPU", 50e9, "bytes/s", "published", f"8 x NDR 400 Gb/s per node: {PAPER}, section 6")
HBM3 = Figure("memory of an H100 SXM", 3.35e12, "bytes/s", "published", "NVIDIA H100 data sheet")
PRODUCTS = Figure("16-bit products of an H100 SXM", 989e12, "FLOP/s", "published", "NVIDIA H100 data sheet")
OPERATION = Figure("NCCL, one operation", 6.8e-6, "s", "published", TUNER)
NEAR_ROUND = Figure("NCCL, one hop over NVLink", 0.6e-6, "s", "published", TUNER)
FAR_ROUND = Figure("NCCL, one hop over the network", 5.0e-6, "s", "published", TUNER)
REDUCE_8 = Figure(
    "all-reduce of 128 bytes on 8 x H100", 19.2e-6, "s", "published", "as measured in Triton-distributed issue 57"
)
REDUCE_16 = Figure(
    "all-reduce of 4 bytes to 1 KB on 2 x 8 H20, NDR",
    47e-6,
    "s",
    "published",
    "46 to 48 us as measured in NVIDIA/nccl issue 1244",
)
MESSAGE = Figure(
    "each message that a rank posts", 1e-6, "s", "assumed", "no published figure found; weighs on flat exchanges only"
)

PAPER_SHAPE = Shape(heads=16, kv_heads=16, dim=128, key_width=2)
CLUSTERS = {"1x8": Cluster(1, 8), "8x8": Cluster(8, 8), "16x8": Cluster(16, 8)}
LENGTHS = tuple(80_000 * 2**i for i in range(7))
SPEED_UP = Figure(
    "tree over ring, 16x8, 5.12M tokens", 8.0, "ratio", "published", f'"close to x8": {PAPER}, section 6, figure 3'
)


TABLE_1 = H100.rows
LLAMA_LAYERS = 32
LLAMA_STEPS = 9
"""Decode steps for 10 tokens: the prefill gives the first."""
LLAMA_TREE = Shape(heads=32, kv_heads=8, dim=128, key_width=2)
LLAMA_RING = Shape(heads=32, kv_heads=32, dim=128, key_width=2)
"""The authors' ring moves keys that are repeated for every query head (Zyphra/tree_attention, llama_flash_sp.py)."""


class Check(NamedTuple):
    """A published latency that no constant was taken from."""

    operation: Operation
    cluster: Cluster
    calibration: Calibration
    figure: Figure


def _check(what: str, low: float, high: float, source: str) -> Figure:
    return Figure(f"{what}, {low:g} to {high:g} us", (low + high) / 2e6, "s", "published", source)


ISSUE = "NVIDIA/nccl issue 1453"
META = "Context Parallelism, arXiv 2411.01783"
CHECKS = (
    Check(
        Operation("all_reduce", "world", 128),
        Cluster(2, 8),
        "tuner",
        Figure("all-reduce of 128 bytes on 2 x 8 H100, printed by the tuner", 25.2e-6, "s", "published", "issue 1453"),
    ),
    Check(
        Operation("all_reduce", "world", 16 * 1024),
        Cluster(1, 8),
        "solved",
        Figure("all-reduce of 16 KB on 8 x H100", 20.7e-6, "s", "published", REDUCE_8.source),
    ),
    Check(
        Operation("all_reduce", "world", 256 * 1024),
        Cluster(1, 8),
        "solved",
        Figure("all-reduce of 256 KB on 8 x H100", 24.8e-6, "s", "published", REDUCE_8.source),
    ),
    Check(Operation("shift", "rail", 4096), Cluster(2, 8), "solved", _check("SendRecv between nodes", 32, 35, META)),
    Check(
        Operation("all_to_all", "rail", 4096), Cluster(2, 8), "solved", _check("All2All between nodes", 67, 81, META)
    ),
)


def published(calibration: Calibration) -> Terms:
    """Seconds per term on DGX H100 nodes.

    `solved` keeps the tuner's hop inside a node, because the measured all-reduces cannot separate it from the cost of
    an operation, and solves for that cost and for the hop between nodes.
    """
    operation, near, far = OPERATION.value, NEAR_ROUND.value, FAR_ROUND.value
    if calibration == "solved":
        inside, across = (nccl(Operation("all_reduce", "world", 128), Cluster(nodes, 8)) for nodes in (1, 2))
        operation = REDUCE_8.value - inside.near_rounds * near
        far = (REDUCE_16.value - operation - across.near_rounds * near) / across.far_rounds
    return Terms(
        operations=operation,
        near_rounds=near,
        far_rounds=far,
        messages=MESSAGE.value,
        near_bytes=1 / NVLINK.value,
        far_bytes=1 / NDR.value,
        key_bytes=1 / HBM3.value,
    )


def figures() -> list[dict[str, Any]]:
    """All constants as rows, those that were solved for included."""
    solved = published("solved")
    source = "solved from the two measured all-reduces with the tuner's hop inside a node"
    derived = (
        Figure("NCCL, one operation", solved.operations, "s", "derived", source),
        Figure("NCCL, one hop over the network", solved.far_rounds, "s", "derived", source),
    )
    link = (NVLINK, NDR, HBM3, OPERATION, NEAR_ROUND, FAR_ROUND, REDUCE_8, REDUCE_16, MESSAGE)
    return [figure._asdict() for figure in (*link, *derived)]
