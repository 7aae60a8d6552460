"""The compiled decode kernel of CPU ranks: attention of few query rows, from decode.c."""

import ctypes
import logging
from pathlib import Path

import torch
from torch import Tensor

from longleaf import native

SOURCE = Path(__file__).with_name("decode.c")
# fast-math vectorises dot products and exponentials. It is for the compiler alone: a library that is also *linked* with
# it flushes denormals to zero in the whole process that loads it.
FLAGS = ("-O3", "-march=native", "-ffast-math")
MAX_ROWS = 8
"""From here on torch's matrix products are as fast."""

log = logging.getLogger(__name__)


class NativeDecode:
    """Full reads of at most MAX_ROWS query rows per key head, in float32."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = library.longleaf_decode
        self._run.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_long] * 5 + [ctypes.c_float] * 2
        self._run.restype = None

    @staticmethod
    def load() -> "NativeDecode | None":
        """The kernel, compiled at the first call on this kind of processor; None where there is no C compiler."""
        try:
            return NativeDecode(native.load(SOURCE, FLAGS))
        except OSError as error:
            log.warning("no compiled decode kernel, torch's own is used instead (slower): %s", error)
            return None

    def can_run(self, q_KTGD: Tensor, k_KSD: Tensor, v_KSD: Tensor) -> bool:
        """Whether rows are few, numbers float32, and the heads, keys and values lie as the kernel expects."""
        rows, dim = q_KTGD.shape[1] * q_KTGD.shape[2], k_KSD.shape[2]
        is_in_place = k_KSD.stride()[1:] == (dim, 1) and k_KSD.stride() == v_KSD.stride()
        return rows <= MAX_ROWS and k_KSD.dtype == torch.float32 and is_in_place

    def __call__(
        self, q_KTGD: Tensor, k_KSD: Tensor, v_KSD: Tensor, scale: float, softcap: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """out [K, T, G, D] and natural-log lse [K, T, G], like the queries; S >= 1."""
        heads, num_rows, group, dim = q_KTGD.shape
        q_KTGD = q_KTGD.contiguous()
        out = torch.empty_like(q_KTGD)
        lse = q_KTGD.new_empty(heads, num_rows, group)
        tensors = (q_KTGD, k_KSD, v_KSD, out, lse)
        sizes = (heads, num_rows * group, dim, k_KSD.shape[1], k_KSD.stride(0))
        self._run(*(tensor.data_ptr() for tensor in tensors), *sizes, scale, softcap or 0.0)
        return out, lse
