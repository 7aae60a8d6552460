"""Merge algorithms: combine the partials of all ranks. Queries are sent; keys and values never move."""

from collections.abc import Sequence

from longleaf.comm import Groups
from longleaf.config import MergeName
from longleaf.merge.all_gather import AllGatherMerge
from longleaf.merge.all_to_all import AllToAllMerge
from longleaf.merge.autotune import AutotunedMerge, choose, reuse
from longleaf.merge.base import Merge, PartialCodec
from longleaf.merge.butterfly import Butterfly
from longleaf.merge.hierarchy import Hierarchy
from longleaf.merge.instrumented import CountedMerge
from longleaf.merge.packed import PackedMerge
from longleaf.merge.paper import PaperMerge
from longleaf.rank_protocol.group_messages import MergeTiming, TierMerge
from longleaf.topology import Topology

__all__ = ["MERGES", "AutotunedMerge", "CountedMerge", "Merge", "PartialCodec", "choose_merge", "make_merge", "tiers"]

MERGES: dict[MergeName, type[PaperMerge | PackedMerge | AllGatherMerge | AllToAllMerge | Hierarchy | Butterfly]] = {
    "paper": PaperMerge,
    "packed": PackedMerge,
    "gather": AllGatherMerge,
    "exchange": AllToAllMerge,
    "hierarchy": Hierarchy,
    "butterfly": Butterfly,
}


def make_merge(name: MergeName, groups: Groups, wire: PartialCodec) -> Merge:
    """The merge called `name` over an epoch's groups."""
    return MERGES[name](groups, wire)


def tiers(name: str, topology: Topology, rows: int = 0) -> TierMerge:
    """The algorithm of the merge called `name` inside the machines and between them, for up to `rows` rows.

    Only `hierarchy` merges partials inside a machine first; the others treat all ranks alike.
    """
    if len(topology.node_groups) == 1:
        return TierMerge(rows, inside="exchange" if name == "hierarchy" else name)
    if name != "hierarchy":
        return TierMerge(rows, between=name)
    has_several = any(len(ranks) > 1 for ranks in topology.node_groups)
    return TierMerge(rows, "exchange" if has_several else "", "gather")


def choose_merge(
    groups: Groups, wire: PartialCodec, num_heads: int, dim: int, device: str, timings: Sequence[MergeTiming] = ()
) -> AutotunedMerge:
    """The fastest merge for partials of this size, according to the measurements `timings` of another group, or else by
    measurement. On one machine `hierarchy` equals `exchange`."""
    is_tiered = bool(groups.topology.full_rails)
    merges = {name: merge(groups, wire) for name, merge in MERGES.items() if is_tiered or name != "hierarchy"}
    if timings:
        return reuse(timings, merges, groups, num_heads, dim, device)
    return choose(merges, groups, num_heads, dim, device)
