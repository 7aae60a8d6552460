"""The compiled reduction of block attribution reports on CPU ranks, from block_attribution.c."""

import ctypes
from pathlib import Path

from torch import Tensor

from longleaf import c_extension
from longleaf.attention.block_attribution import AttributionColumns

SOURCE = Path(__file__).with_name("block_attribution.c")
FLAGS = ("-O3", "-march=native")


class NativeBlockAttribution:
    """Attention shares of rows on columns; replaces about twenty small torch operations by one call."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = library.longleaf_add_shares
        self._run.argtypes = [ctypes.c_void_p] * 9 + [ctypes.c_long] * 7
        self._run.restype = None

    @staticmethod
    def load() -> "NativeBlockAttribution":
        """Compiled at the first call on this kind of processor. Raises OSError, for instance without a C compiler."""
        return NativeBlockAttribution(c_extension.load(SOURCE, FLAGS))

    def __call__(
        self,
        reported_KE2: Tensor,
        lse_TH: Tensor,
        sink_H: Tensor | None,
        columns: AttributionColumns,
        found: tuple[Tensor, Tensor, Tensor],
        *,
        sink_column: int,
        first_head: int,
    ) -> None:
        """Implements `AttributionBackend.add_shares`."""
        (num_averages, num_columns), num_kv_heads = found[0].shape, len(reported_KE2)
        lse_TH, sink_H = lse_TH.contiguous(), sink_H if sink_H is None else sink_H.float().contiguous()
        room_N = found[0].new_empty(num_columns)
        tensors = (reported_KE2, lse_TH, sink_H, columns.runs, columns.rows, *found, room_N)
        sizes = (reported_KE2.shape[1], num_averages, num_kv_heads, lse_TH.shape[1] // num_kv_heads)
        places = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        self._run(*places, *sizes, num_columns, sink_column, first_head)
