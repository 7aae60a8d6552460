"""Merge as in the paper: Tree Attention (arXiv 2408.04093), Algorithm 3, three dependent all-reduces. The baseline."""

import torch

from longleaf.attention import Partial
from longleaf.attention.partial import weight
from longleaf.comm import Comm


class Paper:
    """Maximum of the lse, then the sums of numerators and of denominators.

    The order of the sums belongs to the collective library, so equal bits are not promised, only tolerance.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def merge(self, partial: Partial) -> Partial:
        max_TH = self._comm.all_reduce(partial.lse_TH, "max")
        share_TH1 = weight(partial.lse_TH, max_TH)
        numerator_THD = self._comm.all_reduce(partial.out_THD * share_TH1, "sum")
        denominator_TH1 = self._comm.all_reduce(share_TH1, "sum")
        # all ranks empty: 0 / 0 would be NaN, and log 0 + -inf is the identity's lse already
        out_THD = numerator_THD / denominator_TH1.clamp_min(torch.finfo(torch.float32).tiny)
        return Partial(out_THD, max_TH + denominator_TH1.squeeze(-1).log())

    def merge_to_owner(self, partial: Partial) -> Partial:
        num_rows = partial.lse_TH.shape[0] // self._comm.world_size
        start = self._comm.rank * num_rows
        return self.merge(partial).rows(start, start + num_rows)
