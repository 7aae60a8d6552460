"""Parts and shares of a size: complete, in order, even shares of nearly equal size."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longleaf.shares import NUM_PARTS
from workers.model.weight_parts import take
from workers.model.weight_shares import Cut, Share, num_elements, part_edges, select


@given(st.integers(1, 100_000), st.integers(1, 16))
def test_even_shares_are_complete_and_nearly_equal(size, count):
    edges = part_edges(size, count)
    assert (edges[0], edges[-1], len(edges)) == (0, size, NUM_PARTS + 1)
    assert list(edges) == sorted(edges)
    sizes = [num_elements(Share.even(index, count).ranges(size)) for index in range(count)]
    assert sum(sizes) == size
    assert max(sizes) <= size / count * 1.02 + 1
    assert all(len(Share.even(index, count).ranges(size)) == 1 for index in range(count))


@given(st.integers(1, 4096), st.integers(1, 16), st.sampled_from([1, 8, 16]))
def test_bounds_are_aligned(size, count, alignment):
    assert not any(edge % alignment for edge in part_edges(size, count, alignment)[:-1])


def test_bounds_of_large_sizes_are_aligned():
    assert not any(edge % 64 for edge in part_edges(14336, 3))


@given(st.integers(1, 5000), st.integers(1, 9), st.sampled_from([1, 8]), st.integers(0, 1 << 32))
def test_any_shares_together_have_each_element_once(size, count, alignment, seed):
    holders = torch.randint(3, (NUM_PARTS,), generator=torch.Generator().manual_seed(seed)).tolist()
    shares = [Share(tuple(part for part in range(NUM_PARTS) if holders[part] == one), count) for one in range(3)]
    ranges = [one for share in shares for one in share.ranges(size, alignment) if one[0] < one[1]]
    assert [0, *(end for _, end in sorted(ranges))] == [*(start for start, _ in sorted(ranges)), size]


CUTS = [Cut(0), Cut(1, num_blocks=2), Cut(1, unit=2), Cut(1, num_blocks=2, least_alignment=4)]


@pytest.mark.parametrize("cut", CUTS)
def test_the_slices_of_all_shares_are_the_parameter(cut):
    parameter = torch.arange(11 * 48).view(11, 48)
    shares = [Share.even(index, 3) for index in range(3)]
    slices = [take(parameter, cut, share) for share in shares]
    assert [tuple(one.shape) for one in slices] == [cut.shape((11, 48), share) for share in shares]
    chunks = [one.chunk(cut.num_blocks, cut.dim) for one in slices]
    blocks = [torch.cat(parts, dim=cut.dim) for parts in zip(*chunks, strict=True)]
    assert torch.equal(torch.cat(blocks, dim=cut.dim), parameter)


@pytest.mark.parametrize("cut", CUTS)
def test_a_share_is_put_together_from_others(cut):
    parameter = torch.arange(11 * 48).view(11, 48)
    size = parameter.shape[cut.dim]
    shares = [Share(tuple(range(first, NUM_PARTS, 3)), 3) for first in range(3)]
    sources = [(cut.ranges(size, share), take(parameter, cut, share)) for share in shares]
    wanted = Share(tuple(range(50, 170)), 3)
    assert torch.equal(select(cut.ranges(size, wanted), sources, cut.dim), take(parameter, cut, wanted))
    with pytest.raises(ValueError, match="are not held"):
        select(cut.ranges(size, wanted), sources[:2], cut.dim)


def test_a_share_without_parts_is_empty():
    assert Cut(0).shape((48, 7), Share((), 3)) == (0, 7)
    assert take(torch.ones(48, 7), Cut(0), Share((), 3)).shape == (0, 7)


def test_blocks_and_units_stay_together():
    assert Cut(0, num_blocks=2).ranges(12, Share.even(1, 3)) == [(2, 4), (8, 10)]
    assert Cut(0, unit=2).ranges(12, Share.even(1, 3)) == [(4, 8)]
