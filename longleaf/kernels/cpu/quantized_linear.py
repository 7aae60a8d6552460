"""The compiled product of few rows with weights of 8 or 4 bits, from quantized_linear.c."""

import ctypes
import itertools
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from longleaf import c_extension
from longleaf.errors import StartError
from longleaf.kernels.cpu.linear import FLAGS, MIN_WEIGHTS, TOLERANCE
from longleaf.kernels.quantized_matrix import QuantizedMatrix

SOURCE = Path(__file__).with_name("quantized_linear.c")
KINDS = {"float8": 0, "int8": 1, "int4": 2, "float4": 3}
SCALE_KINDS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.uint8: 4,
}
"""Types of numbers and of scales, as numbered in quantized_linear.c."""
MAX_ROWS = 8
"""Rows up to which the product is compiled. For more, dequantized weights are multiplied by torch."""
CHECKED_OUTPUTS = 65
"""Outputs of a matrix that a check compares: an odd number, because most products compute two at once."""
TILE_BYTES = 1 << 20
"""Size of the dequantized weights that are multiplied at once: they should remain in the cache."""


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("numbers", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("scale_rows", ctypes.c_void_p),
        ("out", ctypes.c_long),
        ("in", ctypes.c_long),
        ("group", ctypes.c_long),
        ("kind", ctypes.c_long),
        ("scale_kind", ctypes.c_long),
        ("factor", ctypes.c_float),
    )


class NativeQuantizedLinear:
    """Products of few rows with quantized weights, on torch's threads. Sums are float32."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = library.longleaf_quantized_linear
        self._run.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 2 + [ctypes.c_void_p, ctypes.c_long]
        self._run.restype = None
        self._takes_bfloat16 = library.longleaf_takes_bfloat16
        self._takes_bfloat16.argtypes = [ctypes.c_void_p]
        self._dequantize = library.longleaf_dequantize
        self._dequantize.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p]
        self._dequantize.restype = None
        self._start_threads = c_extension.find_openmp() or 0

    @staticmethod
    def load() -> "NativeQuantizedLinear":
        """Loads the kernel, and compiles it if it is not cached for this type of processor. Raises OSError if that
        fails, for instance without a C compiler."""
        return NativeQuantizedLinear(c_extension.load(SOURCE, FLAGS))

    def bind(self, matrix: QuantizedMatrix) -> "BoundMatrix":
        """The product with a matrix in CPU memory, whose tensors are contiguous."""
        return BoundMatrix(self, matrix)

    def check(self, matrix: QuantizedMatrix) -> None:
        """Raises StartError if products with a matrix differ from torch's by more than the order of sums."""
        some = matrix.outputs([(0, min(CHECKED_OUTPUTS, matrix.num_outputs))])
        weights_OI, product = some.dequantize(), self.bind(some)
        x_RI = torch.randn(MAX_ROWS, matrix.num_inputs, generator=torch.Generator().manual_seed(0)).bfloat16()
        expected = functional.linear(x_RI.float(), weights_OI)
        bound = TOLERANCE[torch.float32] * functional.linear(x_RI.float().abs(), weights_OI.abs())
        for dtype, num_rows in itertools.product((torch.float32, torch.bfloat16), range(1, MAX_ROWS + 1)):
            found = product.in_float32(x_RI[:num_rows].to(dtype), None)
            if not ((found - expected[:num_rows]).abs() <= bound[:num_rows]).all():
                shape = f"{matrix.num_outputs} x {matrix.num_inputs}"
                raise StartError(f"kernels: compiled is wrong on cpu: {num_rows} rows times {matrix.kind} of {shape}")

    def takes_bfloat16(self, address: int) -> bool:
        """Whether this processor multiplies inputs in bfloat16 with a matrix without converting them."""
        return bool(self._takes_bfloat16(address))

    def run(self, address: int, x_RI: Tensor, bias_O: Tensor | None, y_RO: Tensor) -> None:
        """Writes x w^T + bias. All tensors are contiguous and of float32; inputs may be of bfloat16 if
        `takes_bfloat16`, and are then overwritten."""
        is_large = x_RI.shape[1] * y_RO.shape[1] >= MIN_WEIGHTS and self._start_threads
        threads = torch.get_num_threads() if is_large else 1
        bias = None if bias_O is None else bias_O.data_ptr()
        is_half = x_RI.dtype == torch.bfloat16
        self._run(address, x_RI.data_ptr(), bias, y_RO.data_ptr(), len(x_RI), is_half, self._start_threads, threads)

    def dequantize(self, address: int, start: int, found_OI: Tensor) -> None:
        """Writes the weights of consecutive outputs, in float32."""
        self._dequantize(address, start, start + len(found_OI), found_OI.data_ptr())


