"""The pool of keys and values in 8 bits: `longleaf serve --kv-dtype int8`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from longleaf.attention import Partial
from longleaf.attention.masks import Read
from longleaf.errors import ModelRefused
from longleaf.kernels import int8
from longleaf.kernels.backend import Backend
from longleaf.runs import ceil_div
from workers.kv_cache.block_view import BlockView
from workers.kv_cache.states import StatePool
from workers.model.model import LayerSpec


class QuantizedPool:
    """A pool whose slots hold keys and values rounded to 8 bits; its inputs and outputs are of type `dtype`.

    Queries see the rounded keys only, even those of their own chunk, so the result does not depend on the rank that
    computed a key or on the way a prompt is read. Where windows have separate blocks (see `FloatKvPool`), new keys are
    seen unrounded: most of them are never stored. Raises ModelRefused for layers whose values lie in their keys, or
    have another dim.
    """

    def __init__(
        self,
        layers: dict[int, LayerSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: str,
        num_window_blocks: int | None = None,
        states: StatePool | None = None,
    ) -> None:
        self.block_size = block_size
        self.window_block_size = block_size if states is None else 1
        self.states = states
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.device = device
        self.trash_slot = num_blocks * block_size
        self._windowed = {i for i, spec in layers.items() if num_window_blocks is not None and not spec.reach.is_full}
        self._bytes = {i: self._bytes_per_block(spec, block_size) for i, spec in layers.items()}
        num_window_blocks = num_blocks if num_window_blocks is None else num_window_blocks
        self.window_trash_slot = num_window_blocks * block_size
        self._layers = {
            i: int8.empty(spec.num_kv_heads, size, block_size, spec.head_dim, device)
            for i, spec in layers.items()
            for size in [1 + (num_window_blocks if i in self._windowed else num_blocks)]
        }

    @staticmethod
    def bytes_per_block(layers: dict[int, LayerSpec], block_size: int) -> int:
        """Bytes of a block in all layers. Raises ModelRefused for layers whose values lie in their keys, or have
        another dim.
        """
        return sum(QuantizedPool._bytes_per_block(spec, block_size) for spec in layers.values())

    @staticmethod
    def _bytes_per_block(spec: LayerSpec, block_size: int) -> int:
        if spec.latent_dim is not None:
            raise ModelRefused(
                "kv_dtype: int8 is not supported for latent attention, where keys and values are the same"
            )
        if spec.value_dim != spec.head_dim:
            dims = f"{spec.head_dim} and {spec.value_dim}"
            raise ModelRefused(f"kv_dtype: int8 requires keys and values of equal dim; these have {dims}")
        return int8.bytes_per_block(spec.num_kv_heads, block_size, spec.head_dim)

    def bytes_per_slot(self, layer: int) -> int:
        """Bytes of a token's keys and values in a layer."""
        return ceil_div(self._bytes[layer], self.block_size)

    def num_kv_heads(self, layer: int) -> int:
        return len(self._layers[layer].keys_KSD)

    def keys_between(self, layer: int, start: int, end: int) -> Tensor:
        """The keys [K, S, D] in slots [start, end), float32."""
        return int8.keys_between(self._layers[layer], start, end)

    def store(self, backend: Backend, layer: int, slots_T: Tensor, k_KTD: Tensor, v_KTV: Tensor) -> None:
        """Rounds the keys and values of T tokens into their slots."""
        backend.store_int8(self._layers[layer], slots_T, k_KTD, v_KTV)

    def stored(self, layer: int, slots_T: Tensor, k_KTD: Tensor, v_KTV: Tensor) -> tuple[Tensor, Tensor]:
        """The stored, rounded keys and values of T tokens."""
        return int8.read(self._layers[layer], slots_T, self.dtype)

    def take(self, layer: int, slots_L: Tensor) -> Tensor:
        """The stored keys and values of L tokens, [L, K, 2 D], for `split`."""
        return self.pack(layer, *int8.read(self._layers[layer], slots_L, self.dtype))

    def pack(self, layer: int, k_KTD: Tensor, v_KTV: Tensor) -> Tensor:
        """Keys and values of tokens that are not stored, in the format of `take`, [T, K, 2 D]."""
        return torch.cat((k_KTD.transpose(0, 1), v_KTV.transpose(0, 1)), dim=-1)

    def split(self, layer: int, taken_SKC: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values [K, S, D] of tokens from `take` or `pack`, of this or another rank."""
        k_KSD, v_KSD = taken_SKC.transpose(0, 1).chunk(2, dim=-1)
        return k_KSD, v_KSD

    def attend(
        self, backend: Backend, layer: int, q_THD: Tensor, reads: Sequence[Read], scale: float, softcap: float | None
    ) -> Partial:
        """The partial of queries over the slots of the reads."""
        return backend.attend_int8(q_THD, self._layers[layer], reads, scale, softcap)

    def blocks(self, *, of_windows: bool) -> list[BlockView]:
        """All parts of the pool by block; the last of the B blocks is trash. Either the blocks of windows, or of
        states, or the others.
        """
        if of_windows and self.states is not None:
            return self.states.blocks()
        layers = {i: retained for i, retained in self._layers.items() if (i in self._windowed) == of_windows}
        size = (-1, self.block_size)
        return [
            blocks
            for i, retained in layers.items()
            for blocks in (
                BlockView(f"{i}.keys", retained.keys_KSD.unflatten(1, size), has_slots=True),
                BlockView(f"{i}.values", retained.values_KSD.unflatten(1, size), has_slots=True),
                BlockView(f"{i}.exponents", retained.exponents_KBD, has_slots=False),
                BlockView(f"{i}.scales", retained.scales_KS.unflatten(1, size), has_slots=True),
            )
        ]
