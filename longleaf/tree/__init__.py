"""The merges: how partials of all ranks become one result. Queries travel; keys and values never move."""

from longleaf.comm import Groups
from longleaf.config import MergeName
from longleaf.tree.base import Merge, Wire
from longleaf.tree.butterfly import Butterfly
from longleaf.tree.exchange import Exchange
from longleaf.tree.gather import Gather
from longleaf.tree.hierarchy import Hierarchy
from longleaf.tree.packed import Packed
from longleaf.tree.paper import Paper

__all__ = ["MERGES", "Merge", "Wire", "make_merge"]

MERGES = {
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
