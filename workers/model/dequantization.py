"""Layouts of quantized weights in checkpoints, and the weights that they represent.

A layout combines several stored tensors into one weight. Products are computed in float32, and rounded once to the
dtype of the model. Compiled code does so for the usual forms, and torch for the others, with the same bits.

Sources of the formats: transformers (`integrations/finegrained_fp8.py` and `mxfp4.py`), compressed-tensors
(`compressors/`), and AutoAWQ and AutoGPTQ for the order of packed integers.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, prod
from typing import Protocol

import torch
from torch import Tensor

from longleaf.kernels.cpu import dequantize
from longleaf.kernels.cpu.dequantize import NativeDequantize

log = logging.getLogger("longleaf.weights")

WORD_BITS = 32
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of the format E2M1 by their 4 bits."""
AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
"""Bit positions of eight neighboring outputs in a word of AWQ."""

Shapes = Mapping[str, Sequence[int]]
"""Shapes of the stored tensors of a weight by their role, such as `scale`."""


@dataclass(frozen=True, slots=True)
class Axis:
    """The dim of a stored tensor that corresponds to a dim of the weight, and the elements of the weight per entry."""

    dim: int
    unit: int = 1


Axes = Mapping[int, Axis]
"""Axes of a stored tensor by dim of the weight. All of it is needed for any range of the other dims."""


class Layout(Protocol):
    """The representation of a weight by stored tensors. The dims of weights are [..., outputs, inputs] by default."""

    @property
    def name(self) -> str:
        """The name for users, such as `fp8 128x128`."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        ...

    @property
    def roles(self) -> frozenset[str]:
        """The roles of stored tensors that `combine` uses."""
        ...

    def axes(self, role: str) -> Axes:
        """The axes of the stored tensor of a role."""
        ...

    def combine(self, parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The part of the weight, of this shape and dtype, that parts of the stored tensors represent. They may hold
        more at the end of a dim, where the last entry is not full.
        """
        ...


