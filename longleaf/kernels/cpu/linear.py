"""The compiled product of few rows with the weights of a linear layer, from linear.c."""

import ctypes
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from longleaf import c_extension
from longleaf.errors import StartError

SOURCE = Path(__file__).with_name("linear.c")
# fast-math reorders sums, which vectorizes them. It is a compiler flag only (see decode.py).
FLAGS = ("-O3", "-march=native", "-ffast-math")
KINDS = {torch.float32: 0, torch.bfloat16: 1}
"""Types of weights, as numbered in linear.c."""
MAX_ROWS = {torch.float32: 8, torch.bfloat16: 4}
"""Rows up to which the kernel is faster than torch, at most 8."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Largest error of a product, relative to the sum of its absolute terms."""
CHECKED_TOGETHER = 1024
"""Outputs whose absolute weights a check holds at once."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
MIN_WEIGHTS = 1 << 16
"""Weights from which several threads are faster than one; waking them takes some microseconds."""


class NativeLinear:
    """Products of at most 8 rows with weights of 32 or 16 bits, on torch's threads. Sums are float32."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = library.longleaf_linear
        self._run.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 4 + [ctypes.c_void_p, ctypes.c_long]
        self._run.restype = None
        self._start_threads = c_extension.find_openmp() or 0

    @staticmethod
    def load() -> "NativeLinear":
        """Loads the kernel, and compiles it if it is not cached for this type of processor. Raises OSError if that
        fails, for instance without a C compiler."""
        return NativeLinear(c_extension.load(SOURCE, FLAGS))

    def __call__(self, x_RI: Tensor, w_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """x w^T + bias as [R, O], in the type of `x_RI`, for tensors in CPU memory of one type in `KINDS`, of which the
        weights and the bias are contiguous. Within 1e-6 of the sum of the absolute products, and the rounding.
        """
        (num_rows, num_in), num_out = x_RI.shape, w_OI.shape[0]
        x, bias = x_RI.float().contiguous(), None if bias_O is None else bias_O.float()
        y_RO = x.new_empty(num_rows, num_out)
        is_large = w_OI.numel() >= MIN_WEIGHTS and self._start_threads
        threads = torch.get_num_threads() if is_large else 1
        addresses = (w_OI.data_ptr(), x.data_ptr(), None if bias is None else bias.data_ptr(), y_RO.data_ptr())
        self._run(*addresses, num_rows, num_out, num_in, KINDS[w_OI.dtype], self._start_threads, threads)
        return y_RO.to(x_RI.dtype)

    def check(self, layer: nn.Linear) -> None:
        """Raises StartError if products with the weights of a layer differ from torch's by more than rounding."""
        generator, most = torch.Generator().manual_seed(0), MAX_ROWS[layer.weight.dtype]
        for num_rows in range(1, most + 1):
            # each number of rows has separate code; all outputs are compared for two of them
            num_out = layer.out_features if num_rows in (1, most) else CHECKED_TOGETHER
            weight, bias = layer.weight[:num_out], bias_of(layer)
            bias = None if bias is None else bias[:num_out]
            x = torch.randn(num_rows, layer.in_features, generator=generator).to(weight.dtype)
            found, expected = self(x, weight, bias), functional.linear(x, weight, bias)
            # in parts, because absolute weights are a copy, and those of a head may be a tenth of a model
            parts = torch.split(weight, CHECKED_TOGETHER)
            terms = torch.cat([functional.linear(x.abs(), part.abs()) for part in parts], dim=1)
            terms = terms if bias is None else terms + bias.abs()
            is_off = (found - expected).abs() > TOLERANCE[weight.dtype] * terms
            if (is_off | (found.isnan() != expected.isnan())).any():  # a layer may hold NaN
                shape = f"{layer.out_features} x {layer.in_features}"
                raise StartError(f"kernels: compiled is wrong on cpu: {num_rows} rows times weights of {shape}")


class FastLinear(nn.Linear):
    """A linear layer whose product with few rows is compiled. It has the parameters of the layer that it replaces."""

    def __init__(self, layer: nn.Linear, product: NativeLinear) -> None:
        shape = (layer.in_features, layer.out_features)
        super().__init__(*shape, bias=False, device="meta")  # pyright: ignore[reportUnknownMemberType]
        self.weight, self.bias = layer.weight, layer.bias
        self._product = product

    def forward(self, input: Tensor) -> Tensor:
        num_rows = input.numel() // self.in_features
        can_run = 0 < num_rows <= MAX_ROWS[self.weight.dtype] and input.dtype == self.weight.dtype
        if not can_run or torch.is_grad_enabled():
            return functional.linear(input, self.weight, self.bias)
        found = self._product(input.reshape(num_rows, self.in_features), self.weight, self.bias)
        return found.view(*input.shape[:-1], self.out_features)


def use_native_linear(module: nn.Module, product: NativeLinear) -> int:
    """Replaces the linear layers of a model in CPU memory by `FastLinear`; returns their number. Layers of other
    classes, and those with hooks, stay. Raises StartError if the product is wrong for one of the shapes."""
    checked, found = set[tuple[int, int, torch.dtype, bool]](), 0
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if not isinstance(layer, nn.Linear) or not _can_replace(layer):
                continue
            kind = (layer.in_features, layer.out_features, layer.weight.dtype, bias_of(layer) is not None)
            if kind not in checked:
                product.check(layer)
                checked.add(kind)
            setattr(parent, name, FastLinear(layer, product))
            found += 1
    return found


def bias_of(layer: nn.Linear) -> Tensor | None:
    """The bias, or None; torch's annotation lacks the latter."""
    return dict(layer.named_parameters(recurse=False)).get("bias")


def _can_replace(layer: nn.Linear) -> bool:
    if type(layer) is not nn.Linear or any(vars(layer)[name] for name in HOOKS):
        return False
    tensors = [layer.weight] if (bias := bias_of(layer)) is None else [layer.weight, bias]
    return all(tensor.is_cpu and tensor.is_contiguous() and tensor.dtype in KINDS for tensor in tensors)
