"""The interface of a merge, and the wire format of partials.

Shape letters: N ranks, T rows, P rows per rank, H heads, D dim, C columns of a packed row.
"""

import logging
from collections.abc import Callable
from functools import partial as bound
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from longleaf.attention import Partial
from longleaf.attention.packed import num_columns, unpack
from longleaf.comm import Comm
from longleaf.kernels.backend import Backend
from longleaf.kernels.dense import DenseBackend

NAME_BYTES = 32
"""Maximum length of a backend's name in messages between ranks."""

log = logging.getLogger(__name__)


class Merge(Protocol):
    """Merges the partials of all ranks. Partials are float32, and are sent as the dtype of the PartialCodec."""

    def to_all(self, partial: Partial) -> Partial:
        """Every rank passes T rows over its own keys and gets all T rows over all keys."""
        ...

    def to_owner(self, partial: Partial) -> Partial:
        """Every rank passes N * P rows, P per rank in rank order, and gets its own P rows over all keys."""
        ...


class PartialCodec:
    """Packs and unpacks partials (`longleaf.attention.packed`) in one dtype, with the kernels of this rank."""

    unpack = staticmethod(unpack)

    def __init__(self, backend: Backend, dtype: torch.dtype = torch.float32) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"partials can be sent as float32 or bfloat16, not as {dtype}")
        self.dtype = dtype
        self.pack: Callable[[Partial], Tensor] = bound(backend.pack, dtype=dtype)
        self.fold: Callable[[Tensor], Partial] = backend.fold
        """Merges N packed partials in the order of the first dimension, deterministically. The result has separate
        memory."""
        self._name = backend.name

    def row_bytes(self, num_heads: int, dim: int) -> int:
        """Bytes of one row of a packed partial."""
        return num_heads * num_columns(dim, self.dtype) * self.dtype.itemsize

    def agree(self, comm: Comm, device: str) -> None:
        """Makes all ranks fold in torch unless all have the same kernels, because implementations differ in the last
        bits. All ranks must call it together, before they merge partials. `device` is the device of the partials."""
        reported_NC = comm.all_gather(torch.tensor([*self._name.encode().ljust(NAME_BYTES)], device=device))
        names = [bytes(map(int, told_C)).decode().rstrip() for told_C in reported_NC.cpu()]
        if len(set(names)) == 1:
            return
        if comm.rank == 0:
            log.warning("ranks have different kernels (%s), so all fold partials in torch (slower)", ", ".join(names))
        self.fold = DenseBackend().fold


def split_heads(partial: Partial, num_parts: int, wire: PartialCodec) -> Tensor:
    """The packed partial split by heads, [parts, T, heads, C]. If H is not divisible, the last part is padded with the
    identity of the merge.

    `join_heads` is the inverse.
    """
    missing = -partial.lse_TH.shape[1] % num_parts
    if missing:
        out = F.pad(partial.out_THD, (0, 0, 0, missing))
        partial = Partial(out, F.pad(partial.lse_TH, (0, missing), value=float("-inf")))
    packed_THC = wire.pack(partial)
    return packed_THC.view(len(packed_THC), num_parts, -1, packed_THC.shape[2]).transpose(0, 1)


def join_heads(parts_NThC: Tensor, num_heads: int, wire: PartialCodec) -> Partial:
    """The partial of `num_heads` heads from parts along the first dimension, in separate memory."""
    return wire.unpack(torch.cat(parts_NThC.unbind(), dim=1)[:, :num_heads])
