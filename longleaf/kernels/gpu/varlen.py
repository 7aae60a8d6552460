# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Flash kernels over sequences of several lengths, by whomever they are: torch's own, and flash-attn 2 where it is.

They are one kernel (arXiv 2307.08691), in torch from 2.5 on and in flash-attn from 2.6 on, and keep the same rules
(csrc/flash_attn/flash_api.cpp and src/block_info.h there, aten/src/ATen/native/transformers/cuda/flash_attn in torch):

    types      float16 and bfloat16, the same for all three; products are summed up in float32, out is rounded to it
    dims       those of keys and values are equal, multiples of 8, at most 256
    heads      key heads divide query heads: groups are read where they lie
    strides    any, of multiples of 16 bytes, with the last dim contiguous: a pool [K, S, D] is a view
    sequence   its keys begin at cu_seqlens_k[i]; it has seqused_k[i] of them, whatever begins after it
    causal     from the bottom right: the last row sees the last key. Used for squares alone, where that is all the same
    lse        natural, float32, [heads, rows] without padding; +inf where nothing is seen or the sum is NaN

On AMD's GPUs torch runs other kernels, with an lse that is padded and without seqused_k: they are refused.
"""

from collections.abc import Callable
from importlib import import_module
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

TYPES = (torch.float16, torch.bfloat16)
MAX_DIM = 256
ALIGNED = 8
"""Number of 16-bit values in 16 bytes."""


class Launch(NamedTuple):
    """A round on the device, N sequences, all int32; see `longleaf.kernels.gpu.varlen_plan`."""

    bounds: Tensor
    """[N + 1]"""
    starts: Tensor
    """[N + 1]"""
    lengths: Tensor
    """[N]"""
    max_rows: int
    max_keys: int
    is_causal: bool


Varlen = Callable[[Tensor, Tensor, Tensor, Launch, float], tuple[Tensor, Tensor]]
"""Queries [T, H, D], keys and values [S, K, D], what sees what, scale: out [T, H, D] of the queries' type and with
their strides, lse [H, T]. Both hold anything in rows whose sequence has no keys."""


def aten_kernel(q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, launch: Launch, scale: float) -> tuple[Tensor, Tensor]:
    """Torch's kernel, called as `varlen_attn` does, but without its zeros for a random state."""
    places = (launch.bounds, launch.starts, launch.max_rows, launch.max_keys)
    out_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
        q_THD, k_SKD, v_SKD, *places, 0.0, launch.is_causal, False, scale=scale, seqused_k=launch.lengths
    )
    return out_THD, lse_HT


def public_kernel() -> Varlen:
    """Torch's kernel by its public name, as a fallback for `aten_kernel`. Raises ImportError if it lacks seqused_k:
    torch 2.11 does, 2.13 has it."""
    if "seqused_k" not in signature(varlen_attn).parameters:
        raise ImportError(f"varlen_attn of torch {torch.__version__} knows no seqused_k")
    return call_public


def call_public(q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, launch: Launch, scale: float) -> tuple[Tensor, Tensor]:
    """Calls `torch.nn.attention.varlen.varlen_attn`."""
    found = varlen_attn(
        *(q_THD, k_SKD, v_SKD, launch.bounds, launch.starts, launch.max_rows, launch.max_keys),
        return_aux=AuxRequest(lse=True),
        scale=scale,
        window_size=(-1, 0 if launch.is_causal else -1),
        enable_gqa=True,
        seqused_k=launch.lengths,
    )
    return found[0], found[1]


def flash_attn() -> Varlen:
    """The kernel of flash-attn 2. Raises ImportError, or the exception of its import if it was built for another torch.

    Its public `flash_attn_varlen_func` lacks seqused_k, but the function that it calls has it.
    """
    forward: Any = import_module("flash_attn.flash_attn_interface")._flash_attn_varlen_forward

    def run(q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, launch: Launch, scale: float) -> tuple[Tensor, Tensor]:
        places = (launch.bounds, launch.starts, launch.max_rows, launch.max_keys)
        out_THD, lse_HT, *_ = forward(
            q_THD, k_SKD, v_SKD, *places, 0.0, scale, launch.is_causal, seqused_k=launch.lengths
        )
        return out_THD, lse_HT

    return run


SOURCES: dict[str, Callable[[], Varlen]] = {
    "flash-attn": flash_attn,
    "torch": lambda: aten_kernel,
    "torch's varlen_attn": public_kernel,
}
"""By name, in order of preference: a user who installs flash-attn wants it to be used."""


def can_take(q_THD: Tensor, k_KSD: Tensor, v_KSV: Tensor) -> bool:
    """Whether the kernels support such tensors."""
    tensors, dim = (q_THD, k_KSD, v_KSV), q_THD.shape[2]
    is_typed = q_THD.dtype in TYPES and q_THD.dtype == k_KSD.dtype == v_KSV.dtype
    return is_typed and dim == v_KSV.shape[2] and dim <= MAX_DIM and all(map(is_aligned, tensors))


def is_aligned(tensor: Tensor) -> bool:
    """Whether rows of the last dim are contiguous and start at multiples of 16 bytes. Torch's allocations are
    aligned."""
    steps = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return tensor.stride(-1) == 1 and all(step % ALIGNED == 0 for step in steps)
