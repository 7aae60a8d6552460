"""Shares of a size: complete, in order, of nearly equal size."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.model.weight_parts import take
from workers.model.weight_shares import Cut, Share, share_edges, share_sizes


@given(st.integers(1, 100_000), st.integers(1, 16))
def test_shares_are_complete_and_nearly_equal(size, count):
    edges = share_edges(size, count)
    assert (edges[0], edges[-1]) == (0, size)
    assert list(edges) == sorted(edges)
    assert sum(share_sizes(size, count)) == size
    assert max(share_sizes(size, count)) <= size / count * 1.02 + 1


@given(st.integers(1, 4096), st.integers(1, 16), st.sampled_from([1, 8, 16]))
def test_bounds_are_aligned(size, count, alignment):
    assert not any(edge % alignment for edge in share_edges(size, count, alignment)[:-1])


def test_bounds_of_large_sizes_are_aligned():
    assert not any(edge % 64 for edge in share_edges(14336, 3))


@pytest.mark.parametrize("cut", [Cut(0), Cut(1, num_blocks=2), Cut(1, unit=2), Cut(1, num_blocks=2, least_alignment=4)])
def test_the_slices_of_all_shares_are_the_parameter(cut):
    parameter = torch.arange(11 * 48).view(11, 48)
    shares = [Share(index, 3) for index in range(3)]
    slices = [take(parameter, cut, share) for share in shares]
    assert [tuple(one.shape) for one in slices] == [cut.shape((11, 48), share) for share in shares]
    chunks = [one.chunk(cut.num_blocks, cut.dim) for one in slices]
    blocks = [torch.cat(parts, dim=cut.dim) for parts in zip(*chunks, strict=True)]
    assert torch.equal(torch.cat(blocks, dim=cut.dim), parameter)


def test_blocks_and_units_stay_together():
    assert Cut(0, num_blocks=2).ranges(12, Share(1, 3)) == [(2, 4), (8, 10)]
    assert Cut(0, unit=2).ranges(12, Share(1, 3)) == [(4, 8)]
