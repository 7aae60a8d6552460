"""The division of weights into shares, one per rank: which slice of a parameter belongs to a share.

Sizes need not be divisible by the number of shares. Bounds are multiples of a power of two where that changes a share
by at most 2 %: matrix products are faster over aligned slices, and grouped products require them.
"""

from dataclasses import dataclass
from itertools import pairwise

MAX_ALIGNMENT = 64
MAX_UNEVENNESS = 0.02
"""Largest change of a share by its alignment, relative to the share."""


@dataclass(frozen=True, slots=True)
class Share:
    """One of `count` shares of the weights of a model."""

    index: int
    count: int

    def bounds(self, size: int, least_alignment: int = 1) -> tuple[int, int]:
        """The first and the last plus one of `size` elements that belong to this share."""
        edges = share_edges(size, self.count, least_alignment)
        return edges[self.index], edges[self.index + 1]


def share_edges(size: int, count: int, least_alignment: int = 1) -> tuple[int, ...]:
    """The bounds between `count` shares of `size` elements, from 0 to `size`."""
    alignment = MAX_ALIGNMENT
    while alignment > least_alignment and alignment * count > MAX_UNEVENNESS * size:
        alignment //= 2
    return (*(size * index // count // alignment * alignment for index in range(count)), size)


def share_sizes(size: int, count: int) -> list[int]:
    """The number of elements of each share."""
    return [end - start for start, end in pairwise(share_edges(size, count))]


@dataclass(frozen=True, slots=True)
class Cut:
    """The dim of a parameter that is divided into shares."""

    dim: int
    num_blocks: int = 1
    """The dim holds several blocks of equal size, one after the other, each of which is divided."""
    unit: int = 1
    """Number of neighboring elements that stay together."""
    least_alignment: int = 1
    """A power of two, of which the bounds are multiples, before they are multiplied by the unit."""

    def ranges(self, size: int, share: Share) -> list[tuple[int, int]]:
        """The ranges of a dim of `size` elements that belong to a share."""
        block = size // self.num_blocks
        start, end = (edge * self.unit for edge in share.bounds(block // self.unit, self.least_alignment))
        return [(first + start, first + end) for first in range(0, size, block)]

    def shape(self, shape: tuple[int, ...], share: Share) -> tuple[int, ...]:
        """The shape of a share of a parameter of this shape."""
        size = sum(end - start for start, end in self.ranges(shape[self.dim], share))
        return (*shape[: self.dim], size, *shape[self.dim + 1 :])
