"""The content of blocks as bytes: all that a pool keeps in them, in every layer, to the bit.

Of a block come one after the other the bytes of each layer's tensors, and of each tensor those of each key head. They
say nothing of numeric types or sizes: who takes them in must have a pool like that of whom they come from.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.host_copies import to_device
from workers.kv_cache.slots import KvPool


class Content:
    """The blocks of a pool that runs lie in or, with `of_windows`, those of layers whose blocks are others."""

    def __init__(self, pool: KvPool, *, of_windows: bool = False) -> None:
        self._device = pool.device
        self._tensors = [blocks.tensor for blocks in pool.blocks(of_windows=of_windows)]
        self._sizes = [tensor[:, 0].numel() * tensor.itemsize for tensor in self._tensors]
        self.bytes_per_block = sum(self._sizes)
        """0 where no layer has such blocks."""

    def export(self, blocks: Sequence[int]) -> Tensor:
        """The bytes of N blocks, uint8 [N, bytes_per_block], in memory of their own."""
        index_N = self._index(blocks)
        parts = [tensor.index_select(1, index_N).transpose(0, 1).flatten(1) for tensor in self._tensors]
        empty = torch.empty(len(blocks), 0, dtype=torch.uint8, device=self._device)
        return torch.cat([empty, *(part.contiguous().view(torch.uint8) for part in parts)], dim=1)

    def restore(self, blocks: Sequence[int], bytes_NB: Tensor) -> None:
        """Puts the bytes of N blocks, as they were exported, into blocks of this pool. Raises RuntimeError where they
        are of another size."""
        index_N = self._index(blocks)
        for tensor, part in zip(self._tensors, bytes_NB.split(self._sizes, dim=1), strict=True):
            own = part.clone(memory_format=torch.contiguous_format)  # bytes of wider numbers must be aligned
            shape = (len(blocks), len(tensor), *tensor.shape[2:])
            tensor.index_copy_(1, index_N, own.view(tensor.dtype).view(shape).transpose(0, 1))

    def _index(self, blocks: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(blocks, dtype=torch.long), self._device)
