"""The contract of a merge, and the packed form in which partials travel.

Shape letters: N ranks, T rows, P rows per rank, H heads, D dim.
"""

from typing import Protocol

import torch
from torch import Tensor

from longleaf.attention import Partial


class Merge(Protocol):
    """Joins the partials of all ranks, always folding in rank order. Partials are float32, on the wire as well."""

    def merge(self, partial: Partial) -> Partial:
        """Every rank gives T rows over its own keys and gets all T rows over all keys."""
        ...

    def merge_to_owner(self, partial: Partial) -> Partial:
        """Every rank gives N * P rows, P per rank in rank order, and gets its own P rows over all keys."""
        ...


def pack(partial: Partial) -> Tensor:
    """out and lse as one tensor [T, H, D + 1], so that one exchange carries both."""
    return torch.cat([partial.out_THD, partial.lse_TH.unsqueeze(-1)], dim=-1)
