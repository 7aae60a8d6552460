"""One rank's keys and values by slot.

The pool of a layer is [K, slots, D]: the slots of a head are contiguous, so blocks with consecutive ids form one
contiguous range that a kernel reads in one call, without a copy.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from longleaf.attention import Partial
from longleaf.attention.masks import Read
from longleaf.kernels.backend import Backend
from workers.kv_cache.block_view import BlockView
from workers.kv_cache.states import StatePool
from workers.model.model import LayerSpec


class KvPool(Protocol):
    """Keys and values of all layers by slot, in any format: unquantized here, 8-bit in `workers.kv_cache.quantized`."""

    block_size: int
    window_block_size: int
    """Positions per block of windows or states."""
    states: StatePool | None
    """The recurrent states, if the model has any; they are the blocks of windows."""
    dtype: torch.dtype
    """Type of the stored inputs and of the outputs of `take`."""
    device: str
    trash_slot: int
    window_trash_slot: int
    """The trash slot of windowed layers with separate blocks; otherwise equal to `trash_slot`."""

    def bytes_per_slot(self, layer: int) -> int:
        """Bytes of a token's keys and values in a layer."""
        ...

    def num_kv_heads(self, layer: int) -> int: ...

    def keys_between(self, layer: int, start: int, end: int) -> Tensor:
        """The keys [K, S, D] in slots [start, end), float32."""
        ...

    def store(self, backend: Backend, layer: int, slots_T: Tensor, k_KTD: Tensor, v_KTV: Tensor) -> None:
        """Writes the keys and values of T tokens to their slots."""
        ...

    def stored(self, layer: int, slots_T: Tensor, k_KTD: Tensor, v_KTV: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of T tokens as they are kept in the slots to which they were just stored."""
        ...

    def take(self, layer: int, slots_L: Tensor) -> Tensor:
        """The stored keys and values of L tokens, for `split`: [L, K, D + V], or [L, K, D] where values lie in the
        keys.
        """
        ...

    def pack(self, layer: int, k_KTD: Tensor, v_KTV: Tensor) -> Tensor:
        """Keys and values of tokens that are not stored, in the format of `take`, [T, K, D + V] or [T, K, D]."""
        ...

    def split(self, layer: int, taken_SKC: Tensor) -> tuple[Tensor, Tensor]:
        """The keys [K, S, D] and values [K, S, V] of tokens from `take` or `pack`, of this or another rank."""
        ...

    def attend(
        self, backend: Backend, layer: int, q_THD: Tensor, reads: Sequence[Read], scale: float, softcap: float | None
    ) -> Partial:
        """The partial of queries over the slots of the reads."""
        ...

    def blocks(self, *, of_windows: bool) -> list[BlockView]:
        """All parts of the pool by block: either the separate blocks of windowed layers, or of states, or the
        others.
        """
        ...


class FloatKvPool:
    """Unquantized keys and values. A slot past the last block takes values that are not needed (trash).

    In latent attention the values of a layer are a view of its keys. Layers with a limited reach have
    `num_window_blocks` blocks, if that is given; their slots are then separate from those of the other layers.
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
        self.window_trash_slot = self.trash_slot if num_window_blocks is None else num_window_blocks * block_size
        self._layers = layers
        self._windowed = {i for i, spec in layers.items() if num_window_blocks is not None and not spec.reach.is_full}
        self._stored = {
            i: [torch.empty(spec.num_kv_heads, size, dim, dtype=dtype, device=device) for dim in spec.stored_dims]
            for i, spec in layers.items()
            for size in [1 + (self.window_trash_slot if i in self._windowed else self.trash_slot)]
        }
        self.keys = {i: stored[0] for i, stored in self._stored.items()}
        self.values = {i: stored[-1][..., : layers[i].value_dim] for i, stored in self._stored.items()}

    def bytes_per_slot(self, layer: int) -> int:
        """Bytes of a token's keys and values in a layer."""
        return self._layers[layer].num_stored * self.dtype.itemsize

    def num_kv_heads(self, layer: int) -> int:
        return self._layers[layer].num_kv_heads

    def keys_between(self, layer: int, start: int, end: int) -> Tensor:
        """The keys [K, S, D] in slots [start, end), float32; a view if they are stored as float32."""
        return self.keys[layer][:, start:end].float()

    def store(self, backend: Backend, layer: int, slots_T: Tensor, k_KTD: Tensor, v_KTV: Tensor) -> None:
        """Writes the keys and values of T tokens to their slots. Values that lie in the keys are stored with them."""
        backend.store(self._stored[layer], slots_T, (k_KTD, v_KTV))

    def stored(self, layer: int, slots_T: Tensor, k_KTD: Tensor, v_KTV: Tensor) -> tuple[Tensor, Tensor]:
        """The given keys and values: they are stored unchanged."""
        return k_KTD, v_KTV

    def take(self, layer: int, slots_L: Tensor) -> Tensor:
        """The stored keys and values of L tokens, for `split`: [L, K, D + V], or [L, K, D] where values lie in the
        keys.
        """
        return torch.cat([pool.index_select(1, slots_L).transpose(0, 1) for pool in self._stored[layer]], dim=-1)

    def pack(self, layer: int, k_KTD: Tensor, v_KTV: Tensor) -> Tensor:
        """Keys and values of tokens that are not stored, in the format of `take`, [T, K, D + V] or [T, K, D]."""
        tensors = (k_KTD, v_KTV)[: len(self._stored[layer])]
        return torch.cat([tokens.transpose(0, 1) for tokens in tensors], dim=-1)

    def split(self, layer: int, taken_SKC: Tensor) -> tuple[Tensor, Tensor]:
        """The keys [K, S, D] and values [K, S, V] of tokens from `take` or `pack`, of this or another rank."""
        parts = taken_SKC.transpose(0, 1).split(self._layers[layer].stored_dims, dim=-1)
        return parts[0], parts[-1][..., : self._layers[layer].value_dim]

    def attend(
        self, backend: Backend, layer: int, q_THD: Tensor, reads: Sequence[Read], scale: float, softcap: float | None
    ) -> Partial:
        """The partial of queries over the slots of the reads."""
        return backend.attend(q_THD, self.keys[layer], self.values[layer], reads, scale, softcap)

    def blocks(self, *, of_windows: bool) -> list[BlockView]:
        """All parts of the pool, [K, B, block size, D] of B blocks: either the blocks of windows, or of states, or the
        others.
        """
        if of_windows and self.states is not None:
            return self.states.blocks()
        end = self.window_trash_slot if of_windows else self.trash_slot
        layers = {i: stored for i, stored in self._stored.items() if (i in self._windowed) == of_windows}
        size = (-1, self.block_size)
        return [
            BlockView(f"{i}.{name}", tensor[:, :end].unflatten(1, size), has_slots=True)
            for i, stored in layers.items()
            for name, tensor in zip(("keys", "values"), stored, strict=False)  # values may lie in the keys
        ]
