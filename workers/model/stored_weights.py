"""Quantized weights that remain as stored in memory: matrices of the compiled product, from layouts of checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import lcm

import torch
from torch import Tensor

from longleaf.kernels.quantized_matrix import (
    MAX_GROUPS,
    UNIT,
    NumberKind,
    QuantizedMatrix,
    check_group,
    is_packed,
    join_inputs,
    join_outputs,
    pack,
    scales_in_float32,
)
from workers.model.dequantization import Layout, PackedFloats, PackedIntegers, ScaledNumbers, scale_grid, unpack_bytes

Ranges = Sequence[tuple[int, int]]
KINDS: dict[str, NumberKind] = {"fp8": "float8", "int8": "int8"}
"""Numbers of 8 bits by the names of their layouts."""
ROW_BYTES = 4
"""Bytes of the row of the scales of an output."""
NAN = 0x7F
"""The bits of numbers of FP8 that are not finite, without their sign."""


def reason_to_dequantize(layout: Layout) -> str:
    """The reason why a weight cannot remain as stored; empty if it can."""
    if isinstance(layout, PackedIntegers) and layout.has_groups:
        return "the groups of its inputs are shuffled"
    kind = _kind(layout)
    if kind is None:
        return f"{layout.name} has no kernel"
    if len(layout.shape) != 2:
        return "it is not a matrix"
    num_inputs, group = layout.shape[1], _inputs_per_scale(layout)
    if -(-num_inputs // group) > MAX_GROUPS:
        return f"it has more than {MAX_GROUPS:,} groups of inputs"
    if not is_packed(kind):
        return ""
    if num_inputs % UNIT:
        return f"{num_inputs:,} inputs are not a multiple of {UNIT}"
    return check_group(kind, group, is_single=group >= num_inputs)


def input_unit(layout: Layout) -> int:
    """The number of inputs of which each part of a stored weight has a multiple."""
    kind, group = _kind(layout), _inputs_per_scale(layout)
    unit = UNIT if kind is not None and is_packed(kind) else 1
    return lcm(unit, group) if group < layout.shape[1] else unit


def bytes_per_number(layout: Layout, scale_bytes: int, *, has_zeros: bool) -> float:
    """Bytes of a matrix in memory by the number of its elements."""
    kind, per_scale = _kind(layout), 1.0
    match layout:
        case ScaledNumbers():
            per_scale = layout.block[0] * layout.block[1]
        case _:
            per_scale = _inputs_per_scale(layout)
    numbers = 0.5 if kind is not None and is_packed(kind) else 1.0
    return numbers + (scale_bytes + has_zeros) / per_scale + ROW_BYTES / layout.shape[1]


def _kind(layout: Layout) -> NumberKind | None:
    match layout:
        case ScaledNumbers():
            return KINDS.get(layout.kind)
        case PackedFloats():
            return "float4"
        case PackedIntegers():
            return "int4" if layout.num_bits == 4 else "int8"
        case _:
            return None


def _inputs_per_scale(layout: Layout) -> int:
    match layout:
        case ScaledNumbers():
            return layout.block[1]
        case PackedFloats():
            return layout.block
        case PackedIntegers():
            return layout.group
        case _:
            return layout.shape[-1]


def stored_matrix(layout: Layout, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedMatrix:
    """The matrix of this shape from parts of the stored tensors, which may hold more at the end of a dim. Raises
    ValueError for numbers and scales that are not finite.
    """
    match layout:
        case ScaledNumbers():
            found = _of_numbers(layout, parts, shape)
        case PackedFloats():
            found = _of_floats(layout, parts, shape)
        case PackedIntegers():
            found = _of_integers(layout, parts, shape)
        case _:
            raise ValueError("its layout has no kernel")
    scales = scales_in_float32(found.scales) * found.factor / found.divisor
    is_wrong = found.scales.dtype == torch.uint8 and bool((found.scales == 255).any())
    if is_wrong or not scales.isfinite().all():
        raise ValueError("a scale is not finite")
    return found


def select_matrix(wanted: Ranges, sources: Sequence[tuple[Ranges, QuantizedMatrix]], dim: int) -> QuantizedMatrix:
    """The wanted ranges of a dim from matrices that hold disjoint ranges of it, as `weight_shares.select` does for
    tensors. Raises ValueError if no source holds an element.
    """
    if len(sources) == 1 and list(sources[0][0]) == list(wanted):
        return sources[0][1]
    found = list[QuantizedMatrix]()
    for start, end in wanted:
        overlaps = list[tuple[int, int, int, QuantizedMatrix]]()
        for ranges, matrix in sources:
            offset = 0
            for first, last in ranges:
                low, high = max(start, first), min(end, last)
                if low < high:
                    overlaps.append((low, high, offset + low - first, matrix))
                offset += last - first
        overlaps.sort(key=lambda overlap: overlap[0])
        if sum(high - low for low, high, _, _ in overlaps) != end - start:
            raise ValueError(f"elements {start} to {end} are not held")
        found += [_slice(matrix, dim, place, place + high - low) for low, high, place, matrix in overlaps]
    if not found:
        return _slice(sources[0][1], dim, 0, 0)
    return found[0] if len(found) == 1 else (join_inputs if dim else join_outputs)(found)


def _slice(matrix: QuantizedMatrix, dim: int, start: int, end: int) -> QuantizedMatrix:
    return matrix.inputs([(start, end)]) if dim else matrix.outputs([(start, end)])


def _of_numbers(layout: ScaledNumbers, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedMatrix:
    numbers = parts["weight"].view(torch.uint8)
    if layout.kind == "fp8" and ((numbers & NAN) == NAN).any():
        raise ValueError("a number is not finite")
    scale, zero = parts["scale"], parts.get("zero_point")
    grid = scale_grid(scale.shape, ())
    rows = torch.arange(shape[0]) // layout.block[0] if grid[0] > 1 else torch.zeros(shape[0])
    return _matrix(KINDS[layout.kind], numbers, scale.reshape(grid), rows, zero, _group(layout.block[1], layout.shape))


def _of_floats(layout: PackedFloats, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedMatrix:
    codes = unpack_bytes(parts["packed"])
    factors = {role: float(parts[role]) if role in parts else 1.0 for role in ("factor", "divisor")}
    found = _matrix("float4", pack(codes), parts["scale"], torch.arange(shape[0]), None, layout.block)
    return replace(found, **factors)


def _of_integers(layout: PackedIntegers, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedMatrix:
    codes, scale, zero = layout.integers(parts, shape)
    half = 1 << (layout.num_bits - 1)
    zero = None if zero is None else zero - half
    kind, numbers = ("int4", pack(codes.to(torch.uint8))) if layout.num_bits == 4 else ("int8", codes - half)
    if kind == "int8":
        numbers = numbers.to(torch.int8).view(torch.uint8)
    return _matrix(kind, numbers, scale, torch.arange(shape[0]), zero, _group(layout.group, layout.shape))


def _group(group: int, shape: Sequence[int]) -> int | None:
    """The size of groups of inputs; None if there is one group."""
    return group if group < shape[1] else None


def _matrix(
    kind: NumberKind, numbers: Tensor, scale: Tensor, rows: Tensor, zero: Tensor | None, group: int | None
) -> QuantizedMatrix:
    scale = scale.float() if scale.dtype == torch.float64 else scale
    zero = None if zero is None else zero.reshape(scale.shape).to(torch.int8).contiguous()
    num_inputs = numbers.shape[1] * (2 if is_packed(kind) else 1)
    return QuantizedMatrix(
        kind,
        numbers.contiguous(),
        scale.contiguous(),
        rows.to(torch.int32),
        group or max(1, num_inputs),
        zero,
        has_groups=group is not None,
    )
