"""The contract of a merge, and the packed form in which partials travel.

Shape letters: N ranks, T rows, P rows per rank, H heads, D dim, C columns of a packed row.
"""

import logging
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from longleaf.attention import Partial, merge_all
from longleaf.comm import Comm
from longleaf.kernels.cpu.fold import NativeFold

log = logging.getLogger(__name__)


class Merge(Protocol):
    """Joins the partials of all ranks. Partials are float32; on the wire, too, unless a Wire says otherwise."""

    def to_all(self, partial: Partial) -> Partial:
        """Every rank gives T rows over its own keys and gets all T rows over all keys."""
        ...

    def to_owner(self, partial: Partial) -> Partial:
        """Every rank gives N * P rows, P per rank in rank order, and gets its own P rows over all keys."""
        ...


class Wire:
    """The packed form of partials: out and lse as one tensor, so that one exchange carries both.

    float32: [..., D + 1]. bfloat16: [..., D + 2], the lse keeps its 32 bits, as two columns; each hop rounds the
    values to 8 bits of mantissa, a relative error of at most 2^-8.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"partials travel as float32 or bfloat16, not as {dtype}")
        self.dtype = dtype

    def pack(self, partial: Partial) -> Tensor:
        lse = partial.lse_TH.unsqueeze(-1)
        if self.dtype == torch.float32:
            return torch.cat([partial.out_THD, lse], dim=-1)
        return torch.cat([partial.out_THD.to(self.dtype), lse.view(self.dtype)], dim=-1)

    def unpack(self, packed: Tensor) -> Partial:
        """The partial, or several of them along leading dimensions."""
        if self.dtype == torch.float32:
            return Partial(packed[..., :-1], packed[..., -1])
        lse = packed[..., -2:].contiguous().view(torch.float32).squeeze(-1)
        return Partial(packed[..., :-2].float(), lse)

    def fold(self, packed_NTHC: Tensor) -> Partial:
        """Joins N packed partials in the order of the first dimension: the same inputs give the same bits.

        The result has memory of its own, whatever the packed ones lie in.
        """
        native = self._native if packed_NTHC.is_cpu else None
        if native is not None and native.can_run(packed_NTHC):
            return native(packed_NTHC)
        stacked = self.unpack(packed_NTHC)
        return merge_all(stacked.out_THD, stacked.lse_TH)

    def agree(self, comm: Comm) -> None:
        """Has all ranks fold in torch unless each has the compiled fold: the last bits of the two differ. For partials
        that lie on CPUs; all ranks call it at the same time, before they merge."""
        told_N1 = comm.all_gather(torch.tensor([self._native is not None]).long())
        has_native = [bool(told) for told in told_N1]
        if all(has_native):
            return
        if comm.rank == 0 and any(has_native):
            without = ", ".join(str(rank) for rank, has in enumerate(has_native) if not has)
            log.warning("no compiled fold of partials on rank %s, so all ranks use torch's (slower)", without)
        self._native = None

    @cached_property
    def _native(self) -> NativeFold | None:
        """Compiled only where partials lie on a CPU."""
        return NativeFold.load()


def split_heads(partial: Partial, num_parts: int, wire: Wire) -> Tensor:
    """The packed partial cut by heads, [parts, T, heads, C]; the identity fills the last part where H does not divide.

    `join_heads` is the inverse.
    """
    missing = -partial.lse_TH.shape[1] % num_parts
    if missing:
        out = F.pad(partial.out_THD, (0, 0, 0, missing))
        partial = Partial(out, F.pad(partial.lse_TH, (0, missing), value=float("-inf")))
    packed_THC = wire.pack(partial)
    return packed_THC.view(len(packed_THC), num_parts, -1, packed_THC.shape[2]).transpose(0, 1)


def join_heads(parts_NThC: Tensor, num_heads: int, wire: Wire) -> Partial:
    """The partial of `num_heads` heads whose parts lie along the first dimension, in memory of its own."""
    return wire.unpack(torch.cat(parts_NThC.unbind(), dim=1)[:, :num_heads])
