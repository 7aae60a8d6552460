"""The compiled product with weights of 8 and 4 bits equals the product with the dequantized weights."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from longleaf import c_extension
from longleaf.errors import StartError
from longleaf.kernels.cpu.linear import FLAGS
from longleaf.kernels.cpu.quantized_linear import MAX_ROWS, SOURCE, NativeQuantizedLinear, QuantizedLinear
from longleaf.kernels.quantized_matrix import NumberKind, QuantizedMatrix, join_inputs, join_outputs, pack, unpack

BOUND = 1e-6
"""Largest error relative to the sum of absolute terms. Weights are dequantized as by torch, so only the order of sums
in float32 differs: up to 2,000 terms in 32 partial sums round by 2^-24 each, and most of these errors cancel.
"""
Case = tuple[NumberKind, int, int, int, torch.dtype, int, bool]
"""Kind, outputs, inputs, group, type of scales, outputs per scale, and whether there are zero points."""
CASES: list[Case] = [
    ("float8", 200, 576, 128, torch.float32, 128, False),
    ("float8", 100, 333, 333, torch.bfloat16, 1, False),
    ("float8", 65, 40, 40, torch.float32, 65, False),
    ("int8", 100, 333, 37, torch.float32, 1, True),
    ("int8", 71, 256, 256, torch.bfloat16, 1, False),
    ("int4", 130, 576, 32, torch.float16, 1, True),
    ("int4", 131, 576, 64, torch.bfloat16, 1, False),
    ("int4", 64, 1024, 128, torch.bfloat16, 1, True),
    ("int4", 33, 96, 96, torch.float32, 1, False),
    ("int4", 70, 2048, 256, torch.float32, 1, False),
    ("float4", 70, 288, 32, torch.uint8, 1, False),
    ("float8", 71, 320, 64, torch.float32, 1, False),
    ("float8", 70, 192, 192, torch.bfloat16, 1, False),
    ("int4", 71, 256, 32, torch.bfloat16, 1, False),
    ("int4", 71, 384, 64, torch.bfloat16, 1, False),
    ("int4", 71, 384, 384, torch.float16, 1, False),
    ("float4", 71, 256, 32, torch.uint8, 1, False),
    ("float4", 71, 288, 16, torch.float8_e4m3fn, 1, False),
]


def matrix_of(case: Case, seed: int = 0) -> QuantizedMatrix:
    kind, num_out, num_in, group, scale_type, per_scale, has_zeros = case
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 256, (num_out, num_in), dtype=torch.uint8, generator=generator)
    if kind == "float8":
        numbers[(numbers & 127) == 127] = 3  # NaN
    if kind in ("int4", "float4"):
        numbers = pack(numbers & 15)
    grid = -(-num_out // per_scale), -(-num_in // group)
    if scale_type == torch.uint8:
        scales = torch.randint(110, 130, grid, dtype=torch.uint8, generator=generator)
    else:
        scales = (torch.rand(grid, generator=generator) + 0.01).to(scale_type)
    zeros = torch.randint(-8, 8, grid, dtype=torch.int8, generator=generator) if has_zeros else None
    rows = (torch.arange(num_out) // per_scale).to(torch.int32)
    divisor = 3.0 if scale_type == torch.float8_e4m3fn else 1.0
    return QuantizedMatrix(kind, numbers, scales, rows, group, zeros, divisor=divisor, has_groups=group < num_in)


@pytest.fixture(scope="module")
def kernel() -> NativeQuantizedLinear:
    return NativeQuantizedLinear.load()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_are_those_of_the_dequantized_weights(
    case: Case, dtype: torch.dtype, kernel: NativeQuantizedLinear
) -> None:
    matrix = matrix_of(case)
    weights, product = matrix.dequantize(), kernel.bind(matrix).in_float32
    x = torch.randn(MAX_ROWS, matrix.num_inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = x.clone()
    bias = torch.linspace(-1, 1, matrix.num_outputs)
    expected = functional.linear(x.double(), weights.double(), bias.double())
    terms = functional.linear(x.abs().double(), weights.abs().double(), bias.abs().double())
    whole = product(x, bias)
    for num_rows in range(1, MAX_ROWS + 1):
        found = product(x[:num_rows], bias)
        assert ((found - expected[:num_rows]).abs() <= BOUND * terms[:num_rows]).all()
        assert torch.equal(found, whole[:num_rows]), "the bits of a row depend on the rows beside it"
    assert torch.equal(x, before)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_dequantizes_as_torch(case: Case, kernel: NativeQuantizedLinear) -> None:
    matrix = matrix_of(case)
    expected = matrix.dequantize()
    found = kernel.bind(matrix).dequantize(0, matrix.num_outputs)
    if matrix.divisor == 1:
        assert torch.equal(found, expected)
    else:  # the kernel multiplies by the inverse
        assert torch.allclose(found, expected, rtol=2**-22, atol=0)
    assert torch.equal(kernel.bind(matrix).dequantize(5, 20), found[5:20])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, MAX_ROWS, MAX_ROWS + 1, 40])
def test_a_layer_computes_any_number_of_rows(
    dtype: torch.dtype, num_rows: int, kernel: NativeQuantizedLinear, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longleaf.kernels.cpu.quantized_linear.TILE_BYTES", 4 * 576 * 48)  # several tiles
    matrix = matrix_of(CASES[5])
    bias = torch.linspace(-1, 1, matrix.num_outputs).to(dtype)
    layer = QuantizedLinear(matrix, bias, dtype, kernel)
    x = torch.randn(2, num_rows, matrix.num_inputs, generator=torch.Generator().manual_seed(2)).to(dtype)
    found, weights = layer(x), matrix.dequantize()
    expected = functional.linear(x.double(), weights.double(), bias.double())
    terms = functional.linear(x.abs().double(), weights.abs().double(), bias.abs().double())
    bound = BOUND if dtype == torch.float32 else 2**-8  # the result has 8 bits, and so have the weights of a tile
    assert found.dtype == dtype and found.shape == expected.shape
    assert ((found - expected).abs() <= bound * terms).all()
    assert torch.equal(layer.weight, weights.to(dtype))


class Wrong(NativeQuantizedLinear):
    """A product that loses the last row."""

    def run(self, address: int, x_RI: Tensor, bias_O: Tensor | None, y_RO: Tensor) -> None:
        super().run(address, x_RI, bias_O, y_RO)
        y_RO[-1] = 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_wrong_product_ends_the_start(case: Case, kernel: NativeQuantizedLinear) -> None:
    matrix = matrix_of(case)
    kernel.check(matrix)
    with pytest.raises(StartError, match=r"^kernels: compiled is wrong on cpu: 1 rows times "):
        Wrong(c_extension.load(SOURCE, FLAGS)).check(matrix)


@pytest.mark.parametrize("num_inputs", [32, 96, 128, 160, 576])
def test_packed_numbers_are_unpacked(num_inputs: int) -> None:
    codes = torch.randint(0, 16, (5, num_inputs), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    packed = pack(codes)
    assert packed.shape == (5, num_inputs // 2)
    assert torch.equal(unpack(packed), codes)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_slices_have_the_weights_of_the_matrix(case: Case) -> None:
    matrix = matrix_of(case)
    weights = matrix.dequantize()
    ranges = [(3, 20), (25, 33)]
    some, rest = matrix.outputs(ranges), matrix.outputs([(20, 25)])
    assert torch.equal(some.dequantize(), joined(weights, ranges, 0))
    assert torch.equal(join_outputs([some, rest]).dequantize(), joined(weights, [*ranges, (20, 25)], 0))
    assert matrix.outputs([(0, 0)]).shape == (0, matrix.num_inputs)
    assert matrix.inputs([(0, 0)]).shape == (matrix.num_outputs, 0)
    unit = max(matrix.group if matrix.has_groups else 7, 32 if matrix.kind in ("int4", "float4") else 1)
    unit = 32 if not matrix.has_groups and matrix.kind == "int4" else unit
    if 3 * unit > matrix.num_inputs:
        return
    ranges = [(0, unit), (2 * unit, matrix.num_inputs)]
    some, rest = matrix.inputs([(unit, 2 * unit)]), matrix.inputs(ranges)
    assert torch.equal(rest.dequantize(), joined(weights, ranges, 1))
    assert torch.equal(join_inputs([some, rest]).dequantize(), joined(weights, [(unit, 2 * unit), *ranges], 1))
    if matrix.has_groups:
        with pytest.raises(ValueError, match="are not"):
            matrix.inputs([(0, unit // 2)])


def joined(weights: Tensor, ranges: list[tuple[int, int]], dim: int) -> Tensor:
    return torch.cat([weights.narrow(dim, start, end - start) for start, end in ranges], dim=dim)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (("int4", 8, 96, 48, torch.float32, 1, False), "groups of 48 inputs"),
        (("float4", 8, 128, 128, torch.float32, 1, False), "groups of 128 inputs"),
        (("int8", 8, 5000, 1, torch.float32, 1, False), "5,000 groups"),
    ],
)
def test_sizes_that_the_kernel_does_not_support_are_refused(case: Case, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        matrix_of(case).check()
