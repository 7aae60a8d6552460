"""Merge inside each node, then across nodes on rails, then inside the node again."""

import torch
from torch import Tensor

from longleaf.attention import Partial
from longleaf.comm import Groups
from longleaf.merge.all_gather import send_to_owners
from longleaf.merge.base import PartialCodec, join_heads, split_heads


class Hierarchy:
    """Only partials merged per node travel between nodes, and each rail carries its share of the heads.

    Heads are split into as many parts as there are full rails: on machines with more ranks than the smallest one, the
    extra ranks merge nothing. Each head is folded once per node and once per rail, always in rank order: the ranks of a
    rail fold the same tensors, so all ranks get the same bits.
    """

    def __init__(self, groups: Groups, wire: PartialCodec) -> None:
        self._groups = groups
        self._wire = wire
        self._num_parts = len(groups.topology.full_rails) or groups.world.world_size

    def to_all(self, partial: Partial) -> Partial:
        groups, wire = self._groups, self._wire
        parts = self._for_node(split_heads(partial, self._num_parts, wire))
        mine = wire.pack(wire.fold(groups.node.all_to_all(parts)))
        if groups.rail is not None:
            mine = wire.pack(wire.fold(groups.rail.all_gather(mine)))
        return join_heads(groups.node.all_gather(mine)[: self._num_parts], partial.lse_TH.shape[1], wire)

    def to_owner(self, partial: Partial) -> Partial:
        groups, wire = self._groups, self._wire
        if groups.rail is None or not groups.topology.is_even:
            return send_to_owners(partial, groups.world, wire)
        num_ranks, num_nodes = groups.node.world_size, groups.rail.world_size
        # rows are sorted by node: first to the rank of this node that is on the owner's rail, then along the rail
        packed_THC = wire.pack(partial)
        shape = packed_THC.shape[1:]
        by_index = packed_THC.view(num_nodes, num_ranks, -1, *shape).transpose(0, 1).reshape(num_ranks, -1, *shape)
        return send_to_owners(wire.fold(groups.node.all_to_all(by_index)), groups.rail, wire)

    def _for_node(self, parts: Tensor) -> Tensor:
        """The parts, padded with unused parts for ranks that merge none."""
        missing = self._groups.node.world_size - len(parts)
        return torch.cat([parts, parts[:1].expand(missing, *parts.shape[1:])]) if missing else parts
