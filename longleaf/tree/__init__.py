"""The merges: how partials of all ranks become one result. Queries travel; keys and values never move."""

from longleaf.comm import Comm
from longleaf.config import MergeName
from longleaf.tree.base import Merge
from longleaf.tree.gather import Gather
from longleaf.tree.paper import Paper

__all__ = ["Gather", "Merge", "Paper", "make_merge"]


def make_merge(name: MergeName, comm: Comm) -> Merge:
    """The merge called `name` over `comm`."""
    merges: dict[MergeName, type[Gather] | type[Paper]] = {"gather": Gather, "paper": Paper}
    return merges[name](comm)
