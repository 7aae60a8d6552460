"""The division of parameters into parts and shares: which slices of a parameter belong to a share.

Sizes need not be divisible. The bounds of the even shares at the start are multiples of a power of two where that
changes a share by at most 2 %: matrix products are faster over aligned slices, and grouped products require them. The
bounds of all parts have the same alignment, so parts of small parameters may be empty.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor

from longleaf.shares import even_share

MAX_ALIGNMENT = 64
MAX_UNEVENNESS = 0.02
"""Largest change of an even share by its alignment, relative to the share."""

Range = tuple[int, int]
"""The first of some elements, and the last plus one."""


@dataclass(frozen=True, slots=True)
class Share:
    """Parts of the weights of a model, in ascending order."""

    parts: tuple[int, ...]
    count: int
    """The number of even shares, from which the bounds of parts derive: that of the ranks at the start."""

    @classmethod
    def even(cls, index: int, count: int) -> Self:
        """One of `count` even shares."""
        return cls(even_share(index, count), count)

    @property
    def has_first(self) -> bool:
        """Whether part 0 belongs to this share."""
        return 0 in self.parts

    def ranges(self, size: int, least_alignment: int = 1) -> list[Range]:
        """The elements, of `size`, that belong to this share, in ascending order: at least one range, which may be
        empty.
        """
        edges = part_edges(size, self.count, least_alignment)
        found = list[Range]()
        for start, end in ((edges[part], edges[part + 1]) for part in self.parts):
            if start == end:
                continue
            if found and found[-1][1] == start:
                found[-1] = (found[-1][0], end)
            else:
                found.append((start, end))
        return found or [(0, 0)]


@lru_cache(maxsize=1024)
def part_edges(size: int, count: int, least_alignment: int = 1) -> tuple[int, ...]:
    """The bounds between the parts of `size` elements, from 0 to `size`. `count` even shares have equal sizes, and
    parts have equal sizes within each of these shares.
    """
    alignment = MAX_ALIGNMENT
    while alignment > least_alignment and alignment * count > MAX_UNEVENNESS * size:
        alignment //= 2
    edges = list[int]()
    for index in range(count):
        num_parts = len(even_share(index, count))
        starts = (size * (index * num_parts + i) // (count * num_parts) for i in range(num_parts))
        edges += [start // alignment * alignment for start in starts]
    return (*edges, size)


@dataclass(frozen=True, slots=True)
class Cut:
    """The dim of a parameter that is divided into parts."""

    dim: int
    num_blocks: int = 1
    """The dim holds several blocks of equal size, one after the other, each of which is divided."""
    unit: int = 1
    """Number of neighboring elements that stay together."""
    least_alignment: int = 1
    """A power of two, of which the bounds are multiples, before they are multiplied by the unit."""

    def ranges(self, size: int, share: Share) -> list[Range]:
        """The ranges of a dim of `size` elements that belong to a share."""
        block = size // self.num_blocks
        own = share.ranges(block // self.unit, self.least_alignment)
        return [
            (first + start * self.unit, first + end * self.unit)
            for first in range(0, size, block)
            for start, end in own
        ]

    def shape(self, shape: tuple[int, ...], share: Share) -> tuple[int, ...]:
        """The shape of a share of a parameter of this shape."""
        size = num_elements(self.ranges(shape[self.dim], share))
        return (*shape[: self.dim], size, *shape[self.dim + 1 :])


def growth_bytes(sizes: Sequence[int], num_present: int, num_parts: int) -> int:
    """Bytes that a rank needs to hold `num_parts` parts, beside those of the `num_present` parts that it holds.
    `sizes`: the bytes of its share of each divided parameter. While a parameter is replaced, there are two of it.
    """
    num_more = max(0, num_parts - num_present)
    return int((num_more * sum(sizes) + num_parts * max(sizes, default=0)) / num_present) if num_more else 0


def num_elements(ranges: Iterable[Range]) -> int:
    """The total size of ranges."""
    return sum(end - start for start, end in ranges)


def select(wanted: Sequence[Range], sources: Sequence[tuple[Sequence[Range], Tensor]], dim: int) -> Tensor:
    """The wanted ranges of a dim, as a new tensor, from tensors that hold disjoint ranges of it. Raises ValueError if
    no source holds an element.
    """
    slices = list[Tensor]()
    for start, end in wanted:
        overlaps = list[tuple[int, Tensor]]()
        for ranges, tensor in sources:
            offset = 0
            for first, last in ranges:
                low, high = max(start, first), min(end, last)
                if low < high:
                    overlaps.append((low, tensor.narrow(dim, offset + low - first, high - low)))
                offset += last - first
        if sum(one.shape[dim] for _, one in overlaps) != end - start:
            raise ValueError(f"elements {start} to {end} are not held")
        slices += [one for _, one in sorted(overlaps, key=lambda overlap: overlap[0])]
    if not slices:
        return sources[0][1].narrow(dim, 0, 0).clone()
    return torch.cat(slices, dim=dim)


def take(parameter: Tensor, cut: Cut, share: Share) -> Tensor:
    """The slice of a parameter that belongs to a share, as a new tensor."""
    size = parameter.shape[cut.dim]
    return select(cut.ranges(size, share), [([(0, size)], parameter)], cut.dim)
