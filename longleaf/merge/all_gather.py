"""Merge by one packed exchange and a local fold: all-gather for rows of all ranks, all-to-all for owned rows."""

from longleaf.attention import Partial
from longleaf.comm import Comm, Groups
from longleaf.merge.base import PartialCodec


class AllGatherMerge:
    """One collective per merge. Every rank folds the same tensors in the same order, so all get the same bits."""

    def __init__(self, groups: Groups, wire: PartialCodec) -> None:
        self._comm = groups.world
        self._wire = wire

    def to_all(self, partial: Partial) -> Partial:
        return self._wire.fold(self._comm.all_gather(self._wire.pack(partial)))

    def to_owner(self, partial: Partial) -> Partial:
        return send_to_owners(partial, self._comm, self._wire)


def send_to_owners(partial: Partial, comm: Comm, wire: PartialCodec) -> Partial:
    """Sends each rank its rows (there is one group of rows per rank) in one all-to-all, and folds them there."""
    packed_THC = wire.pack(partial)
    return wire.fold(comm.all_to_all(packed_THC.view(comm.world_size, -1, *packed_THC.shape[1:])))
