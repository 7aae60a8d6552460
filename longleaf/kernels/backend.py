"""What a device computes: attention over a rank's keys, their storing, and the packing and folding of partials.

Shape letters: T rows or tokens, K key heads, G queries per key head, H = K * G query heads, S slots, B blocks, D dim,
V value dim, N partials, C columns of a packed row.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longleaf.attention.block_attribution import AttributionColumns
from longleaf.attention.masks import Read, Reads
from longleaf.attention.partial import Partial

Numbers: TypeAlias = "NDArray[np.int64]"
"""On the host."""


class Int8Layer(NamedTuple):
    """Keys and values of one layer in 8 bits; `longleaf.kernels.int8` says what their numbers stand for."""

    keys_KSD: Tensor
    values_KSD: Tensor
    """Both int8."""
    exponents_KBD: Tensor
    """int8, of the keys of each block of slots."""
    scales_KS: Tensor
    """float32, of the values."""
    block_size: int
    """Slots per block: S = B * block_size."""


class Backend(Protocol):
    """The kernels of a device. A rank has one, chosen at its start; every tensor that it is given lies on its device.

    Pools are the same on all devices: [K, S, D] per layer, the slots of a key head neighbours in memory. A row is in
    as many reads as there are stretches of keys that it sees, and reads of one call show a row no key twice. The
    same `Reads` comes once for each layer that sees alike: what is made of it may be kept for the next one.

    Partials are float32 with natural-log lse, whatever type queries and keys are of, and products are summed up in
    float32. A row without a key is the identity: out 0, lse -inf. What is not finite shows, however it is masked or
    weighed: a row that is NaN or infinite, or reads a key or a value that is, gets NaN (of a value, perhaps infinity).
    So may rows of the same read that do not see that key; slots that no read names may hold anything.

    No method waits for the device or looks into its memory: what must be decided is decided on shapes and reads.
    """

    name: str
    """As `--kernels` has it."""

    def attend(
        self,
        q_THD: Tensor,
        k_KSD: Tensor,
        v_KSV: Tensor,
        reads: Sequence[Read],
        scale: float,
        softcap: float | None = None,
    ) -> Partial:
        """The partial of queries over all reads of keys and values in a floating type, which may be another one than
        the queries'.

        Keys and values are views of any strides whose last dim is contiguous. Values may lie in the keys (`lies_in`),
        as latents do. With a soft cap, scores s become cap * tanh(s / cap), as in Gemma 2 (arXiv 2408.00118). Raises
        ValueError for shapes that do not fit.
        """
        ...

    def attend_int8(
        self, q_THD: Tensor, kept: Int8Layer, reads: Sequence[Read], scale: float, softcap: float | None = None
    ) -> Partial:
        """The partial of queries over keys and values in 8 bits, otherwise as `attend`."""
        ...

    def store(self, kept: Sequence[Tensor], slots_T: Tensor, tokens: Sequence[Tensor]) -> None:
        """Writes T tokens into their slots, int64, of a layer's pools: keys [K, S, D] and values [K, S, V], or keys
        alone where the values lie in them. `tokens` are keys [K, T, D] and values [K, T, V] in the pool's type, of any
        strides; without a pool for values these are left out. Slots may repeat: then any of their tokens is kept."""
        ...

    def store_int8(self, kept: Int8Layer, slots_T: Tensor, k_KTD: Tensor, v_KTD: Tensor) -> None:
        """Rounds T keys and values into their slots. A slot at a multiple of the block size begins its block anew."""
        ...

    def pack(self, partial: Partial, dtype: torch.dtype) -> Tensor:
        """The partial as it travels, [T, H, C] in memory of its own; see `longleaf.attention.packed`."""
        ...

    def fold(self, packed_NTHC: Tensor) -> Partial:
        """Joins N packed partials in the order of the first dimension: the same inputs give the same bits on every
        device of this backend. The result has memory of its own."""
        ...


@runtime_checkable
class AttributionBackend(Backend, Protocol):
    """A backend with kernels that tell what each block of keys gave to a row, where `Reads.told` asks for it. Partials
    are the same bits whether it does or not."""

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
        """Adds one layer to what of the attention of A tellers was found to fall on N columns: sums over heads, the
        largest of all heads, both float32 [A, N], and its number, int32, where the layer's begin at `first_head`.

        `told_KE2` is what kernels have told, with the natural-log logsumexp of all that the rows see. Sinks count
        where they are given."""
        ...


class LaunchTables(Protocol):
    """What launches find of the reads of a step, in memory of fixed address. Sizes are in numbers, int64."""

    @property
    def num_numbers(self) -> int: ...

    @property
    def most_rows(self) -> int:
        """Rows that are read for together, at most, if more do; the others read the keys again."""
        ...

    def bind(self, reads: Reads, there_N: Tensor) -> None:
        """Has layers that read `reads`, which is empty, find their work in `there_N` on the device."""
        ...

    def fill(self, reads: Reads, here_N: Numbers) -> int | None:
        """Puts what a step reads into memory of the host, from where it is copied to the device; how many numbers that
        are. None, where there is not room enough for it."""
        ...


@runtime_checkable
class CapturableBackend(Backend, Protocol):
    """A backend whose launches may be captured once and then serve any step of as many tokens."""

    def tables(self, seen: Reads, *, is_shared: bool) -> LaunchTables:
        """Tables for the layers that have read `seen` before, an empty step. Rows read keys together, or else
        (`is_shared` is false) no more than a tile has room for."""
        ...


def check_shapes(q_THD: Tensor, k_KSD: Tensor, v_KSV: Tensor) -> None:
    """Raises ValueError: kernels read wherever the sizes tell them to."""
    (_, num_heads, dim), num_kv_heads = q_THD.shape, k_KSD.shape[0]
    if num_heads % num_kv_heads or k_KSD.shape[2] != dim or v_KSV.shape[:2] != k_KSD.shape[:2]:
        q, k, v = (tuple(t.shape) for t in (q_THD, k_KSD, v_KSV))
        raise ValueError(f"queries {q}, keys {k} and values {v} do not fit")


def lies_in(v_KSV: Tensor, k_KSD: Tensor) -> bool:
    """Whether the values are the first dims of the keys, in the same memory, as in latent attention."""
    is_narrower = v_KSV.shape[2] < k_KSD.shape[2] and v_KSV.shape[:2] == k_KSD.shape[:2]
    return is_narrower and v_KSV.data_ptr() == k_KSD.data_ptr() and v_KSV.stride() == k_KSD.stride()
