"""The recurrent states of sequences on one rank, by slot. Every rank holds the same states in the same slots.

A slot holds the state of all mixers after one position of a sequence. The coordinator assigns slots as blocks of one
position: see `longleaf.positions.WindowSpec`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from workers.kv_cache.block_view import BlockView
from workers.model.mixers import PartName, StatePart


class StatePool:
    """The states of mixers, for `num_states` positions of any sequences."""

    def __init__(
        self, parts: Mapping[int, tuple[StatePart, ...]], num_states: int, dtype: torch.dtype, device: str
    ) -> None:
        """`parts` by layer; `dtype` is that of the model."""
        self.num_states = num_states
        self._layers = {
            layer: {
                part.name: torch.empty(num_states, *part.shape, dtype=part.dtype or dtype, device=device)
                for part in described
            }
            for layer, described in parts.items()
        }

    def parts(self, layer: int) -> Mapping[PartName, Tensor]:
        """The parts of a layer in all slots, [slots, ...]."""
        return self._layers[layer]

    def load(self, layer: int, slots_B: Tensor) -> dict[PartName, Tensor]:
        """Copies of the states in B slots, [B, ...] of each part."""
        return {name: part.index_select(0, slots_B) for name, part in self._layers[layer].items()}

    def store(self, layer: int, slots_B: Tensor, states: Mapping[PartName, Tensor]) -> None:
        """Writes the states [B, ...] of each part to B slots."""
        for name, part in self._layers[layer].items():
            part.index_copy_(0, slots_B, states[name].to(part.dtype))

    def blocks(self) -> list[BlockView]:
        """All parts by slot, [1, slots, ...]."""
        return [
            BlockView(f"{layer}.{name.kind}{name.number}", part[None], has_slots=False)
            for layer, parts in self._layers.items()
            for name, part in parts.items()
        ]
