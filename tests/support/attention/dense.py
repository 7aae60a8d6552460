"""The visibility of keys as a dense mask: the oracle of all code that cuts masks into reads."""

import torch
from hypothesis import strategies as st

from longleaf.positions import AttentionSpan


def visible(queries: range, keys: range, reach: AttentionSpan) -> torch.Tensor:
    """[Q, S], true where the query at a position sees the key at a position."""
    query_Q1, key_1S = torch.tensor(queries)[:, None], torch.tensor(keys)[None]
    seen_QS = key_1S <= query_Q1
    if reach.window is not None:
        seen_QS &= query_Q1 - key_1S < reach.window
    if reach.section is not None:
        seen_QS &= query_Q1.div(reach.section, rounding_mode="floor") == key_1S.div(
            reach.section, rounding_mode="floor"
        )
    return seen_QS


def reaches(least: int = 1, most: int = 40) -> st.SearchStrategy[AttentionSpan]:
    """Everything, windows and sections."""
    sizes = st.integers(least, most)
    return st.one_of(
        st.just(AttentionSpan()), sizes.map(AttentionSpan), sizes.map(lambda size: AttentionSpan(section=size))
    )
