"""Published decoding figures of the Tree Attention paper: arXiv 2408.04093, version 4. None was measured here.

Its figures 2 to 4 are pictures without numbers, and are not here.
"""

from typing import NamedTuple

PAPER = "Tree Attention, arXiv 2408.04093"


class Decoding(NamedTuple):
    """A row of a table: seconds for 10 tokens, averages of 10 trials. They are called decoding times "with a prefill
    stage"; whether that is in them is left open."""

    context_tokens: int
    tree_s: float
    ring_s: float


class Published(NamedTuple):
    """A table, or the part of one that was measured on the same machine."""

    table: str
    model: str
    hardware: str
    rows: tuple[Decoding, ...]


H100 = Published(
    "Table 1",
    "Llama-3.1-8B",
    "8 x H100, one DGX node, NVLink 4",
    (
        Decoding(32_000, 0.60, 2.57),
        Decoding(64_000, 1.08, 4.42),
        Decoding(128_000, 2.68, 6.38),
        Decoding(256_000, 2.89, 8.19),
    ),
)
MI300X = Published(
    "Table 1",
    "Llama-3.1-8B",
    "4 x MI300X (8 in its text)",
    (
        Decoding(32_000, 1.05, 3.57),
        Decoding(64_000, 2.36, 7.33),
        Decoding(128_000, 6.43, 16.40),
        Decoding(256_000, 15.30, 35.12),
    ),
)
RTX_4090 = Published(
    "Table 2",
    "Llama-3.2-1B",
    "2 x RTX 4090, PCIe",
    (
        Decoding(8_000, 0.34, 1.38),
        Decoding(16_000, 0.58, 2.77),
        Decoding(20_000, 0.74, 3.47),
        Decoding(32_000, 1.01, 5.45),
    ),
)
PUBLISHED = (H100, MI300X, RTX_4090)
