"""The compiled product of few rows with weights against float64, and its place in a model."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from longleaf import c_extension
from longleaf.errors import StartError
from longleaf.kernels.cpu.linear import FLAGS, KINDS, MAX_ROWS, SOURCE, FastLinear, NativeLinear, use_native_linear
from tests.support.attention.partials import seeds, torch_threads

PRODUCT = NativeLinear.load()
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
"""Largest error of a number of this type after a sum of float32, relative to the sum of the absolute terms."""


@settings(max_examples=200, deadline=None)
@given(
    seed=seeds,
    num_rows=st.integers(1, 8),
    num_in=st.one_of(st.integers(1, 200), st.sampled_from([576, 1536, 2048])),
    num_out=st.one_of(st.integers(1, 70), st.sampled_from([129, 576, 1000])),
    dtype=st.sampled_from(list(KINDS)),
    has_bias=st.booleans(),
    num_threads=st.integers(1, 4),
)
def test_products_of_all_shapes_are_those_of_float64(seed, num_rows, num_in, num_out, dtype, has_bias, num_threads):
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(n, num_in, generator=generator).to(dtype) for n in (num_rows, num_out))
    bias = torch.randn(num_out, generator=generator).to(dtype) if has_bias else None
    with torch_threads(num_threads):
        found = PRODUCT(x, w, bias)
    added = 0.0 if bias is None else bias.double()
    expected, terms = x.double() @ w.double().T + added, x.double().abs() @ w.double().abs().T + abs(added)
    assert found.dtype == dtype
    assert ((found.double() - expected).abs() <= ROUNDING[dtype] * terms).all()


@pytest.mark.parametrize("dtype", list(KINDS))
@pytest.mark.parametrize("num_in", [3, 64, 100, 576])
def test_bits_of_a_row_do_not_depend_on_the_rows_beside_it_nor_on_threads(dtype, num_in):
    x, w, bias = (torch.randn(shape).to(dtype) for shape in ((8, num_in), (1027, num_in), (1027,)))
    alone = torch.cat([PRODUCT(row[None], w, bias) for row in x])
    for num_rows in range(1, 9):
        for num_threads in (1, 3):
            with torch_threads(num_threads):
                assert torch.equal(PRODUCT(x[:num_rows], w, bias), alone[:num_rows])


@pytest.mark.parametrize("dtype", list(KINDS))
def test_rows_may_lie_anywhere(dtype):
    w, wide = torch.randn(5, 8).to(dtype), torch.randn(4, 24).to(dtype)
    for x in (wide[:, 8:16], wide[:1, :8].expand(4, 8), torch.randn(8, 4).to(dtype).t()):
        assert not x.is_contiguous()
        torch.testing.assert_close(PRODUCT(x, w, None), PRODUCT(x.contiguous(), w, None), atol=0, rtol=0)


@pytest.mark.parametrize("number", ["nan", "inf"])
@pytest.mark.parametrize("num_rows", [1, 2, 4, 8])
def test_non_finite_weight_reaches_its_output_only(num_rows, number):
    x, w = torch.rand(num_rows, 100) + 1, torch.randn(70, 100)
    w[33, 99] = float(number)
    found = PRODUCT(x, w, None)
    assert not found[:, 33].isfinite().any()
    assert found[:, :33].isfinite().all() and found[:, 34:].isfinite().all()


class Model(nn.Module):
    """Layers of all kinds, two of which share their weights."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64, dtype=dtype)
        self.layers = nn.ModuleList([nn.Linear(64, 64, dtype=dtype), nn.Linear(64, 64, bias=False, dtype=dtype)])
        self.special = Special(64, 64, dtype=dtype)
        self.head = nn.Linear(64, 50, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in (*self.layers, self.special):
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden)


class Special(nn.Linear):
    """A layer that computes something else."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


@pytest.mark.parametrize("dtype", list(KINDS))
@torch.inference_mode()
def test_model_with_compiled_products_computes_the_same(dtype):
    torch.manual_seed(0)
    model = Model(dtype)
    names = list(model.state_dict())
    inputs = [torch.randint(50, shape) for shape in ((1,), (1, 3), (2, 2), (1, MAX_ROWS[dtype] + 1), (0,))]
    expected = [model(ids) for ids in inputs]
    assert use_native_linear(model, PRODUCT) == 3
    assert type(model.special) is Special
    assert isinstance(model.head, FastLinear) and model.head.weight is model.embedding.weight
    assert list(model.state_dict()) == names
    for ids, wanted in zip(inputs, expected, strict=True):
        found = model(ids)
        assert (found.dtype, found.shape) == (dtype, wanted.shape)
        torch.testing.assert_close(found, wanted, atol=0.05 if dtype == torch.bfloat16 else 1e-5, rtol=0)
    assert use_native_linear(model, PRODUCT) == 0


def test_layers_with_hooks_of_other_types_or_elsewhere_are_left_alone():
    hooked, half = nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.float16)
    hooked.register_forward_hook(lambda *_: None)
    model = nn.Sequential(hooked, half, nn.Linear(8, 8, device="meta"), nn.Linear(8, 8, dtype=torch.float64))
    assert use_native_linear(model, PRODUCT) == 0


def test_gradients_are_those_of_torch():
    layer = nn.Linear(8, 8)
    FastLinear(layer, PRODUCT)(torch.randn(1, 8)).sum().backward()
    assert layer.weight.grad is not None


class Wrong(NativeLinear):
    """A product that loses the last row."""

    def __call__(self, x_RI, w_OI, bias_O):
        found = super().__call__(x_RI, w_OI, bias_O)
        found[-1] = 0
        return found


def test_wrong_product_ends_the_start():
    wrong = Wrong(c_extension.load(SOURCE, FLAGS))
    with pytest.raises(StartError, match=r"^kernels: compiled is wrong on cpu: 1 rows times weights of 5 x 8$"):
        use_native_linear(nn.Sequential(nn.Linear(8, 5)), wrong)


class WrongForThree(NativeLinear):
    """A product that is wrong for one number of rows."""

    def __call__(self, x_RI, w_OI, bias_O):
        return super().__call__(x_RI, w_OI, bias_O) + (len(x_RI) == 3)


@pytest.mark.parametrize("num_out", [5, 3000])
def test_product_is_checked_for_each_number_of_rows(num_out):
    wrong = WrongForThree(c_extension.load(SOURCE, FLAGS))
    with pytest.raises(StartError, match=rf"3 rows times weights of {num_out} x 8$"):
        use_native_linear(nn.Sequential(nn.Linear(8, num_out)), wrong)


def test_weights_that_are_nan_are_no_fault_of_the_product():
    layer = nn.Linear(8, 5)
    nn.init.constant_(layer.weight, torch.nan)
    assert use_native_linear(nn.Sequential(layer), PRODUCT) == 1
