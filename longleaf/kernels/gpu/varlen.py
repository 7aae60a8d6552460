# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Sources of flash kernels: cuDNN and FlashAttention 2 through torch, flash-attn 2 and flash-attn 4.

FlashAttention 2 (arXiv 2307.08691), in torch from 2.5 on and in flash-attn from 2.6 on, has these rules
(csrc/flash_attn/flash_api.cpp and src/block_info.h there, aten/src/ATen/native/transformers/cuda/flash_attn in torch):

    types      float16 and bfloat16, the same for all three; products are summed up in float32, out is rounded to it
    dims       those of keys and values are equal, multiples of 8, at most 256
    heads      key heads divide query heads: groups are read where they lie
    strides    any, of multiples of 16 bytes, with the last dim contiguous: a pool [K, S, D] is a view
    sequence   its keys begin at cu_seqlens_k[i]; it has seqused_k[i] of them, whatever begins after it
    causal     from the bottom right: the last row sees the last key. Used for squares alone, where that is all the same
    lse        natural, float32, [heads, rows] without padding; +inf where nothing is seen or the sum is NaN

flash-attn 4 (CuTe DSL) takes the same arguments, but loads whole tiles of 128 keys: values beyond the last key of a
sequence must be finite, so it gets whole tiles only. cuDNN builds a plan for every number of rows and keys, and is
called for each read; its causal mask is from the top left. Both get regular shapes, see `varlen_plan.regular`.

On AMD's GPUs torch runs other kernels, with an lse that is padded and without seqused_k: they are refused.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from longleaf.attention.masks import Read

TYPES = (torch.float16, torch.bfloat16)
MAX_DIM = 256
MAX_REGULAR_DIM = 128
"""Maximum dim of cuDNN and flash-attn 4, which support larger ones on few GPUs."""
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
    reads: Sequence[Read] = ()
    """The same sequences on the host, without empty ones, in the order of their rows."""


Varlen = Callable[[Tensor, Tensor, Tensor, Launch, float], tuple[Tensor, Tensor]]
"""Queries [T, H, D], keys and values [S, K, D], what sees what, scale: out [T, H, D] of the queries' type and with
their order of strides, lse [H, T]. Both hold anything in rows whose sequence has no keys."""


class FlashSource(NamedTuple):
    """Flash kernels, and their limits."""

    kernel: Varlen
    max_dim: int = MAX_DIM
    needs_regular_shapes: bool = False
    """Whether they get only the numbers of rows and keys of `varlen_plan.regular`."""


def cudnn_kernel(q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, launch: Launch, scale: float) -> tuple[Tensor, Tensor]:
    """cuDNN's attention, called for each read."""
    parts: list[tuple[Tensor, Tensor]] = []
    for read in launch.reads:
        rows, slots = slice(read.row_start, read.row_end), slice(read.slot_start, read.slot_end)
        # plans depend on strides: those of a part of the rows would differ for every number of rows of a chunk
        q_RHD = q_THD if _is_whole(read, q_THD) else q_THD[rows].contiguous()
        q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q_RHD, k_SKD[slots], v_SKD[slots]))
        out, lse = cudnn_attention(q, k, v, launch.is_causal, scale)
        parts.append((out.squeeze(0).transpose(0, 1), lse.view(lse.shape[1:3])))
    out_THD = torch.empty_like(q_THD)
    if len(parts) == 1 and parts[0][0].shape == q_THD.shape and parts[0][0].stride() == out_THD.stride():
        return parts[0]
    lse_HT = q_THD.new_empty(q_THD.shape[1::-1], dtype=torch.float32)
    for read, (out_RHD, lse_HR) in zip(launch.reads, parts, strict=True):
        out_THD[read.row_start : read.row_end] = out_RHD
        lse_HT[:, read.row_start : read.row_end] = lse_HR
    return out_THD, lse_HT


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Out [1, H, R, D] and lse [1, H, R] or [1, H, R, 1] of queries [1, H, R, D], keys and values [1, K, S, D]."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, is_causal, False, scale=scale
    )
    return out, lse


def _is_whole(read: Read, q_THD: Tensor) -> bool:
    """Whether all rows are in this read."""
    return read.row_end - read.row_start == len(q_THD)


def cudnn() -> FlashSource:
    """cuDNN's attention. Raises ImportError where this torch lacks it, or the GPU is too old."""
    if torch.version.hip or not torch.backends.cudnn.is_available():
        raise ImportError("this torch has no cuDNN")
    return FlashSource(cudnn_kernel, MAX_REGULAR_DIM, needs_regular_shapes=True)


def aten_kernel(q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, launch: Launch, scale: float) -> tuple[Tensor, Tensor]:
    """FlashAttention 2 of torch, called as `varlen_attn` does, but without its zeros for a random state."""
    places = (launch.bounds, launch.starts, launch.max_rows, launch.max_keys)
    out_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
        q_THD, k_SKD, v_SKD, *places, 0.0, launch.is_causal, False, scale=scale, seqused_k=launch.lengths
    )
    return out_THD, lse_HT


def public_kernel() -> FlashSource:
    """The same kernel by its public name, as a fallback for `aten_kernel`. Raises ImportError if it lacks seqused_k:
    torch 2.11 does, 2.13 has it."""
    if "seqused_k" not in signature(varlen_attn).parameters:
        raise ImportError(f"varlen_attn of torch {torch.__version__} knows no seqused_k")
    return FlashSource(call_public)


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


def flash_attn() -> FlashSource:
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

    return FlashSource(run)


def flash_attn_4() -> FlashSource:
    """The kernel of flash-attn 4, compiled at its first call. Raises ImportError, or the exception of its import."""
    forward: Any = import_module("flash_attn.cute").flash_attn_varlen_func

    def run(q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, launch: Launch, scale: float) -> tuple[Tensor, Tensor]:
        out_THD, lse_HT, *_ = forward(
            *(q_THD, k_SKD, v_SKD),
            cu_seqlens_q=launch.bounds,
            cu_seqlens_k=launch.starts,
            seqused_k=launch.lengths,
            max_seqlen_q=launch.max_rows,
            max_seqlen_k=launch.max_keys,
            softmax_scale=scale,
            causal=launch.is_causal,
            return_lse=True,
        )
        return out_THD, lse_HT

    return FlashSource(run, MAX_REGULAR_DIM, needs_regular_shapes=True)


SOURCES: dict[str, Callable[[], FlashSource]] = {
    "flash-attn 4": flash_attn_4,
    "cuDNN": cudnn,
    "flash-attn": flash_attn,
    "torch": lambda: FlashSource(aten_kernel),
    "torch's varlen_attn": public_kernel,
}
"""By name."""


def can_take(q_THD: Tensor, k_KSD: Tensor, v_KSV: Tensor, max_dim: int = MAX_DIM) -> bool:
    """Whether kernels with this maximum dim support such tensors."""
    tensors, dim = (q_THD, k_KSD, v_KSV), q_THD.shape[2]
    is_typed = q_THD.dtype in TYPES and q_THD.dtype == k_KSD.dtype == v_KSV.dtype
    return is_typed and dim == v_KSV.shape[2] and dim <= max_dim and all(map(is_aligned, tensors))


def is_aligned(tensor: Tensor) -> bool:
    """Whether rows of the last dim are contiguous and start at multiples of 16 bytes. Torch's allocations are
    aligned."""
    steps = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return tensor.stride(-1) == 1 and all(step % ALIGNED == 0 for step in steps)
