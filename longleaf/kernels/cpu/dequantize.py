"""Compiled dequantization of weights on CPUs, from dequantize.c: one pass over the numbers."""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from longleaf import c_extension

SOURCE = Path(__file__).with_name("dequantize.c")
# no fast-math and no fused multiply-add: all processors must get the same bits
FLAGS = ("-O3", "-march=native", "-ffp-contract=off")
DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of the results."""


class NativeDequantize:
    """`(table[code] - zero) * scale` in float32, rounded once to float32 or bfloat16. Tensors are contiguous and in CPU
    memory; tables, scales and zeros are float32. Callers check the shapes.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, integer, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_long
        self._row_major = library.longleaf_dequantize
        self._row_major.argtypes = [pointer, integer, *[pointer] * 4, integer, *[long] * 4]
        self._words = library.longleaf_dequantize_words
        self._words.argtypes = [*[pointer] * 6, integer, *[long] * 2]
        self._transposed = library.longleaf_dequantize_transposed
        self._transposed.argtypes = [*[pointer] * 4, integer, *[long] * 3]
        for function in (self._row_major, self._words, self._transposed):
            function.restype = None

    @staticmethod
    def load() -> "NativeDequantize":
        """The functions, compiled at the first call on this kind of processor. Raises OSError, as where there is no C
        compiler."""
        return NativeDequantize(c_extension.load(SOURCE, FLAGS))

    def row_major(
        self,
        codes: Tensor,
        table: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        shape: tuple[int, int],
        block: tuple[int, int],
        dtype: torch.dtype,
    ) -> Tensor:
        """The weight [rows, columns] of codes of 8 bits (a table of 256), or of 4 bits, two per byte (a table of 16;
        columns and blocks are even). Each block has a scale, and maybe a zero; the last blocks may be smaller.
        """
        out = torch.empty(shape, dtype=dtype)
        is_packed = len(table) == 16
        num_blocks = -(-shape[0] // block[0]) * -(-shape[1] // block[1])
        assert codes.is_contiguous() and codes.nbytes * (1 + is_packed) == out.numel()
        assert all(each.is_contiguous() and each.numel() == num_blocks for each in (scales, zeros) if each is not None)
        tensors = (scales, zeros, out)
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        is_bfloat16 = dtype == torch.bfloat16
        self._row_major(codes.data_ptr(), is_packed, table.data_ptr(), *pointers, is_bfloat16, *shape, *block)
        return out

    def from_words(
        self,
        words: Tensor,
        shifts: Tensor | None,
        groups: Tensor,
        scales: Tensor,
        zeros: Tensor,
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> Tensor:
        """The weight [rows, columns], multiples of 8, of int32 words [columns / 8, rows], or [columns, rows / 8] with
        `shifts` of the eight rows. Scales and zeros are [groups, rows], and int32 `groups` are those of the columns.
        """
        out = torch.empty(shape, dtype=dtype)
        assert words.is_contiguous() and words.numel() * 8 == out.numel() and groups.shape == shape[1:]
        assert all(each.is_contiguous() and each.shape[1] == shape[0] for each in (scales, zeros))
        tensors = (words, shifts, groups, scales, zeros, out)
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        self._words(*pointers, dtype == torch.bfloat16, *shape)
        return out

    def transposed(self, codes: Tensor, table: Tensor, scales: Tensor, block: int, dtype: torch.dtype) -> Tensor:
        """The weight [..., columns, rows] of codes of 4 bits [..., rows, columns / 2], with a scale per block of
        columns, at most 64.
        """
        *lead, rows, num_bytes = codes.shape
        out = torch.empty(*lead, 2 * num_bytes, rows, dtype=dtype)
        assert codes.is_contiguous() and scales.is_contiguous() and scales.numel() * block == out.numel()
        for own, scale, found in zip(codes.flatten(0, -3), scales.flatten(0, -3), out.flatten(0, -3), strict=True):
            pointers = (own.data_ptr(), table.data_ptr(), scale.data_ptr(), found.data_ptr())
            self._transposed(*pointers, dtype == torch.bfloat16, rows, 2 * num_bytes, block)
        return out
