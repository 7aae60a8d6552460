"""Attention over several reads: runs a single-read kernel for each read of a layer, and merges the partials."""

from collections.abc import Callable, Sequence

from torch import Tensor

from longleaf.attention.masks import Read
from longleaf.attention.partial import Partial, merge
from longleaf.kernels.backend import check_shapes

ReadKernel = Callable[[Tensor, Tensor, Tensor, Read, float, float | None], tuple[Tensor, Tensor]]
"""Queries [K, T, G, D], keys and values [K, S, D or V] of a read, the read, scale and soft cap. Returns out, and lse
without the last dimension, of its rows."""

EMPTY_LSE = -1e30
"""A logsumexp below this means that the row saw only masked keys."""


def attend(
    q_THD: Tensor,
    k_KSD: Tensor,
    v_KSV: Tensor,
    reads: Sequence[Read],
    scale: float,
    kernel: ReadKernel,
    softcap: float | None = None,
) -> Partial:
    """Runs `kernel` on each read and merges the results row by row. Rows without a read give the identity."""
    check_shapes(q_THD, k_KSD, v_KSV)
    (num_rows, num_heads, dim), num_kv_heads, value_dim = q_THD.shape, k_KSD.shape[0], v_KSV.shape[2]
    group = num_heads // num_kv_heads
    q_KTGD = q_THD.float().view(num_rows, num_kv_heads, group, dim).transpose(0, 1).contiguous()
    # heads of one key head are adjacent, so a merge over [K, T, G] is one over [tokens, heads]
    total = None
    for read in reads:
        if read.row_start >= read.row_end or read.slot_start >= read.slot_end:
            continue  # torch's kernel divides by the number of keys: an empty call crashes the process
        keys, values = (t[:, read.slot_start : read.slot_end] for t in (k_KSD, v_KSV))
        part = Partial(*kernel(q_KTGD[:, read.row_start : read.row_end], keys, values, read, scale, softcap))
        total = _add(total, part, read, num_rows)
    if total is None:
        return Partial.identity(num_rows, num_heads, value_dim, device=str(q_THD.device))
    out_THD = total.out_THD.transpose(0, 1).reshape(num_rows, num_heads, value_dim)
    return Partial(out_THD, total.lse_TH.transpose(0, 1).reshape(num_rows, num_heads))


def _add(total: Partial | None, part: Partial, read: Read, num_rows: int) -> Partial:
    """Merges the partial of a read's rows, [K, rows, G], into that of all rows, [K, T, G]."""
    is_whole = read.row_end - read.row_start == num_rows
    if is_whole:
        return part if total is None else merge(total, part)
    if total is None:
        kv_heads, _, group, dim = part.out_THD.shape
        out = part.out_THD.new_zeros(kv_heads, num_rows, group, dim)
        total = Partial(out, out.new_full((kv_heads, num_rows, group), float("-inf")))
    rows = slice(read.row_start, read.row_end)
    joined = merge(Partial(total.out_THD[:, rows], total.lse_TH[:, rows]), part)
    total.out_THD[:, rows] = joined.out_THD
    total.lse_TH[:, rows] = joined.lse_TH
    return total


def sanitise(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Sets rows without visible keys to the identity, whatever the kernel returned for them."""
    is_empty = lse < EMPTY_LSE
    return out.masked_fill(is_empty.unsqueeze(-1), 0.0), lse.masked_fill(is_empty, float("-inf"))
