"""The kernel interface of a device: attention over a rank's keys, storing keys and values, packing and folding
partials.

Shape letters: T rows or tokens, K key heads, G queries per key head, H = K * G query heads, S slots, B blocks, D dim, V
value dim, N partials, C columns of a packed row.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longleaf.attention.block_attribution import AttributionColumns
from longleaf.attention.masks import Read, Reads
from longleaf.attention.partial import Partial

if TYPE_CHECKING:
    from longleaf.kernels.gpu.tables import DeviceLaunchTables

Numbers: TypeAlias = "NDArray[np.int64]"
"""In host memory."""


class Int8Layer(NamedTuple):
    """Keys and values of one layer in 8 bits; the format is described in `longleaf.kernels.int8`."""

    keys_KSD: Tensor
    values_KSD: Tensor
    """Both int8."""
    exponents_KBD: Tensor
    """int8, for the keys of each block of slots."""
    scales_KS: Tensor
    """float32, for the values."""
    block_size: int
    """Slots per block: S = B * block_size."""


class Backend(Protocol):
    """The kernels of a device. A rank has one backend, chosen at startup; all tensors passed to it are on its device.

    Pools have the same layout on all devices: [K, S, D] per layer, with the slots of a key head adjacent in memory. A
    row is in one read per contiguous range of keys that it attends to, and no key occurs twice for a row in the reads
    of one call. The same `Reads` object is passed once per layer with the same attention pattern, so derived data may
    be cached.

    Partials are float32 with natural-log lse, for any type of queries and keys, and products are accumulated in
    float32. A row without a key is the identity: out 0, lse -inf. Non-finite numbers propagate regardless of masks and
    weights: a row that is NaN or infinite, or that reads such a key or value, becomes NaN (for a value, possibly
    infinity). Other rows of the same read that do not attend to that key may become NaN too. Slots outside of all reads
    may contain anything.

    No method synchronizes with the device or reads its memory: all decisions depend only on shapes and reads.
    """

    name: str
    """The value of `--kernels`."""

    def attend(
        self,
        q_THD: Tensor,
        k_KSD: Tensor,
        v_KSV: Tensor,
        reads: Sequence[Read],
        scale: float,
        softcap: float | None = None,
    ) -> Partial:
        """The partial of queries over all reads of keys and values in a floating-point type, which may differ from that
        of the queries.

        Keys and values are views of any strides with a contiguous last dim. Values may be part of the keys (`lies_in`),
        as latents are. With a soft cap, scores s become cap * tanh(s / cap), as in Gemma 2 (arXiv 2408.00118). Raises
        ValueError for mismatched shapes.
        """
        ...

    def attend_int8(
        self, q_THD: Tensor, layer: Int8Layer, reads: Sequence[Read], scale: float, softcap: float | None = None
    ) -> Partial:
        """The partial of queries over keys and values in 8 bits, otherwise like `attend`."""
        ...

    def store(self, pool: Sequence[Tensor], slots_T: Tensor, tokens: Sequence[Tensor]) -> None:
        """Writes T tokens into their slots, int64, of a layer's pools: keys [K, S, D] and values [K, S, V], or only
        keys if the values are part of them. `tokens` are keys [K, T, D] and values [K, T, V] in the pool's type, of any
        strides; values are omitted if they have no pool. For repeated slots, any of the tokens is stored."""
        ...

    def store_int8(self, layer: Int8Layer, slots_T: Tensor, k_KTD: Tensor, v_KTD: Tensor) -> None:
        """Quantizes T keys and values into their slots. A slot at a multiple of the block size resets its block."""
        ...

    def pack(self, partial: Partial, dtype: torch.dtype) -> Tensor:
        """The partial in wire format, [T, H, C] in separate memory; see `longleaf.attention.packed`."""
        ...

    def fold(self, packed_NTHC: Tensor) -> Partial:
        """Merges N packed partials in the order of the first dimension, with the same bits for the same inputs on every
        device of this backend. The result has separate memory."""
        ...


@runtime_checkable
class AttributionBackend(Backend, Protocol):
    """A backend whose kernels report the attention share of each block of keys per row, if `Reads.attributed` requests
    it. Partials are bitwise identical with and without the report."""

    def add_shares(
        self,
        reported_KE2: Tensor,
        lse_TH: Tensor,
        sink_H: Tensor | None,
        columns: AttributionColumns,
        found: tuple[Tensor, Tensor, Tensor],
        *,
        sink_column: int,
        first_head: int,
    ) -> None:
        """Accumulates one layer into the attention shares of A attributed rows on N columns: sums over heads and the
        maximum over all heads, both float32 [A, N], and the head number of the maximum, int32; the layer's heads start
        at `first_head`.

        `reported_KE2` is the report of the kernels, `lse_TH` the natural-log logsumexp over all keys of the rows. Sinks
        are included if given.
        """
        ...


@runtime_checkable
class CapturableBackend(Backend, Protocol):
    """A backend whose launches can be captured once and replayed for any step with the same number of tokens."""

    def tables(self, seen: Reads, *, is_shared: bool) -> "DeviceLaunchTables":
        """Tables for the layers that have read `seen`, an empty step, before. If `is_shared` is false, only as many
        rows share reads of keys as fit into a tile."""
        ...


def check_shapes(q_THD: Tensor, k_KSD: Tensor, v_KSV: Tensor) -> None:
    """Raises ValueError for mismatched shapes, with which kernels would read out of bounds."""
    (_, num_heads, dim), num_kv_heads = q_THD.shape, k_KSD.shape[0]
    if num_heads % num_kv_heads or k_KSD.shape[2] != dim or v_KSV.shape[:2] != k_KSD.shape[:2]:
        q, k, v = (tuple(t.shape) for t in (q_THD, k_KSD, v_KSV))
        raise ValueError(f"queries {q}, keys {k} and values {v} do not fit")


def lies_in(v_KSV: Tensor, k_KSD: Tensor) -> bool:
    """Whether the values are the first dims of the keys, in the same memory, as in latent attention."""
    is_narrower = v_KSV.shape[2] < k_KSD.shape[2] and v_KSV.shape[:2] == k_KSD.shape[:2]
    return is_narrower and v_KSV.data_ptr() == k_KSD.data_ptr() and v_KSV.stride() == k_KSD.stride()
