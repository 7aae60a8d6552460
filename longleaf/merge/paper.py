"""Merge as in the paper: Tree Attention (arXiv 2408.04093), Algorithm 3, three dependent all-reduces. The baseline."""

from longleaf.attention import Partial
from longleaf.attention.partial import weight
from longleaf.comm import Groups
from longleaf.merge.base import PartialCodec
from longleaf.merge.packed import own_rows, quotient


class PaperMerge:
    """Maximum of the lse, then the sums of numerators and of denominators.

    The collective library determines the order of the sums, so results match within a tolerance, but not bitwise.
    """

    def __init__(self, groups: Groups, wire: PartialCodec) -> None:
        del wire  # sums are float32
        self._comm = groups.world

    def to_all(self, partial: Partial) -> Partial:
        max_TH = self._comm.all_reduce(partial.lse_TH, "max").clone()
        share_TH1 = weight(partial.lse_TH, max_TH)
        numerator_THD = self._comm.all_reduce(partial.out_THD * share_TH1, "sum").clone()
        return quotient(numerator_THD, self._comm.all_reduce(share_TH1, "sum"), max_TH)

    def to_owner(self, partial: Partial) -> Partial:
        return own_rows(self.to_all(partial), self._comm)
