"""The compiled decode kernel of CPU ranks, from decode.c: attention of few query rows over all reads of a layer."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from longleaf import c_extension
from longleaf.attention.masks import Read, Reads
from longleaf.attention.partial import Partial
from longleaf.kernels.backend import Int8Layer

SOURCE = Path(__file__).with_name("decode.c")
# fast-math vectorises dot products and exponentials. It is a compiler flag only: a library that is also *linked* with
# it enables flush-to-zero of denormals in the whole process.
FLAGS = ("-O3", "-march=native", "-ffast-math")
LANES = 8
"""Number of columns that are computed at once. Head dims must be multiples of it."""
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Types of keys and values, as numbered in decode.c."""
INT8_TYPES = [torch.int8, torch.int8, torch.int8, torch.float32]
SIZE_TYPES = [ctypes.c_long] * 8 + [ctypes.c_void_p] + [ctypes.c_long] * 3
ATTRIBUTION_TYPES = [ctypes.c_void_p] * 2 + [ctypes.c_long]
MAX_ROWS = 512
"""Maximum rows per key head of a layer. With more rows, torch's matrix products are faster."""


class NativeDecode:
    """Attention of a few query rows over keys of 32, 16 or 8 bits, on torch's threads. Arithmetic and results are
    float32 for any type of queries and keys."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = library.longleaf_decode
        self._run.argtypes = [ctypes.c_void_p] * 7 + SIZE_TYPES + [ctypes.c_float] * 2 + ATTRIBUTION_TYPES
        self._run.restype = None
        self._run_int8 = library.longleaf_decode_int8
        self._run_int8.argtypes = [ctypes.c_void_p] * 9 + SIZE_TYPES + [ctypes.c_float] * 2 + ATTRIBUTION_TYPES
        self._run_int8.restype = None
        self._scratch_size = library.longleaf_scratch_size
        self._scratch_size.argtypes = [ctypes.c_long] * 5
        self._scratch_size.restype = ctypes.c_long
        self._num_parts = library.longleaf_num_parts
        self._num_parts.argtypes = [ctypes.c_void_p] + [ctypes.c_long] * 3
        self._num_parts.restype = ctypes.c_long
        self._start_threads = c_extension.find_openmp() or 0

    @staticmethod
    def load() -> "NativeDecode":
        """Loads the kernel, and compiles it if it is not cached for this type of processor. Raises OSError if that
        fails, for instance without a C compiler."""
        return NativeDecode(c_extension.load(SOURCE, FLAGS))

    def can_run(self, q_THD: Tensor, k_KSD: Tensor, v_KSD: Tensor) -> bool:
        """Whether there are few rows, and the kernel supports the types and strides."""
        shape, strides, dtype = k_KSD.shape, k_KSD.stride(), k_KSD.dtype
        if shape != v_KSD.shape or dtype != v_KSD.dtype or dtype not in KINDS:
            return False
        is_in_place = strides[1:] == (shape[2], 1) and strides == v_KSD.stride()
        is_here = k_KSD.is_cpu and v_KSD.is_cpu
        return is_in_place and is_here and self._can_take(q_THD, k_KSD)

    @staticmethod
    def _can_take(q_THD: Tensor, k_KSD: Tensor) -> bool:
        """Whether there are few query rows, with supported types and strides."""
        num_tokens, num_heads, dim = q_THD.shape
        rows = num_tokens * (num_heads // k_KSD.shape[0])
        is_alike = q_THD.is_cpu and q_THD.is_floating_point() and q_THD.stride(2) == 1 and dim == k_KSD.shape[2]
        return is_alike and dim % LANES == 0 and rows <= MAX_ROWS

    def __call__(
        self,
        q_THD: Tensor,
        k_KSD: Tensor,
        v_KSD: Tensor,
        reads: Sequence[Read],
        scale: float,
        softcap: float | None = None,
    ) -> Partial:
        """The partial over all reads; the identity for rows without a read."""
        q_THD = q_THD.float()
        results, sizes = self._prepare(q_THD, k_KSD, reads)
        tensors = (q_THD, k_KSD, v_KSD, *results)
        limits = (KINDS[k_KSD.dtype], scale, softcap or 0.0)
        self._run(*(tensor.data_ptr() for tensor in tensors), *sizes, *limits, *_attribution_arguments(reads, sizes))
        return Partial(*results[:2])

    def can_run_int8(self, q_THD: Tensor, layer: Int8Layer) -> bool:
        """Whether there are few rows, and the kernel for keys and values in 8 bits supports the types and strides."""
        tensors = layer[:4]
        types = [tensor.dtype for tensor in tensors]
        is_in_place = all(tensor.is_cpu and tensor.is_contiguous() for tensor in tensors)
        return types == INT8_TYPES and is_in_place and self._can_take(q_THD, layer.keys_KSD)

    def over_int8(
        self,
        q_THD: Tensor,
        layer: Int8Layer,
        reads: Sequence[Read],
        scale: float,
        softcap: float | None = None,
    ) -> Partial:
        """Attention over keys and values in 8 bits, otherwise like `__call__`."""
        q_THD = q_THD.float()
        results, sizes = self._prepare(q_THD, layer.keys_KSD, reads)
        tensors = (q_THD, *layer[:4], *results)
        limits = (layer.block_size, scale, softcap or 0.0)
        self._run_int8(
            *(tensor.data_ptr() for tensor in tensors), *sizes, *limits, *_attribution_arguments(reads, sizes)
        )
        return Partial(*results[:2])

    def _prepare(
        self, q_THD: Tensor, k_KSD: Tensor, reads: Sequence[Read]
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], tuple[int, ...]]:
        """Out, lse, scratch memory and the table of reads; then the size arguments of the kernel."""
        (num_tokens, num_heads, dim), num_kv_heads = q_THD.shape, k_KSD.shape[0]
        group = num_heads // num_kv_heads
        table = reads.table if isinstance(reads, Reads) else Reads(reads).table
        out_THD = q_THD.new_empty(num_tokens, num_heads, dim)
        lse_TH = q_THD.new_empty(num_tokens, num_heads)
        threads = torch.get_num_threads() if self._start_threads else 1
        parts = self._num_parts(table.data_ptr(), len(table), num_kv_heads, threads)
        if not parts:
            threads = parts = 1
        scratch = q_THD.new_empty(self._scratch_size(num_tokens * group, dim, num_kv_heads, threads, parts))
        sizes = (len(table), num_tokens, num_kv_heads, group, dim, *q_THD.stride()[:2], k_KSD.stride(0))
        return (out_THD, lse_TH, scratch, table), (*sizes, self._start_threads, threads, parts)


def _attribution_arguments(reads: Sequence[Read], sizes: Sequence[int]) -> tuple[int | None, int | None, int]:
    """Arguments of block attribution: the table of reads, the output for entries, and the number of entries per key
    head."""
    sums = reads.attributed if isinstance(reads, Reads) else None
    if sums is None:
        return None, None, 0
    _, _, num_kv_heads, group, *_ = sizes
    room_KE2 = sums.room(num_kv_heads, group)
    return sums.table.data_ptr(), room_KE2.data_ptr(), room_KE2.shape[1]
