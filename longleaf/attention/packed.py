"""The packed form of partials: out and lse in one tensor, so that one exchange carries both.

float32: [..., D + 1]. bfloat16: [..., D + 2]; the lse keeps its 32 bits, as two columns. Each hop rounds the values to
8 bits of mantissa, a relative error of at most 2^-8. The dtype of a packed tensor determines the form.

Shape letters: T rows, H heads, D dim, C columns.
"""

import torch
from torch import Tensor

from longleaf.attention.partial import Partial


def pack(partial: Partial, dtype: torch.dtype) -> Tensor:
    """The packed partial, [T, H, C] of a dtype."""
    lse_TH1 = partial.lse_TH.unsqueeze(-1)
    if dtype == torch.float32:
        return torch.cat([partial.out_THD, lse_TH1], dim=-1)
    return torch.cat([partial.out_THD.to(dtype), lse_TH1.view(dtype)], dim=-1)


def unpack(packed: Tensor) -> Partial:
    """The partial, or several of them along leading dimensions."""
    if packed.dtype == torch.float32:
        return Partial(packed[..., :-1], packed[..., -1])
    lse = packed[..., -2:].contiguous().view(torch.float32).squeeze(-1)
    return Partial(packed[..., :-2].float(), lse)


def num_columns(dim: int, dtype: torch.dtype) -> int:
    """C of a packed row of `dim` values."""
    return dim + torch.float32.itemsize // dtype.itemsize
