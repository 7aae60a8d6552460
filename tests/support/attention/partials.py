"""Partials that are compared."""

import torch
from hypothesis import strategies as st

from longleaf.attention import Partial

TOLERANCE = 2e-6


seeds = st.integers(0, 2**31)


def assert_same(a: Partial, b: Partial, atol=TOLERANCE):
    torch.testing.assert_close(a.out_THD.double(), b.out_THD.double(), atol=atol, rtol=atol)
    torch.testing.assert_close(a.lse_TH.double(), b.lse_TH.double(), atol=atol, rtol=atol)
