"""Reads quantized weights of a checkpoint as if they were stored in the dtype of the model.

The layouts are found by the names of the stored tensors, as the tools write them that quantize. Of a slice, only the
entries are read that it needs. Whatever is not understood is refused by name before a weight is read.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import lcm
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from longleaf.errors import ModelRefused
from longleaf.kernels.quantized_matrix import QuantizedMatrix
from workers.model.dequantization import (
    Layout,
    PackedExperts,
    PackedFloats,
    PackedIntegers,
    ScaledNumbers,
)
from workers.model.stored_weights import (
    bytes_per_number,
    input_unit,
    reason_to_dequantize,
    select_matrix,
    stored_matrix,
)
from workers.model.weight_shares import num_elements, select

METHODS = ("fp8", "compressed-tensors", "mxfp4", "awq", "gptq", "modelopt")
"""Values of `quant_method` of which the layouts are known."""
TRANSPOSED = ("awq", "gptq")
"""Methods that store words and scales with the inputs first."""
NUMBERS = {"F8_E4M3": "fp8", "F8_E5M2": "fp8 e5m2", "I8": "int8"}
"""Types of 8 bits, with their names for users."""
FLOATS = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}
"""Types of dequantized weights, as safetensors files name them."""
SCALE_BYTES = {"F16": 2, "BF16": 2, "F8_E4M3": 1, "U8": 1}
"""Bytes of scales in memory by their type, if it is not of 32 bits."""
IGNORED = (
    "input_scale",
    "input_global_scale",
    "output_scale",
    "activation_scale",
    "k_scale",
    "v_scale",
    "q_scale",
    "kv_cache_scaling_factor",
)
"""Last parts of the names of scales of activations and keys, which stay in the dtype of the model."""
ROLES = {
    "weight_scale_inv": "scale",
    "weight_scale": "scale",
    "weight_zero_point": "zero_point",
    "weight_packed": "packed",
    "weight_shape": "shape",
    "weight_g_idx": "groups",
    "weight_global_scale": "divisor",
    "weight_scale_2": "factor",
    "qweight": "packed",
    "qzeros": "zero_point",
    "scales": "scale",
    "g_idx": "groups",
}
"""Roles of stored tensors by the last part of their names, beside `weight` itself."""
EXPERT_ROLES = {"_blocks": "blocks", "_scales": "scale"}
"""Roles by the end of the names, in MXFP4 of gpt-oss."""

Ranges = Sequence[tuple[int, int]]
Quantization = dict[str, Any]
"""The description of a quantization in a config, with its `quant_method`."""


class StoredTensor(Protocol):
    """A tensor in a file, of which slices can be read."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def restricted_to(self, dim: int, ranges: Ranges) -> "StoredTensor": ...

    def __getitem__(self, index: object) -> Tensor: ...


