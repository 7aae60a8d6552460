"""The compiled decode kernel of CPU ranks: attention of few query rows over all reads of a layer, from decode.c."""

import ctypes
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from longleaf import native
from longleaf.attention.masks import Read, Reads
from longleaf.attention.partial import Partial

SOURCE = Path(__file__).with_name("decode.c")
# fast-math vectorises dot products and exponentials. It is for the compiler alone: a library that is also *linked* with
# it flushes denormals to zero in the whole process that loads it.
FLAGS = ("-O3", "-march=native", "-ffast-math")
LANES = 8
"""The kernel computes so many columns at once: dims must be multiples."""
MAX_ROWS = 512
"""Rows per key head of a layer from which on torch's matrix products are faster on one thread."""

log = logging.getLogger(__name__)


class NativeDecode:
    """Reads of few query rows over float32 or int8 keys, on the calling thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = library.longleaf_decode
        self._run.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_long] * 8 + [ctypes.c_float] * 2
        self._run.restype = None
        self._run_int8 = library.longleaf_decode_int8
        self._run_int8.argtypes = [ctypes.c_void_p] * 9 + [ctypes.c_long] * 9 + [ctypes.c_float] * 2
        self._run_int8.restype = None
        self._scratch_size = library.longleaf_scratch_size
        self._scratch_size.argtypes = [ctypes.c_long] * 2
        self._scratch_size.restype = ctypes.c_long

    @staticmethod
    def load() -> "NativeDecode | None":
        """The kernel, compiled at the first call on this kind of processor; None where there is no C compiler."""
        try:
            return NativeDecode(native.load(SOURCE, FLAGS))
        except OSError as error:
            log.warning("no compiled decode kernel, torch's own is used instead (slower): %s", error)
            return None

    def can_run(self, q_THD: Tensor, k_KSD: Tensor, v_KSD: Tensor) -> bool:
        """Whether rows are few, numbers float32, and queries, keys and values lie as the kernel expects."""
        (num_tokens, num_heads, dim), num_kv_heads = q_THD.shape, k_KSD.shape[0]
        rows = num_tokens * (num_heads // num_kv_heads)
        is_in_place = k_KSD.stride()[1:] == (dim, 1) and k_KSD.stride() == v_KSD.stride() and q_THD.stride(2) == 1
        is_float32 = q_THD.dtype == k_KSD.dtype == torch.float32
        is_alike = is_float32 and k_KSD.shape == v_KSD.shape
        return is_alike and is_in_place and dim % LANES == 0 and rows * torch.get_num_threads() <= MAX_ROWS

    def __call__(
        self,
        q_THD: Tensor,
        k_KSD: Tensor,
        v_KSD: Tensor,
        reads: Sequence[Read],
        scale: float,
        softcap: float | None = None,
    ) -> Partial:
        """The partial over all reads; rows without a read give the identity."""
        results, sizes = self._prepare(q_THD, k_KSD, reads)
        tensors = (q_THD, k_KSD, v_KSD, *results)
        self._run(*(tensor.data_ptr() for tensor in tensors), *sizes, scale, softcap or 0.0)
        return Partial(*results[:2])

    def can_run_int8(self, q_THD: Tensor, num_kv_heads: int) -> bool:
        """Whether rows are few, and columns as many as the kernel computes at once."""
        num_tokens, num_heads, dim = q_THD.shape
        rows = num_tokens * (num_heads // num_kv_heads)
        return q_THD.is_cpu and dim % LANES == 0 and rows * torch.get_num_threads() <= MAX_ROWS

    def over_int8(
        self,
        q_THD: Tensor,
        stored: tuple[Tensor, Tensor, Tensor, Tensor],
        block_size: int,
        reads: Sequence[Read],
        scale: float,
        softcap: float | None = None,
    ) -> Partial:
        """The same over `stored` keys and values [K, S, D] int8, exponents [K, B, D] int8 and scales [K, S] float32,
        all contiguous; see `longleaf.attention.quantized`. Queries may be of any floating type."""
        q_THD = q_THD.float().contiguous()
        results, sizes = self._prepare(q_THD, stored[0], reads)
        tensors = (q_THD, *stored, *results)
        self._run_int8(*(tensor.data_ptr() for tensor in tensors), *sizes, block_size, scale, softcap or 0.0)
        return Partial(*results[:2])

    def _prepare(
        self, q_THD: Tensor, k_KSD: Tensor, reads: Sequence[Read]
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], tuple[int, ...]]:
        """Out, lse, room to compute in and the table of reads; then the sizes that the kernel is told."""
        (num_tokens, num_heads, dim), num_kv_heads = q_THD.shape, k_KSD.shape[0]
        group = num_heads // num_kv_heads
        table = reads.table if isinstance(reads, Reads) else Reads(reads).table
        out_THD = q_THD.new_empty(num_tokens, num_heads, dim)
        lse_TH = q_THD.new_empty(num_tokens, num_heads)
        scratch = q_THD.new_empty(self._scratch_size(num_tokens * group, dim))
        sizes = (len(table), num_tokens, num_kv_heads, group, dim, *q_THD.stride()[:2], k_KSD.stride(0))
        return (out_THD, lse_TH, scratch, table), sizes
