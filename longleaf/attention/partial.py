"""The partial: attention of queries over a subset of the keys, and the operation that merges two.

Shape letters: T tokens (query rows), H heads, D value dim, N partials.

Source: the associative, commutative operator of online softmax, as used in Tree Attention (arXiv 2408.04093, section
5). The derivation is in docs/math.md.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Partial:
    """`out_THD` is the softmax-weighted mean of the visible values, `lse_TH` the natural log of the sum of
    exponentials.

    Both are float32 (float64 in the reference), for keys of any dtype: other dtypes raise TypeError. A row without
    visible keys is the identity: out 0, lse -inf.
    """

    out_THD: Tensor
    lse_TH: Tensor

    def __post_init__(self) -> None:
        if self.out_THD.dtype not in WIDE or self.lse_TH.dtype not in WIDE:
            types = f"{self.out_THD.dtype} and {self.lse_TH.dtype}"
            raise TypeError(
                f"partials must be float32, not {types}: rounding before the merge makes its result inexact"
            )

    @staticmethod
    def identity(
        num_tokens: int, num_heads: int, dim: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> "Partial":
        """The partial over no keys: merging it changes nothing."""
        out = torch.zeros(num_tokens, num_heads, dim, dtype=dtype, device=device)
        lse = torch.full((num_tokens, num_heads), float("-inf"), dtype=dtype, device=device)
        return Partial(out, lse)

    def rows(self, start: int, end: int) -> "Partial":
        """The partial of query rows [start, end), as a view."""
        return Partial(self.out_THD[start:end], self.lse_TH[start:end])


def merge(a: Partial, b: Partial) -> Partial:
    """Merges two partials over disjoint keys, of the same shapes and dtype. Identity with identity stays identity.

    Associative and commutative up to rounding: in float32 within 2e-6 of float64, for logits of any size. The lse of
    the result is rounded to float32, so a second merge may be off by that rounding: half a unit in the last place, 4e-6
    for an lse of 100.
    """
    lse_TH = torch.logaddexp(a.lse_TH, b.lse_TH)
    # shares are computed from the difference, which is exact; relative to lse_TH they would include its rounding
    ahead_TH1 = _or_zero(a.lse_TH - b.lse_TH, lse_TH).unsqueeze(-1)
    return Partial(a.out_THD * torch.sigmoid(ahead_TH1) + b.out_THD * torch.sigmoid(-ahead_TH1), lse_TH)


def merge_all(out_NTHD: Tensor, lse_NTH: Tensor) -> Partial:
    """Merges N stacked partials in the order of the first dimension: same inputs, same bits."""
    lse_TH = torch.logsumexp(lse_NTH, dim=0)
    share_NTH1 = torch.softmax(_or_zero(lse_NTH, lse_TH), dim=0).unsqueeze(-1)
    return Partial((out_NTHD * share_NTH1).sum(dim=0), lse_TH)


def _or_zero(numbers: Tensor, total_TH: Tensor) -> Tensor:
    """The numbers, with 0 where the total is empty: -inf minus -inf would be NaN, and any share of out 0 is 0."""
    return numbers.masked_fill(total_TH == float("-inf"), 0.0)


def add_sink(partial: Partial, sink_H: Tensor) -> Partial:
    """Merges one more partial, of out 0 and lse `sink_H`: logits that take part in the softmax and have no value.

    A sink belongs to no key, so exactly one of the partials of a row must include it.
    """
    sink_H = sink_H.to(partial.lse_TH.dtype)
    lse_TH = torch.logaddexp(partial.lse_TH, sink_H)
    ahead_TH1 = _or_zero(partial.lse_TH - sink_H, lse_TH).unsqueeze(-1)
    return Partial(partial.out_THD * torch.sigmoid(ahead_TH1), lse_TH)


def weight(lse_TH: Tensor, total_TH: Tensor) -> Tensor:
    """Share exp(lse - total) of a partial in a total, trailing axis for the values; 0 where the total is empty."""
    # -inf minus -inf would be NaN: any finite total gives exp(-inf) = 0 instead
    total_TH = total_TH.masked_fill(total_TH == float("-inf"), 0.0)
    return torch.exp(lse_TH - total_TH).unsqueeze(-1)
