"""The compiled fold of CPU ranks, from fold.c: merges packed partials in one pass."""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from longleaf import c_extension
from longleaf.attention.partial import Partial

SOURCE = Path(__file__).with_name("fold.c")
# no fast-math: the identity's lse is infinite. No fused multiply-add: ranks on processors with and without it must get
# the same bits.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off")


class NativeFold:
    """`merge_all` of packed float32 partials; replaces about ten small torch operations by one call."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = library.longleaf_fold
        self._run.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_long] * 3
        self._run.restype = None

    @staticmethod
    def load() -> "NativeFold":
        """The fold, compiled at the first call on this kind of processor. Raises OSError, as where there is no C
        compiler."""
        return NativeFold(c_extension.load(SOURCE, FLAGS))

    def can_run(self, packed_NTHC: Tensor) -> bool:
        """Whether the tensor is float32 and contiguous."""
        return packed_NTHC.dtype == torch.float32 and packed_NTHC.is_contiguous()

    def __call__(self, packed_NTHC: Tensor) -> Partial:
        """Merges N partials in rank order, with values and natural-log lse adjacent in C = D + 1 columns.

        Inputs are in CPU memory; the result has separate memory. Within 2e-6 of float64; an empty row stays the
        identity.
        """
        num_partials, num_rows, num_heads, columns = packed_NTHC.shape
        out_THD = packed_NTHC.new_empty(num_rows, num_heads, columns - 1)
        lse_TH = packed_NTHC.new_empty(num_rows, num_heads)
        tensors = (packed_NTHC, out_THD, lse_TH)
        self._run(*(tensor.data_ptr() for tensor in tensors), num_partials, num_rows * num_heads, columns - 1)
        return Partial(out_THD, lse_TH)
