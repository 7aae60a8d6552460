"""Partials that are compared."""

from collections.abc import Collection, Generator
from contextlib import contextmanager

import torch
from hypothesis import strategies as st

from longleaf.attention import Partial

TOLERANCE = 2e-6


seeds = st.integers(0, 2**31)


def assert_same(a: Partial, b: Partial, atol=TOLERANCE):
    torch.testing.assert_close(a.out_THD.double(), b.out_THD.double(), atol=atol, rtol=atol)
    torch.testing.assert_close(a.lse_TH.double(), b.lse_TH.double(), atol=atol, rtol=atol)


def random_partials(
    world_size: int, rows: int, heads: int = 3, dim: int = 5, empty: Collection[int] = ()
) -> list[Partial]:
    """One per rank, the same on every rank; those of the `empty` ranks have seen nothing."""
    generator = torch.Generator().manual_seed(world_size * 100 + rows)
    found = [
        Partial(torch.randn(rows, heads, dim, generator=generator), torch.randn(rows, heads, generator=generator) * 9)
        for _ in range(world_size)
    ]
    return [Partial.identity(rows, heads, dim) if rank in empty else part for rank, part in enumerate(found)]


@contextmanager
def torch_threads(number: int) -> Generator[None, None, None]:
    """Torch computes with this number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
