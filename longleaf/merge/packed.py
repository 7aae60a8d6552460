"""The paper's merge with its two sums packed into one: two dependent all-reduces instead of three."""

import torch

from longleaf.attention import Partial
from longleaf.attention.partial import weight
from longleaf.comm import Comm, Groups
from longleaf.merge.base import PartialCodec


class PackedMerge:
    """Maximum of the lse, then the sums of numerators and denominators together. Tolerance only, like `paper`."""

    def __init__(self, groups: Groups, wire: PartialCodec) -> None:
        del wire  # sums are float32: summing rounded numbers would be less accurate than rounding the result
        self._comm = groups.world

    def to_all(self, partial: Partial) -> Partial:
        max_TH = self._comm.all_reduce(partial.lse_TH, "max").clone()
        share_TH1 = weight(partial.lse_TH, max_TH)
        sums_THC = self._comm.all_reduce(torch.cat([partial.out_THD * share_TH1, share_TH1], dim=-1), "sum")
        return quotient(sums_THC[..., :-1], sums_THC[..., -1:], max_TH)

    def to_owner(self, partial: Partial) -> Partial:
        return own_rows(self.to_all(partial), self._comm)


def quotient(numerator_THD: torch.Tensor, denominator_TH1: torch.Tensor, max_TH: torch.Tensor) -> Partial:
    """The partial of sums that are scaled by exp(-max). All ranks empty: 0 / 0 would be NaN, and log 0 + -inf is the
    identity's lse already."""
    out_THD = numerator_THD / denominator_TH1.clamp_min(torch.finfo(torch.float32).tiny)
    return Partial(out_THD, max_TH + denominator_TH1.squeeze(-1).log())


def own_rows(merged: Partial, comm: Comm) -> Partial:
    """The P rows of this rank, of N * P merged rows."""
    num_rows = merged.lse_TH.shape[0] // comm.world_size
    return merged.rows(comm.rank * num_rows, (comm.rank + 1) * num_rows)
