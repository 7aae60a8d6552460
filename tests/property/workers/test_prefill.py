"""A chunk or row over keys that are dealt over ranks, on every merge and either way, against a dense float64 mask."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longleaf.merge import MERGES
from longleaf.positions import AttentionSpan
from longleaf.runs import Run
from tests.support.attention.dealt import Case, cases, decode, lose, prefill, read
from tests.support.attention.dense import reaches, visible
from workers.model.model import LayerSpec
from workers.step.gathered_prefill import before_pieces


@pytest.mark.parametrize("way", ["queries", "keys", "auto"])
@settings(max_examples=50, deadline=None)
@given(case=cases(), merge=st.sampled_from(sorted(MERGES)))
def test_a_chunk_sees_what_a_dense_mask_shows(way, case, merge):
    found, _ = prefill(case, way, merge)
    torch.testing.assert_close(found.double(), case.expected(), atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("way", ["queries", "keys", "auto"])
@settings(max_examples=70, deadline=None)
@given(case=cases(most_new=150), merge=st.sampled_from(sorted(MERGES)))
def test_what_was_lost_sees_what_a_dense_mask_shows(way, case, merge):
    """Pieces that are no neighbours: each sees those before it, all that is held between them, and nothing behind."""
    resident, pieces = lose(case)
    found, _ = read(case, resident, pieces, way, merge)
    positions = [position - case.start for piece in pieces for position in range(piece.start, piece.end)]
    torch.testing.assert_close(found.double(), case.expected()[positions], atol=5e-6, rtol=5e-6)


@settings(max_examples=60, deadline=None)
@given(case=cases(most_new=6), merge=st.sampled_from(sorted(MERGES)))
def test_rows_see_what_a_dense_mask_shows_on_every_rank(case, merge):
    for found in decode(case, merge):
        torch.testing.assert_close(found.double(), case.expected(), atol=5e-6, rtol=5e-6)


FULL = {"seed": 0, "softcap": None, "has_sink": False, "world_size": 3}


@settings(max_examples=60, deadline=None)
@given(case=cases(most_new=60), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@example(Case(lengths=(36,), spec=LayerSpec(8, 1, 16, AttentionSpan()), **FULL), torch.float32)
@example(Case(lengths=(90, 6), spec=LayerSpec(2, 2, 16, AttentionSpan()), **FULL), torch.float32)
@example(Case(lengths=(90, 6), spec=LayerSpec(4, 1, 16, AttentionSpan(), latent_dim=8), **FULL), torch.float32)
def test_auto_sends_what_is_fewer_bytes(case, dtype):
    queries, keys, auto = (prefill(case, way, dtype=dtype)[1] for way in ("queries", "keys", "auto"))
    assert len(queries) == len(keys) == 1, "all ranks send alike"
    assert auto == min(queries, keys, key=min)


def test_beyond_what_may_be_gathered_the_queries_travel(monkeypatch):
    case = Case(lengths=(36,), spec=LayerSpec(8, 1, 16, AttentionSpan()), **FULL)
    queries, keys = (prefill(case, way)[1] for way in ("queries", "keys"))
    assert min(keys) < min(queries)
    monkeypatch.setattr("workers.step.gathered_prefill.MAX_GATHERED", 3 * 12 - 1)
    assert prefill(case, "keys")[1] == prefill(case, "auto")[1] == queries


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=5),
    st.integers(0, 50),
    reaches(),
)
def test_what_lies_before_pieces_is_what_some_row_sees_elsewhere(sizes, start, reach):
    bounds = [start]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    pieces = [Run(i, low, high, ()) for i, (low, high) in enumerate(zip(bounds[:-1], bounds[1:], strict=True))]
    seen = set()
    for run in pieces:
        seen.update(visible(range(run.start, run.end), range(run.start), reach).any(dim=0).nonzero().flatten().tolist())
    ranges = before_pieces(pieces, reach)
    assert [p for low, high in ranges for p in range(low, high)] == sorted(seen)
    assert all(high < low for (_, high), (low, _) in zip(ranges[:-1], ranges[1:], strict=True))
