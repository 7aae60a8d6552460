"""Merge by one packed all-to-all over heads, a local fold, and an all-gather of the merged heads.

Source of the idea: Helix Parallelism (arXiv 2507.07120), where each rank merges a share of the query heads.
"""

from longleaf.attention import Partial
from longleaf.comm import Groups
from longleaf.merge.all_gather import send_to_owners
from longleaf.merge.base import PartialCodec, join_heads, split_heads


class AllToAllMerge:
    """Two collectives whose bytes per rank do not grow with the number of ranks. Each head is folded on a single rank,
    so all ranks get bitwise equal results."""

    def __init__(self, groups: Groups, wire: PartialCodec) -> None:
        self._comm = groups.world
        self._wire = wire

    def to_all(self, partial: Partial) -> Partial:
        comm, wire = self._comm, self._wire
        mine = wire.fold(comm.all_to_all(split_heads(partial, comm.world_size, wire)))
        return join_heads(comm.all_gather(wire.pack(mine)), partial.lse_TH.shape[1], wire)

    def to_owner(self, partial: Partial) -> Partial:
        return send_to_owners(partial, self._comm, self._wire)
