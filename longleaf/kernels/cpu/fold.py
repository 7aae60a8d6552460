"""The compiled fold of CPU ranks: packed partials joined in one pass, from fold.c."""

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
    """`merge_all` of packed float32 partials, some ten small torch operations in one call."""

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
        """Whether the numbers are float32 and lie together."""
        return packed_NTHC.dtype == torch.float32 and packed_NTHC.is_contiguous()

    def __call__(self, packed_NTHC: Tensor) -> Partial:
        """The N partials, values and natural-log lse side by side in C = D + 1 columns, joined in rank order.

        They lie in the CPU's memory, the result in memory of its own. Within 2e-6 of float64; an empty row stays the
        identity.
        """
        num_partials, num_rows, num_heads, columns = packed_NTHC.shape
        out_THD = packed_NTHC.new_empty(num_rows, num_heads, columns - 1)
        lse_TH = packed_NTHC.new_empty(num_rows, num_heads)
        tensors = (packed_NTHC, out_THD, lse_TH)
        self._run(*(tensor.data_ptr() for tensor in tensors), num_partials, num_rows * num_heads, columns - 1)
        return Partial(out_THD, lse_TH)
