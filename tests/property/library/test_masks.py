"""Reads that are cut so that masks stay small, and masks that are made once for all layers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longleaf.attention import masks, reference
from longleaf.attention.masks import QueryRun, Read, band, cut, hidden, reads_within
from longleaf.kernels import dense, int8
from longleaf.kernels.cpu import flash
from longleaf.positions import AttentionSpan
from longleaf.runs import Extent
from tests.support.attention.dense import visible
from tests.support.attention.largest import Largest
from tests.support.attention.partials import assert_same

MIB = 1 << 20


@pytest.fixture
def made(monkeypatch):
    """Bytes of each mask, as they are made."""
    found = []

    def counted(*args):
        mask = band(*args)
        found.append(mask.nbytes)
        return mask

    monkeypatch.setattr(flash, "band", counted)
    return found


def counts(reads, num_rows, num_slots):
    """How often which row sees which slot, [T, S]."""
    found = torch.zeros(num_rows, num_slots, dtype=torch.long)
    for read in reads:
        rows, slots = slice(read.row_start, read.row_end), slice(read.slot_start, read.slot_end)
        shape = (rows.stop - rows.start, slots.stop - slots.start)
        found[rows, slots] += 1 if read.offset is None else ~hidden(*shape, read.offset, read.window)
    return found


@st.composite
def masked_reads(draw):
    row, slot = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    rows, keys = draw(st.integers(1, 40)), draw(st.integers(1, 60))
    window = draw(st.one_of(st.none(), st.integers(1, 50)))
    return Read(row, row + rows, slot, slot + keys, draw(st.one_of(st.none(), st.just(0), st.integers(-9, 70))), window)


@given(masked_reads(), st.integers(1, 20), st.integers(1, 30))
def test_parts_show_the_rows_the_same_keys_and_are_small(read, num_rows, most_keys):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "ROWS", num_rows)
        parts = list(cut(read, most_keys))
    assert torch.equal(counts(parts, 50, 70), counts([read], 50, 70))
    for part in parts:
        rows, keys = part.row_end - part.row_start, part.slot_end - part.slot_start
        is_plain = part.offset is None or part.is_causal
        is_small = rows <= num_rows and keys <= 2 * num_rows
        assert is_small or (is_plain and keys <= most_keys)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(-12, 20), st.one_of(st.none(), st.integers(1, 12)))
def test_a_mask_hides_what_is_ahead_or_beyond_the_window(num_queries, num_keys, offset, window):
    mask = band(num_queries, num_keys, offset, window)
    assert mask.dtype == torch.float32
    for i in range(num_queries):
        for j in range(num_keys):
            is_seen = 0 <= offset + i - j and (window is None or offset + i - j < window)
            assert (mask[i, j] == 0) == is_seen


def windowed(num_rows, past, window, dim=8):
    """Queries, keys, and the reads of rows after `past` keys."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(n, past + num_rows, dim, generator=generator) for n in (2, 1))
    query, reach = QueryRun(past, past + num_rows, 0), AttentionSpan(window=window)
    extents = (Extent(0, past, 0), Extent(past, past + num_rows, past))
    reads = [read for extent in extents for read in reads_within(query, extent, reach)]
    return q[:, past:].transpose(0, 1), k, reads


def test_masks_of_a_long_window_are_few_and_made_once_for_all_layers(made):
    """4096 rows under a window of 4096 once took 548 MiB at every layer."""
    q, k, reads = windowed(4096, 4096, 4096)
    kernel = flash.TorchFlashBackend().attend
    with Largest() as largest:
        first = kernel(q, k, k, reads, 0.3)
    assert sum(made) <= MIB
    assert largest.num_bytes <= MIB, "nor is anything else written out of that size"
    num_made = len(made)
    assert_same(kernel(q, k, k, reads, 0.3), first, atol=0)
    assert len(made) == num_made, "the second layer uses those of the first"
    some = slice(None, None, 97)
    seen = visible(range(4096, 8192)[some], range(8192), AttentionSpan(window=4096))
    wanted = reference.attend(q[some], k.transpose(0, 1), k.transpose(0, 1), seen, 0.3)
    assert_same(type(first)(first.out_THD[some], first.lse_TH[some]), wanted)


def test_keys_of_8_bits_use_the_same_masks(made):
    q, k, reads = windowed(600, 600, 500)
    retained, backend = int8.empty(1, 19, 64, 8), flash.TorchFlashBackend()
    int8.write(retained, torch.arange(1200), k, k)
    first = backend.attend_int8(q, retained, reads, 0.3)
    num_made = len(made)
    assert 0 < num_made <= 6
    assert_same(backend.attend_int8(q, retained, reads, 0.3), first, atol=0)
    assert len(made) == num_made


def test_at_most_32_mib_of_masks_are_cached():
    assert flash.MAX_MASKS * masks.ROWS * 2 * masks.ROWS * 4 <= 32 * MIB


def test_the_dense_kernel_writes_no_mask_that_is_larger_than_its_scores():
    q, k, reads = windowed(2048, 2048, 2048)
    with Largest() as largest:
        dense.DenseBackend().attend(q, k, k, reads, 0.3)
    assert largest.num_bytes <= 4 * dense.TILE_SCORES
