"""Weights of a linear layer in 8 or 4 bits, in the order in which the compiled product reads them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

NumberKind = Literal["float8", "int8", "int4", "float4"]
BLOCK, UNIT, LANES = 128, 32, 16
"""Inputs of a block of 4-bit numbers, and of a unit, of which the rest consists; numbers with the same shift."""
GROUPS = {"int4": (32, 64), "float4": (16, 32)}
"""Sizes of groups of 4-bit numbers; those of int4 may also be multiples of a block, or all inputs."""
MAX_GROUPS = 4096
"""Maximum number of groups of inputs, as in cpu/quantized_linear.c."""
FLOAT4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of the format E2M1 by their 4 bits."""
Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A weight of shape [outputs, inputs]: (number - zero point) * scale * factor / divisor.

    A scale belongs to a group of inputs, and to one or several outputs. Inputs of 4-bit numbers are a multiple of 32.
    """

    kind: NumberKind
    """float8 is E4M3, float4 is E2M1. An int4 is stored as 8 more."""
    numbers: Tensor
    """uint8: [outputs, inputs], or [outputs, inputs / 2] in the order of `pack`."""
    scales: Tensor
    """[scale rows, groups] in float32, bfloat16, float16, float8_e4m3fn, or uint8, which has exponents of 2 with a bias
    of 127."""
    scale_rows: Tensor
    """int32 [outputs]: the row of the scales of each output."""
    group: int
    """Inputs per scale. The last group may be smaller."""
    zeros: Tensor | None = None
    """int8 [scale rows, groups]; zero points of int4 are 8 less than those of its stored numbers."""
    factor: float = 1.0
    divisor: float = 1.0
    has_groups: bool = True
    """Whether scales belong to groups of inputs. Otherwise there is one column of scales, and one group."""

    def check(self) -> None:
        """Raises ValueError for sizes that the compiled product does not support."""
        num_groups = self.scales.shape[1]
        if num_groups > MAX_GROUPS:
            raise ValueError(f"{num_groups:,} groups of inputs are more than {MAX_GROUPS:,}")
        if is_packed(self.kind) and (reason := check_group(self.kind, self.group, is_single=not self.has_groups)):
            raise ValueError(reason)

    @property
    def num_outputs(self) -> int:
        return self.numbers.shape[0]

    @property
    def num_inputs(self) -> int:
        return self.numbers.shape[1] * (2 if is_packed(self.kind) else 1)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (self.numbers, self.scales, self.scale_rows, self.zeros)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def dequantize(self, start: int = 0, end: int | None = None) -> Tensor:
        """The weights of outputs [start, end) in float32."""
        rows = self.scale_rows[start:end].long()
        codes = self.numbers[start:end]
        match self.kind:
            case "float8":
                found = codes.view(torch.float8_e4m3fn).float()
            case "int8":
                found = codes.view(torch.int8).float()
            case "int4":
                found = unpack(codes).float() - 8
            case "float4":
                found = torch.tensor(FLOAT4_VALUES)[unpack(codes).long()]
        if self.zeros is not None:
            found = found - self._spread(self.zeros.float()[rows])
        return found * self._spread((scales_in_float32(self.scales) * self.factor / self.divisor)[rows])

    def _spread(self, grid: Tensor) -> Tensor:
        """Values of groups for each input."""
        if not self.has_groups:
            return grid
        return grid.repeat_interleave(self.group, dim=1)[:, : self.num_inputs]

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.num_outputs, self.num_inputs

    def outputs(self, ranges: Ranges) -> "QuantizedMatrix":
        """The matrix of these outputs."""
        places = torch.cat([torch.arange(start, end) for start, end in ranges])
        found = self.scale_rows[places]
        used = found.new_tensor(sorted({int(row) for row in found}))
        rows = torch.searchsorted(used, found)
        return replace(
            self,
            numbers=self.numbers[places],
            scales=_rows(self.scales, used),
            scale_rows=rows.to(torch.int32),
            zeros=None if self.zeros is None else self.zeros[used.long()],
        )

    def inputs(self, ranges: Ranges) -> "QuantizedMatrix":
        """The matrix of these inputs. Raises ValueError unless the ranges consist of whole groups, and of whole units
        of 4-bit numbers.
        """
        unit = UNIT if is_packed(self.kind) else 1
        if any(start % unit or end % unit for start, end in ranges):
            raise ValueError(f"inputs {list(ranges)} are not multiples of {unit}")
        codes = unpack(self.numbers) if is_packed(self.kind) else self.numbers
        numbers = torch.cat([codes[:, start:end] for start, end in ranges], dim=1)
        numbers = pack(numbers) if is_packed(self.kind) else numbers
        if not self.has_groups:
            return replace(self, numbers=numbers, group=max(1, sum(end - start for start, end in ranges)))
        size = self.num_inputs
        bounds = [bound for one in ranges for bound in one if bound != size]
        if any(bound % self.group for bound in bounds) or any(end % self.group for _, end in ranges[:-1]):
            raise ValueError(f"inputs {list(ranges)} are not groups of {self.group}")
        groups = [(start // self.group, -(-end // self.group)) for start, end in ranges]
        scales = torch.cat([_bits(self.scales)[:, start:end] for start, end in groups], dim=1).view(self.scales.dtype)
        zeros = None if self.zeros is None else torch.cat([self.zeros[:, start:end] for start, end in groups], dim=1)
        return replace(self, numbers=numbers, scales=scales, zeros=zeros)


def join_outputs(matrices: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """One matrix with the outputs of several, which have the same inputs."""
    first, offset, rows = matrices[0], 0, list[Tensor]()
    for one in matrices:
        rows.append(one.scale_rows + offset)
        offset += len(one.scales)
    scales = torch.cat([_bits(one.scales) for one in matrices]).view(first.scales.dtype)
    zeros = [one.zeros for one in matrices if one.zeros is not None]
    return replace(
        first,
        numbers=torch.cat([one.numbers for one in matrices]),
        scales=scales,
        scale_rows=torch.cat(rows),
        zeros=torch.cat(zeros) if zeros else None,
    )


def join_inputs(matrices: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """One matrix with the inputs of several, which have the same outputs. All but the last consist of whole groups."""
    first = matrices[0]
    codes = [unpack(one.numbers) if is_packed(one.kind) else one.numbers for one in matrices]
    numbers = torch.cat(codes, dim=1)
    numbers = pack(numbers) if is_packed(first.kind) else numbers
    if not first.has_groups:
        return replace(first, numbers=numbers, group=max(1, sum(one.num_inputs for one in matrices)))
    scales = torch.cat([_bits(one.scales) for one in matrices], dim=1).view(first.scales.dtype)
    zeros = [one.zeros for one in matrices if one.zeros is not None]
    return replace(first, numbers=numbers, scales=scales, zeros=torch.cat(zeros, dim=1) if zeros else None)


def is_packed(kind: NumberKind) -> bool:
    """Whether a byte holds two numbers."""
    return kind in ("int4", "float4")


def check_group(kind: NumberKind, group: int, *, is_single: bool) -> str:
    """The reason why the compiled product does not support groups of 4-bit numbers, or an empty string. `is_single`:
    there is one group.
    """
    is_long = kind == "int4" and (group % BLOCK == 0 or is_single)
    return "" if group in GROUPS[kind] or is_long else f"groups of {group} inputs are not supported for {kind}"


def pack(codes: Tensor) -> Tensor:
    """Numbers of 4 bits, uint8 [outputs, inputs], two per byte. Raises ValueError unless inputs are a multiple of 32.

    A block of 128 inputs consists of 16 words of 32 bits: word j has the inputs j, 16 + j, ..., 112 + j, the first in
    its lowest bits, so that one shift of a vector gives 16 neighboring inputs. The rest consists of units of 32 inputs
    in 16 bytes: byte j has the inputs j and 16 + j.
    """
    num_outputs, num_inputs = codes.shape
    if num_inputs % UNIT:
        raise ValueError(f"{num_inputs:,} inputs are not a multiple of {UNIT}")
    num_blocks, num_units = num_inputs // BLOCK, num_inputs % BLOCK // UNIT
    edge = num_blocks * BLOCK
    blocks = codes[:, :edge].reshape(num_outputs, num_blocks, BLOCK // UNIT, 2, LANES)
    words = (blocks[:, :, :, 0] | (blocks[:, :, :, 1] << 4)).transpose(2, 3)
    units = codes[:, edge:].reshape(num_outputs, num_units, 2, LANES)
    rest = units[:, :, 0] | (units[:, :, 1] << 4)
    return torch.cat([words.reshape(num_outputs, edge // 2), rest.reshape(num_outputs, num_units * LANES)], dim=1)


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack`."""
    num_outputs, num_inputs = packed.shape[0], 2 * packed.shape[1]
    num_blocks, num_units = num_inputs // BLOCK, num_inputs % BLOCK // UNIT
    edge = num_blocks * BLOCK
    words = packed[:, : edge // 2].reshape(num_outputs, num_blocks, LANES, BLOCK // UNIT).transpose(2, 3)
    units = packed[:, edge // 2 :].reshape(num_outputs, num_units, LANES)
    blocks = torch.stack([words & 15, words >> 4], dim=3).reshape(num_outputs, edge)
    rest = torch.stack([units & 15, units >> 4], dim=2).reshape(num_outputs, num_units * UNIT)
    return torch.cat([blocks, rest], dim=1)


def scales_in_float32(scales: Tensor) -> Tensor:
    """Scales of any type in float32. Bytes are exponents of 2 with a bias of 127 (E8M0)."""
    return (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of types of 8 bits, for which torch lacks some operations."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def _rows(tensor: Tensor, rows: Tensor) -> Tensor:
    return _bits(tensor)[rows.long()].view(tensor.dtype)
