"""The merges: how partials of all ranks become one result. Queries travel; keys and values never move."""

from longleaf.comm import Groups
from longleaf.config import MergeName
from longleaf.tree.base import Merge, Wire
from longleaf.tree.butterfly import Butterfly
from longleaf.tree.choose import Chosen, choose
from longleaf.tree.exchange import Exchange
from longleaf.tree.gather import Gather
from longleaf.tree.hierarchy import Hierarchy
from longleaf.tree.packed import Packed
from longleaf.tree.paper import Paper

__all__ = ["MERGES", "Chosen", "Merge", "Wire", "choose_merge", "make_merge"]

MERGES: dict[MergeName, type[Paper | Packed | Gather | Exchange | Hierarchy | Butterfly]] = {
    "paper": Paper,
    "packed": Packed,
    "gather": Gather,
    "exchange": Exchange,
    "hierarchy": Hierarchy,
    "butterfly": Butterfly,
}


def make_merge(name: MergeName, groups: Groups, wire: Wire) -> Merge:
    """The merge called `name` over an epoch's groups."""
    return MERGES[name](groups, wire)


def choose_merge(groups: Groups, wire: Wire, num_heads: int, dim: int, device: str) -> Chosen:
    """The fastest merge for partials of this size, by measurement. On one machine `hierarchy` is `exchange`."""
    is_tiered = bool(groups.topology.full_rails)
    merges = {name: merge(groups, wire) for name, merge in MERGES.items() if is_tiered or name != "hierarchy"}
    return choose(merges, groups, num_heads, dim, device)
