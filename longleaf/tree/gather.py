"""Merge by one packed exchange and a local fold: all-gather for rows everybody needs, all-to-all for owned rows."""

from longleaf.attention import Partial, merge_all
from longleaf.comm import Comm
from longleaf.tree.base import pack


class Gather:
    """One collective per merge. Every rank folds the same tensors in the same order, so all get the same bits."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def merge(self, partial: Partial) -> Partial:
        packed_NTHD = self._comm.all_gather(pack(partial))
        return merge_all(packed_NTHD[..., :-1], packed_NTHD[..., -1])

    def merge_to_owner(self, partial: Partial) -> Partial:
        packed_THD = pack(partial)
        packed_NPHD = self._comm.all_to_all(packed_THD.view(self._comm.world_size, -1, *packed_THD.shape[1:]))
        return merge_all(packed_NPHD[..., :-1], packed_NPHD[..., -1])
