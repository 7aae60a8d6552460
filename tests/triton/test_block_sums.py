"""Attribution of the attention kernels to blocks of keys, compared with float64, and its sums, compared with those on
CPUs.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longleaf.attention.block_attribution import BLOCK, NO_EDGE, AttributionColumns, BlockSums, attributed_read, table
from longleaf.attention.masks import Read, Reads
from longleaf.kernels import int8
from longleaf.kernels.backend import AttributionBackend
from longleaf.kernels.cpu.block_attribution import NativeBlockAttribution
from longleaf.kernels.gpu.backend import TritonKernels
from tests.support.attention.partials import seeds
from tests.support.attention.told import Dense, check_sums, drawn_reads

SCALE, KEY_HEADS, BLOCK_SIZE = 0.4, 2, 64
KERNELS = TritonKernels(4)


class Layer:
    """Queries of a type over keys and values of the same type, or in 8 bits; slots outside all reads are NaN."""

    def __init__(self, seed, num_rows, group, dim, kind, dtype, num_slots):
        generator = torch.Generator().manual_seed(seed)
        num_slots = -(-num_slots // BLOCK_SIZE) * BLOCK_SIZE
        self.q = torch.randn(num_rows, KEY_HEADS * group, dim, generator=generator).to(dtype)
        keys, values = (torch.randn(KEY_HEADS, num_slots, dim, generator=generator).to(dtype) for _ in range(2))
        self.layer, self.keys, self.values = None, keys, values
        if kind == "int8":
            self.layer = int8.empty(KEY_HEADS, num_slots // BLOCK_SIZE, BLOCK_SIZE, dim)
            int8.write(self.layer, torch.arange(num_slots), keys, values)
            self.keys = int8.keys_between(self.layer, 0, num_slots)
        if kind == "latent":
            self.values = keys[..., : dim // 2]

    def attend(self, reads, cap=None, kernels=KERNELS):
        if self.layer is not None:
            return kernels.attend_int8(self.q, self.layer, reads, SCALE, cap)
        return kernels.attend(self.q, self.keys, self.values, reads, SCALE, cap)


@pytest.fixture
def any_cut(monkeypatch):
    """Pieces may be as short as a tile."""
    monkeypatch.setattr("longleaf.kernels.gpu.work_items.MIN_PIECE", 1)


@pytest.mark.usefixtures("any_cut")
@pytest.mark.parametrize("kind", ["alike", "latent", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@settings(max_examples=8, deadline=None)
@given(
    data=st.data(),
    seed=seeds,
    num_rows=st.integers(1, 24),
    group=st.integers(1, 3),
    dim=st.sampled_from([16, 64]),
    cap=st.sampled_from([None, 3.0]),
    tile_keys=st.sampled_from([64, 128]),
    num_multiprocessors=st.sampled_from([1, 4, 13]),
)
def test_blocks_have_the_shares_of_dense_attention_and_change_no_bit(
    kind, dtype, data, seed, num_rows, group, dim, cap, tile_keys, num_multiprocessors
):
    """With tiles and pieces of any size, and in memory that holds the attribution of another layer."""
    reads, reported, num_slots = drawn_reads(data, num_rows)
    layer, before = (Layer(seed + i, num_rows, group, dim, kind, dtype, num_slots) for i in range(2))
    kernels, sums = TritonKernels(num_multiprocessors), BlockSums(reported)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longleaf.kernels.gpu.constants.MAX_TILE_KEYS", tile_keys)
        plain, asking = layer.attend(Reads(reads), cap, kernels), Reads(reads)
        asking.attributed = sums
        before.attend(asking, cap, kernels)
        partial = layer.attend(asking, cap, kernels)
    assert torch.equal(partial.out_THD, plain.out_THD) and torch.equal(partial.lse_TH, plain.lse_TH)
    reported_KE2 = sums.take()
    assert reported_KE2 is not None and sums.take() is None
    check_sums(Dense(layer.q, layer.keys, SCALE, cap), reads, sums, reported_KE2, partial)


def attributed_reads(*reads):
    """All rows of some reads are attributed."""
    found, reported = Reads(reads), []
    for read in reads:
        reported.append(attributed_read(read[2:4], reported[-1].end if reported else 0, read[:2]))
    found.attributed = BlockSums(reported)
    return found


@pytest.mark.usefixtures("any_cut")
@pytest.mark.parametrize("num_multiprocessors", [1, 3, 40])
def test_slots_outside_the_reads_do_not_matter(num_multiprocessors):
    """Before the first key of a block, or behind the last one."""
    layer, reads = (
        Layer(3, 3, 2, 16, "alike", torch.float32, 700),
        attributed_reads(Read(0, 3, 45, 333), Read(1, 2, 350, 351)),
    )
    wanted = layer.attend(reads)
    for tensor in (layer.keys, layer.values):
        for low, high in ((0, 45), (333, 350), (351, 700)):
            tensor[:, low:high] = torch.nan
    found = layer.attend(reads, kernels=TritonKernels(num_multiprocessors))
    torch.testing.assert_close(found.out_THD, wanted.out_THD)
    assert reads.attributed.take().isfinite().all()


def test_blocks_that_are_larger_than_a_tile_are_not_attributed(monkeypatch):
    monkeypatch.setattr("longleaf.kernels.gpu.constants.MAX_TILE_KEYS", BLOCK // 2)
    layer, reads = Layer(3, 2, 1, 16, "alike", torch.float32, 100), attributed_reads(Read(0, 2, 3, 90))
    layer.attend(reads)
    assert reads.attributed.take() is None


def test_blocks_of_8_bit_keys_of_another_alignment_are_not_attributed():
    retained = int8.empty(KEY_HEADS, 5, 20, 16)
    int8.write(retained, torch.arange(100), *torch.ones(2, KEY_HEADS, 100, 16))
    reads = attributed_reads(Read(0, 2, 3, 90))
    KERNELS.attend_int8(torch.ones(2, KEY_HEADS, 16), retained, reads, SCALE)
    assert reads.attributed.take() is None


def drawn_columns(data, num_rows, num_entries):
    """Attribution rows, each with runs of entries that count into some columns."""
    runs, attribution_rows, row = [], [], 0
    while row < num_rows:
        end, first_run = data.draw(st.integers(row + 1, num_rows)), len(runs)
        for one in range(row, end):
            for _ in range(data.draw(st.integers(0, 3))):
                first, last = sorted(data.draw(st.lists(st.integers(0, num_entries), min_size=2, max_size=2)))
                per_column = data.draw(st.sampled_from([1, 2, 4, NO_EDGE]))
                before = data.draw(st.integers(0, min(per_column, 40) - 1))
                column = data.draw(st.integers(0, 3))
                runs.append((one, one * num_entries, num_entries, first, last, column, before, per_column))
        attribution_rows.append((row, end, first_run, len(runs)))
        row = end
    return AttributionColumns(table(runs, 8), table(attribution_rows, 4))


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    seed=seeds,
    num_rows=st.integers(1, 5),
    num_entries=st.integers(1, 40),
    group=st.integers(1, 3),
    has_sinks=st.booleans(),
)
def test_shares_add_up_as_those_of_the_cpu(data, seed, num_rows, num_entries, group, has_sinks):
    generator, columns = torch.Generator().manual_seed(seed), drawn_columns(data, num_rows, num_entries)
    sums = BlockSums([attributed_read((0, num_entries * BLOCK), 0, (0, num_rows))])
    reported_KE2 = sums.room(KEY_HEADS, group)
    reported_KE2.copy_(torch.rand(reported_KE2.shape, generator=generator))
    lse = torch.randn(KEY_HEADS * group, num_rows, generator=generator).T  # as merges hand it over
    sinks = torch.randn(KEY_HEADS * group, generator=generator) if has_sinks else None
    shape, found = (len(columns.rows), 50), []
    for add in (NativeBlockAttribution.load(), KERNELS.add_shares):
        found.append((torch.zeros(shape), torch.full(shape, -1.0), torch.zeros(shape, dtype=torch.int32)))
        for layer in range(2):
            place = {"sink_column": 49, "first_head": layer << 16}
            add(reported_KE2 + layer * 0.1, lse, sinks, columns, found[-1], **place)
    (means, largest, heads), (other_means, other_largest, other_heads) = found
    torch.testing.assert_close(other_means, means, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(other_largest, largest, atol=1e-5, rtol=1e-5)
    assert torch.equal(other_heads, heads)


def test_what_was_not_seen_has_no_share_whatever_is_written_there():
    columns = AttributionColumns(table([(0, 0, 2, 0, 2, 0, 0, 1)], 8), table([(0, 1, 0, 1)], 4))
    reported_KE2 = torch.tensor([[[900.0, 0.0], [-5.0, 1.0]]])
    found = (torch.zeros(1, 3), torch.full((1, 3), -1.0), torch.zeros(1, 3, dtype=torch.int32))
    KERNELS.add_shares(reported_KE2, torch.full((1, 1), -5.0), None, columns, found, sink_column=2, first_head=7)
    assert found[0].tolist() == found[1].tolist() == [[0.0, 1.0, 0.0]] and found[2].tolist() == [[7, 7, 7]]


def test_the_backend_supports_attribution():
    assert isinstance(KERNELS, AttributionBackend)