@dataclass(frozen=True, slots=True)
class ScaledNumbers:
    """Numbers of 8 bits with a scale for each block, channel or tensor: `weight`, `scale` and maybe `zero_point`."""

    kind: str
    shape: tuple[int, ...]
    block: tuple[int, int]
    """Outputs and inputs per scale."""
    roles = frozenset(("weight", "scale", "zero_point"))

    @classmethod
    def of(
        cls, kind: str, shapes: Shapes, blocks: Sequence[Sequence[int]] = (), groups: Sequence[int] = ()
    ) -> "ScaledNumbers":
        """The layout of stored tensors. `blocks` and `groups` are the sizes that the config states. Raises ValueError
        if the shapes disagree with each other or with these sizes.
        """
        shape, scale = tuple(shapes["weight"]), tuple(shapes["scale"])
        if len(shape) < 2:
            raise ValueError(f"the weight has the shape {list(shape)}, which is not one of a matrix")
        *lead, rows, columns = shape
        num_rows, num_columns = scale_grid(scale, lead)
        grid = num_rows, num_columns
        found = {(high, wide) for high, wide in blocks if grid == (ceil(rows / high), ceil(columns / wide))}
        if len(found) > 1:
            raise ValueError(f"blocks of its scales may have any of the sizes {sorted(found)}")
        if found:
            return cls(kind, shape, found.pop())
        if num_rows not in (1, rows) or (num_rows == 1 < rows and num_columns > 1):
            # the last blocks may be smaller, so the size does not follow from the number
            sizes = " or ".join(map(_times, blocks)) or "a size that the config does not state"
            raise ValueError(f"scales have the shape {list(scale)} for a weight of {list(shape)}, {sizes} each")
        if not num_columns or columns % num_columns:
            raise ValueError(f"scales of the shape {list(scale)} do not divide a weight of {list(shape)}")
        _check_group(columns, num_columns, groups)
        return cls(kind, shape, (rows // num_rows, columns // num_columns))

    @property
    def name(self) -> str:
        rows, columns = self.shape[-2:]
        if self.block == (rows, columns):
            return f"{self.kind} by tensor"
        return f"{self.kind} by channel" if self.block == (1, columns) else f"{self.kind} {_times(self.block)}"

    def axes(self, role: str) -> Axes:
        last = len(self.shape) - 1
        lead = {dim: Axis(dim) for dim in range(last - 1)}
        if role == "weight":
            return lead | {last - 1: Axis(last - 1), last: Axis(last)}
        return lead | {last - 1: Axis(last - 1, self.block[0]), last: Axis(last, self.block[1])}

    def combine(self, parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        weight, scale, zero = parts["weight"], _scales(parts["scale"]), parts.get("zero_point")
        *lead, rows, columns = shape
        native = _native(dtype)
        if native is not None and not lead and list(weight.shape) == [rows, columns]:
            table, size = _table(weight.dtype), scale_grid(scale.shape, lead)
            zeros = None if zero is None else zero.to(torch.float32).reshape(size).contiguous()
            scales = scale.reshape(size).contiguous()
            return native.row_major(weight, table, scales, zeros, (rows, columns), self.block, dtype)
        numbers = weight.to(torch.float32)
        if zero is not None:
            numbers = numbers - self._spread(zero.to(torch.float32), shape)
        return (numbers * self._spread(scale, shape)).to(dtype)

    def _spread(self, scales: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Scales for each element of a part; those of a channel or a tensor are broadcast."""
        *lead, _, _ = shape
        grid = scales.reshape(*lead, *scale_grid(scales.shape, lead))
        for dim, unit in ((-2, self.block[0]), (-1, self.block[1])):
            if grid.shape[dim] > 1 or unit < self.shape[dim]:
                grid = grid.repeat_interleave(unit, dim=dim).narrow(dim, 0, shape[dim])
        return grid


@dataclass(frozen=True, slots=True)
class PackedFloats:
    """Numbers of 4 bits, E2M1, two per byte, the first in the low bits: `packed`, `scale`, and maybe a `divisor` or
    `factor` of all scales.
    """

    kind: str
    shape: tuple[int, ...]
    block: int
    """Inputs per scale."""
    roles = frozenset(("packed", "scale", "divisor", "factor"))

    @classmethod
    def of(cls, kind: str, shapes: Shapes, block: int) -> "PackedFloats":
        """The layout of stored tensors. Raises ValueError if the shapes disagree."""
        *lead, num_bytes = shapes["packed"]
        shape, scale = (*lead, 2 * num_bytes), list(shapes["scale"])
        if len(shape) < 2 or shape[-1] % block or scale != [*lead, shape[-1] // block]:
            raise ValueError(f"scales have the shape {scale} for a weight of {list(shape)}, one per {block} inputs")
        return cls(kind, shape, block)

    @property
    def name(self) -> str:
        return self.kind

    def axes(self, role: str) -> Axes:
        if role not in ("packed", "scale"):
            return {}
        last = len(self.shape) - 1
        return {dim: Axis(dim) for dim in range(last)} | {last: Axis(last, 2 if role == "packed" else self.block)}

    def combine(self, parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        packed, scale = parts["packed"], _scales(parts["scale"])
        if "divisor" in parts:
            scale = scale / parts["divisor"].to(torch.float32).reshape(())
        if "factor" in parts:
            scale = scale * parts["factor"].to(torch.float32).reshape(())
        if (native := _native(dtype)) is not None:
            size = prod(shape[:-1]), shape[-1]
            found = native.row_major(packed, _fp4_table(), scale.contiguous(), None, size, (1, self.block), dtype)
            return found.reshape(shape)
        return (_unpack_fp4(packed) * scale.repeat_interleave(self.block, dim=-1)).to(dtype)


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """MXFP4 of gpt-oss: `blocks` [experts, outputs, groups, 16] of bytes and `scale` [experts, outputs, groups]. The
    weight is [experts, inputs, outputs].
    """

    shape: tuple[int, ...]
    name = "mxfp4"
    roles = frozenset(("blocks", "scale"))

    @classmethod
    def of(cls, shapes: Shapes) -> "PackedExperts":
        """The layout of stored tensors. Raises ValueError if the shapes disagree."""
        blocks, scale = list(shapes["blocks"]), list(shapes["scale"])
        if len(blocks) != 4 or blocks[3] != 16 or scale != blocks[:3]:
            raise ValueError(f"scales have the shape {scale} for blocks of {blocks}")
        return cls((blocks[0], 32 * blocks[2], blocks[1]))

    def axes(self, role: str) -> Axes:
        del role
        return {0: Axis(0), 1: Axis(2, 32), 2: Axis(1)}

    def combine(self, parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        del shape  # all entries are full
        blocks, scale = parts["blocks"], _scales(parts["scale"])
        if (native := _native(dtype)) is not None:
            return native.transposed(blocks.flatten(2), _fp4_table(), scale, 32, dtype)
        numbers = (_unpack_fp4(blocks) * scale[..., None]).to(dtype)
        return numbers.flatten(2).transpose(1, 2).contiguous()


@dataclass(frozen=True, slots=True)
class PackedIntegers:
    """Integers of 4 or 8 bits in words of 32: `packed`, `scale`, maybe `zero_point`, and maybe `groups`, which has the
    group of each input if their order is not that of the groups.
    """

    kind: str
    """compressed-tensors, gptq or awq: the order of the integers."""
    shape: tuple[int, ...]
    num_bits: int
    group: int
    """Inputs per scale."""
    has_groups: bool
    zero_offset: int
    """Added to stored zero points; without any, the zero point is half of the range."""
    roles = frozenset(("packed", "scale", "zero_point", "groups"))

    @classmethod
    def of(
        cls,
        kind: str,
        shapes: Shapes,
        shape: Sequence[int] | None = None,
        num_bits: int | None = None,
        zero_offset: int = 0,
        groups: Sequence[int] = (),
    ) -> "PackedIntegers":
        """The layout of stored tensors. `shape` and `num_bits` are derived from words that are full if they are not
        stated. `groups` are the sizes that the config states. Raises ValueError if the shapes disagree with each other
        or with these sizes.
        """
        packed, scale, zero_point = (list(shapes.get(role, ())) for role in ("packed", "scale", "zero_point"))
        if len(packed) != 2 or len(scale) != 2 or not all((*packed, *scale)):
            raise ValueError(f"the words have the shape {packed}, the scales {scale}")
        if kind != "compressed-tensors":  # these are transposed
            scale = scale[::-1]
        if shape is None:
            per_word = WORD_BITS // (num_bits or 4)
            shape = (packed[1] * per_word, packed[0]) if kind == "awq" else (packed[1], packed[0] * per_word)
        if len(shape) != 2 or min(shape) < 1:
            raise ValueError(f"the weight has the shape {list(shape)}")
        rows, columns = shape
        expected = {bits: _packed_shapes(kind, rows, columns, scale[1], bits) for bits in (4, 8)}
        num_bits = next((bits for bits in (4, 8) if expected[bits][0] == packed and num_bits in (None, bits)), None)
        if num_bits is None:
            raise ValueError(f"words of the shape {packed} hold no weight of {list(shape)} in 4 or 8 bits")
        if scale[0] != rows or columns % scale[1]:
            raise ValueError(f"scales have the shape {list(shapes['scale'])} for a weight of {list(shape)}")
        if zero_point and zero_point != expected[num_bits][1]:
            raise ValueError(f"zero points have the shape {zero_point} for scales of {list(shapes['scale'])}")
        if "groups" in shapes and list(shapes["groups"]) != [columns]:
            raise ValueError(f"groups have the shape {list(shapes['groups'])} for {columns:,} inputs")
        has_groups = "groups" in shapes
        if not has_groups:
            _check_group(columns, scale[1], groups)
        return cls(kind, (rows, columns), num_bits, columns // scale[1], has_groups, zero_offset)

    @property
    def name(self) -> str:
        groups = "by channel" if self.group == self.shape[1] else f"in groups of {self.group}"
        return f"{self.kind} int{self.num_bits} {groups}"

    def axes(self, role: str) -> Axes:
        if role == "groups":
            return {1: Axis(0)}
        outputs, inputs = (1, 0) if self._is_transposed else (0, 1)
        per_word, packed = WORD_BITS // self.num_bits, self._packed_dim(role)
        found = {0: Axis(outputs, per_word if packed == outputs else 1)}
        if role == "packed":
            found[1] = Axis(inputs, per_word if packed == inputs else 1)
        elif not self.has_groups:
            found[1] = Axis(inputs, self.group)
        return found

    def _packed_dim(self, role: str) -> int | None:
        """The dim along which the words of a stored tensor hold integers; None for scales."""
        if role not in ("packed", "zero_point"):
            return None
        match self.kind:
            case "compressed-tensors":
                return 1 if role == "packed" else 0
            case "gptq":
                return 0 if role == "packed" else 1
            case _:
                return 1

    def combine(self, parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        rows, columns = shape
        scale = parts["scale"].to(torch.float32)
        scale = (scale.T if self._is_transposed else scale)[:rows]
        groups = parts["groups"].long() if self.has_groups else torch.arange(columns) // self.group
        if self.has_groups and not 0 <= int(groups.min()) <= int(groups.max()) < scale.shape[1]:
            raise ValueError(f"an input has a group outside of 0 to {scale.shape[1] - 1}")
        stored_zero = self._zero_points(parts, rows)
        half = torch.full_like(scale, 1 << (self.num_bits - 1))
        zero = half if stored_zero is None else stored_zero.to(torch.float32)
        native = _native(dtype)
        if native is not None and self._is_compiled(parts, rows, columns):
            return self._combine_native(native, parts["packed"], scale, zero, groups, (rows, columns), dtype)
        numbers = self._unpack(parts, "packed")[:rows, :columns].to(torch.float32)
        return ((numbers - zero[:, groups]) * scale[:, groups]).to(dtype)

    def integers(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor | None]:
        """The integers, from 0, of this part of the weight, the scales [outputs, groups], and zero points if there are
        any.
        """
        rows, columns = shape
        scale = parts["scale"].T if self._is_transposed else parts["scale"]
        return self._unpack(parts, "packed")[:rows, :columns], scale[:rows], self._zero_points(parts, rows)

    def _zero_points(self, parts: Mapping[str, Tensor], rows: int) -> Tensor | None:
        """The zero points [outputs, groups], if there are any."""
        if "zero_point" not in parts:
            return None
        stored = self._unpack(parts, "zero_point")
        if self.zero_offset and int(stored.max()) == (1 << self.num_bits) - 1:
            raise ValueError("a zero point overflows when 1 is added, and readers of this format differ there")
        return stored[:rows] + self.zero_offset

    def _is_compiled(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> bool:
        """Whether compiled code has this form: all words are full, and groups have an order that it knows."""
        per_word, packed = WORD_BITS // self.num_bits, list(parts["packed"].shape)
        match self.kind:
            case "compressed-tensors":
                return packed == [rows, columns / per_word] and not self.has_groups and self.group % 2 == 0
            case "gptq":
                return self.num_bits == 4 and packed == [columns / 8, rows] and rows % 8 == 0
            case _:
                return packed == [columns, rows / 8] and columns % 8 == 0

    def _combine_native(
        self,
        native: NativeDequantize,
        packed: Tensor,
        scale: Tensor,
        zero: Tensor,
        groups: Tensor,
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> Tensor:
        """Scales and zero points are [outputs, groups]."""
        if self.kind == "compressed-tensors":
            table = torch.arange(1 << self.num_bits, dtype=torch.float32)
            block = (1, min(self.group, shape[1]))
            return native.row_major(packed, table, scale.contiguous(), zero.contiguous(), shape, block, dtype)
        shifts = torch.tensor(AWQ_SHIFTS, dtype=torch.int32) if self.kind == "awq" else None
        scales, zeros = scale.T.contiguous(), zero.T.contiguous()
        return native.from_words(packed, shifts, groups.to(torch.int32), scales, zeros, shape, dtype)

    @property
    def _is_transposed(self) -> bool:
        return self.kind != "compressed-tensors"

    def _unpack(self, parts: Mapping[str, Tensor], role: str) -> Tensor:
        """The integers of packed words, from 0: [outputs, inputs or groups]."""
        words, per_word = parts[role], WORD_BITS // self.num_bits
        dim = self._packed_dim(role)
        assert dim is not None
        shifts = AWQ_SHIFTS if self.kind == "awq" else range(0, WORD_BITS, self.num_bits)
        found = [(words >> shift) & ((1 << self.num_bits) - 1) for shift in shifts]
        shape = list(words.shape)
        shape[dim] *= per_word
        unpacked = torch.stack(found, dim=dim + 1).reshape(shape)
        return unpacked.T if self._is_transposed else unpacked


def _packed_shapes(kind: str, rows: int, columns: int, num_groups: int, num_bits: int) -> tuple[list[int], list[int]]:
    """The shapes of packed weights and zero points."""

    def words(count: int) -> int:
        return ceil(count * num_bits / WORD_BITS)

    match kind:
        case "compressed-tensors":
            return [rows, words(columns)], [words(rows), num_groups]
        case "gptq":
            return [words(columns), rows], [num_groups, words(rows)]
        case _:
            return [columns, words(rows)], [num_groups, words(rows)]


@cache
def _loaded() -> NativeDequantize | None:
    """The compiled functions; None without a compiler."""
    try:
        return NativeDequantize.load()
    except OSError as error:
        log.info("weights: dequantized without compiled code, which is slower: %s", error)
        return None


def _native(dtype: torch.dtype) -> NativeDequantize | None:
    """The compiled functions, if they support the dtype."""
    return _loaded() if dtype in dequantize.DTYPES else None


@cache
def _table(dtype: torch.dtype) -> Tensor:
    """The numbers of all bytes of a dtype, in float32."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)


@cache
def _fp4_table() -> Tensor:
    return torch.tensor(FP4_VALUES)


def scale_grid(scale: Sequence[int], lead: Sequence[int]) -> tuple[int, int]:
    """Number of rows and columns of scales: the shape is [lead..., rows, columns], [lead..., rows], or [lead...]."""
    lead = list(lead)
    own = list(scale[len(lead) :]) if list(scale[: len(lead)]) == lead else None
    match own:
        case [rows, columns]:
            return rows, columns
        case [rows]:
            return rows, 1
        case []:
            return 1, 1
        case _:
            raise ValueError(f"scales have the shape {list(scale)}")


def _check_group(columns: int, num_groups: int, stated: Sequence[int]) -> None:
    """Raises ValueError if groups of inputs have another size than the config states."""
    if num_groups > 1 and stated and columns // num_groups not in stated:
        sizes = " or ".join(map(str, stated))
        raise ValueError(f"it has {num_groups:,} groups of {columns:,} inputs, not groups of {sizes}")


def _times(block: Sequence[int]) -> str:
    return "x".join(map(str, block))


def _scales(stored: Tensor) -> Tensor:
    """Scales in float32. Bytes are exponents of 2 with a bias of 127 (E8M0)."""
    if stored.dtype == torch.uint8:
        exponents = stored.to(torch.float32) - 127
        return torch.where(stored == 255, torch.nan, exponents.exp2())
    return stored.to(torch.float32)


def _unpack_fp4(packed: Tensor) -> Tensor:
    """The numbers of bytes [..., n] as float32 [..., 2 n]."""
    return torch.tensor(FP4_VALUES)[unpack_bytes(packed).long()]


def unpack_bytes(packed: Tensor) -> Tensor:
    """The numbers of 4 bits of bytes [..., n], the first in the low bits: [..., 2 n]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
