"""The kernels of GPUs that decode steps launch, in torch's own operations: they read the same tables, and take
microseconds where Triton's interpreter takes milliseconds.

Shape letters as in `longleaf.kernels.gpu.device`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longleaf.attention import packed as packed_form
from longleaf.attention.partial import Partial, merge_all
from longleaf.kernels import int8
from longleaf.kernels.backend import Int8Layer
from longleaf.kernels.gpu.work_items import HEADER, ITEM, STRETCH, TOKEN


class ReferenceLauncher:
    """A longleaf.kernels.gpu.launch.Launcher on CPU tensors."""

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        KERNELS[kernel.fn.__name__](*args, constants)


def attend_items(table, q, k, v, out, lse, scale, cap, group, num_kv_heads, *rest) -> None:
    for head in range(num_kv_heads):
        _attend(table, q, k[head], v[head], out, lse, (scale, cap if rest[-1]["HAS_CAP"] else None, group, head))


def attend_items_int8(table, q, keys, values, exponents, scales, out, lse, scale, cap, group, num_kv_heads, *rest):
    constants = rest[-1]
    retained = [*(part.view(torch.int8) for part in (keys, values, exponents)), scales]
    for head in range(num_kv_heads):
        own_keys, own_values, own_exponents, own_scales = (part[head : head + 1] for part in retained)
        alone = Int8Layer(own_keys, own_values, own_exponents, own_scales, constants["BLOCK"])
        k_KSD, v_KSD = int8.read(alone, torch.arange(keys.shape[1]), torch.float32)
        _attend(table, q, k_KSD[0], v_KSD[0], out, lse, (scale, cap if constants["HAS_CAP"] else None, group, head))


def _attend(table: Tensor, q: Tensor, k_SD: Tensor, v_SV: Tensor, out: Tensor, lse: Tensor, options: Any) -> None:
    """All items for one key head."""
    scale, cap, group, head = options
    numbers = table.tolist()
    num_items, stretches_at = numbers[:2]
    for at in range(HEADER, HEADER + num_items * ITEM, ITEM):
        row_start, row_end, first, last, shift = numbers[at : at + ITEM]
        rows = torch.arange(row_start, row_end)
        tokens_R = rows // group
        q_RD = q[tokens_R, head * group + rows % group].float()
        scores, values = [torch.full((len(rows), 1), -torch.inf)], [torch.zeros(1, v_SV.shape[1])]
        for place in range(stretches_at + first * STRETCH, stretches_at + last * STRETCH, STRETCH):
            low, high, ahead, window = numbers[place : place + STRETCH]
            slots = torch.arange(low, high)
            distance_RS = ahead + tokens_R[:, None] - slots
            score_RS = q_RD @ k_SD[slots].float().T * scale
            score_RS = score_RS if cap is None else cap * torch.tanh(score_RS / cap)
            is_seen_RS = (distance_RS >= 0) & (distance_RS < window)
            scores.append(score_RS.masked_fill(~is_seen_RS, -torch.inf))
            values.append(v_SV[slots].float())
        score_RS = torch.cat(scores, dim=1)
        lse_R = torch.logsumexp(score_RS, dim=1)
        shares_RS = torch.exp(score_RS - lse_R.masked_fill(lse_R == -torch.inf, 0)[:, None])
        out[shift + rows, head], lse[shift + rows, head] = shares_RS @ torch.cat(values), lse_R


def fold_items(table, part_out, part_lse, out, lse, group, num_kv_heads, constants) -> None:
    numbers = table.tolist()
    tokens_at, shifts_at = numbers[2:4]
    num_heads = group * num_kv_heads
    heads = torch.arange(num_heads)
    for token in range(len(out)):
        start, end = numbers[tokens_at + token * TOKEN : tokens_at + token * TOKEN + 2]
        shifts = numbers[shifts_at + start : shifts_at + end]
        rows_H, kv_heads_H = token * group + heads % group, heads // group
        places = [(shift + rows_H, kv_heads_H) for shift in shifts]
        if places:
            outs_NTHV, lses_NTH = (torch.stack([part[at] for at in places])[:, None] for part in (part_out, part_lse))
            folded = merge_all(outs_NTHV, lses_NTH)
            out[token], lse[token] = folded.out_THD[0], folded.lse_TH[0]
        else:
            out[token], lse[token] = 0, -torch.inf


def store_tokens(slots, k, v, stored_keys, stored_values, *rest) -> None:
    stored_keys[:, slots] = k
    if rest[-1]["HAS_VALUES"]:
        stored_values[:, slots] = v


def store_int8(slots, k, v, keys, values, exponents, scales, *rest) -> None:
    int8.write(Int8Layer(keys, values, exponents, scales, rest[-1]["BLOCK"]), slots, k, v)


def pack_rows(out, lse, packed, *rest) -> None:
    packed.copy_(packed_form.pack(Partial(out, lse), packed.dtype))


def fold_packed(packed, out, lse, *rest) -> None:
    partials = packed_form.unpack(packed)
    folded = merge_all(partials.out_THD, partials.lse_TH)
    out.copy_(folded.out_THD)
    lse.copy_(folded.lse_TH)


KERNELS: dict[str, Callable[..., None]] = {
    kernel.__name__: kernel
    for kernel in (attend_items, attend_items_int8, fold_items, store_tokens, store_int8, pack_rows, fold_packed)
}
