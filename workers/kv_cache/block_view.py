"""A part of a pool, seen by block."""

from typing import NamedTuple

from torch import Tensor


class BlockView(NamedTuple):
    """A part of a layer's pool, by block."""

    name: str
    """The name of the layer and the part; unique in the pool."""
    tensor: Tensor
    """A view [K, B, ...] of B blocks."""
    has_slots: bool
    """Whether the shape is [K, B, block size, ...]; otherwise there is one entry for each whole block."""