class DequantizedTensor:
    """A weight in a quantized layout, or the slice of it that belongs to a share; any index reads it. Stands in for the
    slices of the safetensors library.
    """

    def __init__(self, name: str, layout: Layout, stored: Mapping[str, StoredTensor], dtype: torch.dtype) -> None:
        self._name = name
        self._layout = layout
        self._stored = stored
        self._dtype = dtype
        self._dim = 0
        self._ranges: Ranges = [(0, layout.shape[0])]

    @property
    def layout(self) -> str:
        """Its name for users."""
        return self._layout.name

    def restricted_to(self, dim: int, ranges: Ranges) -> "DequantizedTensor":
        """The slice with these ranges of a dim."""
        found = DequantizedTensor(self._name, self._layout, self._stored, self._dtype)
        found._dim, found._ranges = dim, ranges
        return found

    def get_shape(self) -> list[int]:
        """The shape of the whole weight."""
        return list(self._layout.shape)

    def get_dtype(self) -> str:
        """The dtype of the dequantized weight, as safetensors files name it."""
        return FLOATS[self._dtype]

    def __getitem__(self, index: object) -> Tensor:
        """Reads the slice for any index. Raises ModelRefused if a number is not finite."""
        dim, shape = self._dim, self.get_shape()
        if not self._ranges:
            return torch.empty((*shape[:dim], 0, *shape[dim + 1 :]), dtype=self._dtype)
        parts, shape, read = self._read()
        try:
            found = self._layout.combine(parts, shape, self._dtype)
        except ValueError as error:
            raise ModelRefused(f"{self._name} ({self.layout}): {error}") from None
        found = found if read == list(self._ranges) else select(self._ranges, [(read, found)], dim)
        if not is_finite(found):
            raise ModelRefused(f"{self._name} ({self.layout}): a number or a scale is not finite in {self._dtype}")
        return found

    def with_groups_in_order(self) -> "DequantizedTensor":
        """The same slice. If a list of groups states their usual order, it is read once and no longer needed."""
        layout = self._layout
        if not isinstance(layout, PackedIntegers) or not layout.has_groups:
            return self
        groups = self._stored["groups"][...].long()
        if not torch.equal(groups, torch.arange(len(groups)) // layout.group):
            return self
        stored = {role: tensor for role, tensor in self._stored.items() if role != "groups"}
        found = DequantizedTensor(self._name, replace(layout, has_groups=False), stored, self._dtype)
        found._dim, found._ranges = self._dim, self._ranges
        return found

    @property
    def reason_to_dequantize(self) -> str:
        """The reason why the weight cannot remain as stored; empty if it can."""
        return reason_to_dequantize(self._layout)

    @property
    def input_unit(self) -> int:
        """The number of inputs of which each part of the weight has a multiple, if it remains as stored."""
        return input_unit(self._layout)

    @property
    def bytes_per_number(self) -> float:
        """Bytes in memory by the number of its elements, if it remains as stored."""
        scale_bytes = SCALE_BYTES.get(self._stored["scale"].get_dtype(), 4)
        return bytes_per_number(self._layout, scale_bytes, has_zeros="zero_point" in self._stored)

    def matrix(self) -> QuantizedMatrix:
        """Reads the slice as it is stored. Raises ModelRefused if a number is not finite."""
        parts, shape, read = self._read()
        try:
            found = stored_matrix(self._layout, parts, (shape[0], shape[1]))
        except ValueError as error:
            raise ModelRefused(f"{self._name} ({self.layout}): {error}") from None
        return select_matrix(self._ranges, [(read, found)], self._dim)

    def _read(self) -> tuple[dict[str, Tensor], tuple[int, ...], Ranges]:
        """The entries of the stored tensors that the slice needs, the shape of the weight that they represent, and its
        ranges of the dim.
        """
        dim, shape = self._dim, self.get_shape()
        axes = {role: self._layout.axes(role).get(dim) for role in self._stored}
        unit = lcm(*(axis.unit for axis in axes.values() if axis is not None))
        read = _joined([(start // unit * unit, min(-(-end // unit) * unit, shape[dim])) for start, end in self._ranges])
        shape[dim] = num_elements(read)
        parts = dict[str, Tensor]()
        for role, tensor in self._stored.items():
            axis, stored_shape = axes[role], tensor.get_shape()
            if axis is not None and axis.dim < len(stored_shape) and stored_shape[axis.dim] > 1:
                needed = [(start // axis.unit, -(-end // axis.unit)) for start, end in read]
                tensor = tensor.restricted_to(axis.dim, needed)
            parts[role] = tensor[...]
        return parts, tuple(shape), read


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite. If their sum is, which is quickly computed, they are as well."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def pop_quantization(config: PreTrainedConfig) -> Quantization | None:
    """Removes the description of the quantization from a config, so that transformers builds the model without it, and
    returns it; None if the weights are not quantized. Raises ModelRefused for an unknown method.
    """
    found: Any = None
    for part in (config, config.get_text_config()):
        if (stated := getattr(part, "quantization_config", None)) is not None:
            found = found or stated
        if hasattr(part, "quantization_config"):
            delattr(part, "quantization_config")
    if not found:
        return None
    settings: dict[str, Any] = found if isinstance(found, dict) else found.to_dict()
    method = getattr(settings.get("quant_method"), "value", settings.get("quant_method"))
    if method not in METHODS:
        raise ModelRefused(f"the quantization {method!r} is not supported: only {', '.join(METHODS)} are")
    if settings.get("transform_config"):
        raise ModelRefused("rotated weights (transform_config) are not supported: activations would be rotated as well")
    return {**settings, "quant_method": method}


def dequantize(
    tensors: Mapping[str, StoredTensor], settings: Quantization, dtype: torch.dtype
) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, with the quantized ones under the names and shapes of their weights. Raises
    ModelRefused for tensors of an unknown layout.
    """
    method = settings["quant_method"]
    groups = dict[str, dict[str, StoredTensor]]()
    found = dict[str, StoredTensor]()
    for name, tensor in tensors.items():
        weight, role = _role(name, method)
        if role is None:
            found[name] = tensor
        elif role:
            groups.setdefault(weight, {})[role] = tensor
    for weight, stored in groups.items():
        if weight in found:
            numbers = tensors[weight]
            stored["packed" if numbers.get_dtype() == "U8" else "weight"] = numbers
        try:
            layout = _layout(method, stored, settings)
        except ValueError as error:
            raise ModelRefused(f"{weight} ({method}): {error}") from None
        stored.pop("shape", None)
        if unused := sorted(stored.keys() - layout.roles):
            raise ModelRefused(f"{weight} ({layout.name}): its {unused[0]} is not understood")
        found[weight] = DequantizedTensor(weight, layout, stored, dtype)
    for name, tensor in found.items():
        if isinstance(tensor, DequantizedTensor):
            continue
        if tensor.get_dtype() in (*NUMBERS, "U8", "I32"):
            raise ModelRefused(f"{name} has the type {tensor.get_dtype()}, and no scales of {method} belong to it")
        parent, _, leaf = name.rpartition(".")
        if f"{parent}.weight" in groups and leaf != "bias":
            raise ModelRefused(f"{name} belongs to a quantized layer, and is not understood")
    return found


def layouts(tensors: Mapping[str, StoredTensor]) -> dict[str, int]:
    """The number of dequantized tensors by their layout, the most frequent first."""
    counts = Counter(tensor.layout for tensor in tensors.values() if isinstance(tensor, DequantizedTensor))
    return dict(counts.most_common())


def _role(name: str, method: str) -> tuple[str, str | None]:
    """The weight to which a stored tensor belongs, and its role; empty for tensors that are not needed, None for those
    that are weights themselves.
    """
    parent, _, leaf = name.rpartition(".")
    if leaf in IGNORED:
        return name, ""
    if method == "mxfp4":
        for end, role in EXPERT_ROLES.items():
            if leaf.endswith(end):
                return name.removesuffix(end), role
    if leaf in ROLES:
        return f"{parent}.weight", ROLES[leaf]
    if method == "fp8" and leaf.endswith("_scale_inv"):  # experts in one tensor
        return name.removesuffix("_scale_inv"), "scale"
    return name, None


def _layout(method: str, stored: Mapping[str, StoredTensor], settings: Quantization) -> Layout:
    """The layout of the stored tensors of a weight. Raises ValueError."""
    shapes = {role: tensor.get_shape() for role, tensor in stored.items()}
    if "scale" not in shapes:
        raise ValueError("its scales are missing")
    if method == "mxfp4" and "blocks" in shapes:
        return PackedExperts.of(shapes)
    numbers = stored.get("packed") or stored.get("weight")
    if numbers is None:
        raise ValueError("its numbers are missing")
    match numbers.get_dtype():
        case "I32" if method in TRANSPOSED:
            return _transposed_integers(method, shapes, settings)
        case "I32" if method == "compressed-tensors":
            groups = _stated(settings, "group_size")
            return PackedIntegers.of(method, shapes, _stored_shape(stored), groups=groups)
        case "U8":
            is_mx = stored["scale"].get_dtype() == "U8"
            layout = PackedFloats.of("mxfp4" if is_mx else "nvfp4", shapes, 32 if is_mx else 16)
            if not is_mx and stored["scale"].get_dtype() != "F8_E4M3":
                raise ValueError(f"its scales have the type {stored['scale'].get_dtype()}")
            if not is_mx and not stored.keys() & {"divisor", "factor"}:
                raise ValueError("its global scale is missing")
            return layout
        case dtype if dtype in NUMBERS and "packed" not in stored:
            blocks = [settings.get("weight_block_size")] if method == "fp8" else _stated(settings, "block_structure")
            sizes = [block for block in blocks if isinstance(block, list)]
            return ScaledNumbers.of(NUMBERS[dtype], shapes, sizes, _stated(settings, "group_size"))
        case dtype:
            raise ValueError(f"its numbers have the type {dtype}")


def _stated(settings: Quantization, key: str) -> list[Any]:
    """The values of a setting of weights in the groups of compressed-tensors."""
    groups: Any = settings.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    return [each[key] for each in weights if isinstance(each, dict) and each.get(key)]


def _transposed_integers(method: str, shapes: Mapping[str, list[int]], settings: Quantization) -> PackedIntegers:
    """The layout of AWQ or GPTQ."""
    num_bits = settings.get("bits", 4)
    if num_bits not in (4, 8) or (method, num_bits) == ("awq", 8):
        raise ValueError(f"{num_bits} bits per number are not supported")
    if method == "awq" and settings.get("version", "gemm") != "gemm":
        raise ValueError(f"version {settings['version']!r} is not supported, only gemm")
    group = settings.get("group_size")
    groups = [group] if isinstance(group, int) and group > 0 else []
    is_less_one = method == "gptq" and settings.get("checkpoint_format", "gptq") != "gptq_v2"  # zero points minus 1
    return PackedIntegers.of(method, shapes, num_bits=num_bits, zero_offset=int(is_less_one), groups=groups)


def _stored_shape(stored: Mapping[str, StoredTensor]) -> list[int]:
    if "shape" not in stored or stored["shape"].get_shape() != [2]:
        raise ValueError("its shape is missing")
    return [int(size) for size in stored["shape"][...]]


def _joined(ranges: Ranges) -> list[tuple[int, int]]:
    """Ranges in ascending order without overlaps."""
    found = list[tuple[int, int]]()
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found