class BoundMatrix:
    """Products with one matrix."""

    def __init__(self, kernel: NativeQuantizedLinear, matrix: QuantizedMatrix) -> None:
        self._kernel = kernel
        self._matrix = matrix
        """Keeps the tensors in memory."""
        zeros = None if matrix.zeros is None else matrix.zeros.data_ptr()
        self._shape = matrix.num_outputs, matrix.num_inputs
        self._struct = _Matrix(
            matrix.numbers.data_ptr(),
            matrix.scales.data_ptr(),
            zeros,
            matrix.scale_rows.data_ptr(),
            *self._shape,
            matrix.group,
            KINDS[matrix.kind],
            SCALE_KINDS[matrix.scales.dtype],
            matrix.factor / matrix.divisor,
        )
        self._address = ctypes.addressof(self._struct)
        self._takes_bfloat16 = kernel.takes_bfloat16(self._address)

    def __call__(self, x_RI: Tensor, bias_O: Tensor | None) -> Tensor:
        """x w^T + bias as [R, O], in the type of `x_RI`, of any number of rows. Activations are not rounded, and sums
        are float32."""
        return self.in_float32(x_RI, bias_O).to(x_RI.dtype)

    def in_float32(self, x_RI: Tensor, bias_O: Tensor | None) -> Tensor:
        """The same before it is rounded to the type of `x_RI`."""
        if self._takes_bfloat16 and x_RI.dtype == torch.bfloat16:
            x = x_RI.clone(memory_format=torch.contiguous_format)
        else:
            x = x_RI.float().contiguous()
        y_RO = torch.empty(len(x), self._shape[0])
        self._kernel.run(self._address, x, None if bias_O is None else bias_O.float(), y_RO)
        return y_RO

    def dequantize(self, start: int, end: int) -> Tensor:
        """The weights of outputs [start, end) in float32."""
        found_OI = torch.empty(end - start, self._shape[1])
        self._kernel.dequantize(self._address, start, found_OI)
        return found_OI


class QuantizedLinear(nn.Module):
    """A linear layer whose weights remain quantized in memory."""

    def __init__(
        self, matrix: QuantizedMatrix, bias: Tensor | None, dtype: torch.dtype, kernel: NativeQuantizedLinear
    ) -> None:
        """`dtype` is the type of the model, in which products of many rows are computed."""
        super().__init__()
        self.out_features, self.in_features = matrix.num_outputs, matrix.num_inputs
        self.matrix = matrix
        self.kernel = kernel
        self.dtype = dtype
        self.bias = bias
        self._product = kernel.bind(matrix)

    @property
    def weight(self) -> Tensor:
        """The dequantized weights, in the type of the model. Few models read them outside of the product."""
        return self._product.dequantize(0, self.out_features).to(self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        rows_RI = input.reshape(-1, self.in_features)
        multiply = self._product if len(rows_RI) <= MAX_ROWS else self._multiply_tiles
        return multiply(rows_RI, self.bias).view(*input.shape[:-1], self.out_features)

    def _multiply_tiles(self, x_RI: Tensor, bias_O: Tensor | None) -> Tensor:
        """The product with dequantized weights, of which a part exists at a time."""
        size = max(1, TILE_BYTES // (4 * self.in_features))
        y_RO = x_RI.new_empty(len(x_RI), self.out_features)
        for start in range(0, self.out_features, size):
            end = min(start + size, self.out_features)
            weights_OI = self._product.dequantize(start, end).to(x_RI.dtype)
            bias = None if bias_O is None else bias_O[start:end]
            y_RO[:, start:end] = functional.linear(x_RI, weights_OI, bias)
        return y_RO
