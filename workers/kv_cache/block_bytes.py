"""The content of blocks as bytes: everything that a pool keeps in them, in every layer, bit for bit.

The bytes of a block are ordered by layer, then by tensor, then by key head. They do not include dtypes or sizes: the
receiving pool must have the same form as the sending pool.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.host_copies import to_device
from workers.kv_cache.slots import KvPool


class Content:
    """The blocks of a pool that hold runs or, with `of_windows`, those of windowed layers with separate blocks."""

    def __init__(self, pool: KvPool, *, of_windows: bool = False) -> None:
        self._device = pool.device
        self._tensors = [blocks.tensor for blocks in pool.blocks(of_windows=of_windows)]
        self._sizes = [tensor[:, 0].numel() * tensor.itemsize for tensor in self._tensors]
        self.bytes_per_block = sum(self._sizes)
        """0 where no layer has such blocks."""

    def export(self, blocks: Sequence[int]) -> Tensor:
        """The bytes of N blocks, uint8 [N, bytes_per_block], as a copy."""
        index_N = self._index(blocks)
        parts = [tensor.index_select(1, index_N).transpose(0, 1).flatten(1) for tensor in self._tensors]
        empty = torch.empty(len(blocks), 0, dtype=torch.uint8, device=self._device)
        return torch.cat([empty, *(part.contiguous().view(torch.uint8) for part in parts)], dim=1)

    def restore(self, blocks: Sequence[int], bytes_NB: Tensor) -> None:
        """Writes the exported bytes of N blocks to blocks of this pool. Raises RuntimeError if the sizes differ."""
        index_N = self._index(blocks)
        for tensor, part in zip(self._tensors, bytes_NB.split(self._sizes, dim=1), strict=True):
            own = part.clone(memory_format=torch.contiguous_format)  # bytes of wider numbers must be aligned
            shape = (len(blocks), len(tensor), *tensor.shape[2:])
            tensor.index_copy_(1, index_N, own.view(tensor.dtype).view(shape).transpose(0, 1))

    def _index(self, blocks: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(blocks, dtype=torch.long), self._device)
