"""The attribution of the compiled decode kernel to blocks of keys, and its sums, compared with float64."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longleaf.attention.block_attribution import BLOCK, AttributionColumns, BlockSums, attributed_read, table
from longleaf.attention.masks import Reads
from longleaf.kernels import int8
from longleaf.kernels.cpu.block_attribution import NativeBlockAttribution
from longleaf.kernels.cpu.decode import NativeDecode
from tests.support.attention.partials import seeds, torch_threads
from tests.support.attention.told import Dense, check_sums, drawn_reads

SCALE, KV_HEADS = 0.4, 2


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    seed=seeds,
    num_rows=st.integers(1, 24),
    group=st.integers(1, 3),
    dim=st.sampled_from([8, 64, 96]),
    cap=st.sampled_from([None, 3.0]),
    kind=st.sampled_from(["float32", "bfloat16", "int8"]),
    num_threads=st.integers(1, 4),
)
def test_blocks_have_the_shares_of_dense_attention_and_change_no_bit(
    data, seed, num_rows, group, dim, cap, kind, num_threads
):
    reads, reported, num_slots = drawn_reads(data, num_rows)
    generator, decode = torch.Generator().manual_seed(seed), NativeDecode.load()
    q = torch.randn(num_rows, KV_HEADS * group, dim, generator=generator)
    num_slots = -(-num_slots // 64) * 64
    keys, values = (torch.randn(KV_HEADS, num_slots, dim, generator=generator) for _ in range(2))
    if kind == "int8":
        retained = int8.empty(KV_HEADS, num_slots // 64, 64, dim, "cpu")
        int8.write(retained, torch.arange(num_slots), keys, values)
        keys = int8.keys_between(retained, 0, num_slots)
    else:
        keys, values = (each.to(getattr(torch, kind)) for each in (keys, values))

    def run(found):
        return (
            decode.over_int8(q, retained, found, SCALE, cap)
            if kind == "int8"
            else decode(q, keys, values, found, SCALE, cap)
        )

    asking = Reads(reads)
    asking.attributed = BlockSums(reported)
    with torch_threads(num_threads):
        plain, partial = run(Reads(reads)), run(asking)
    assert torch.equal(partial.out_THD, plain.out_THD) and torch.equal(partial.lse_TH, plain.lse_TH)
    reported_KE2 = asking.attributed.take()
    assert asking.attributed.take() is None
    check_sums(Dense(q, keys, SCALE, cap), reads, asking.attributed, reported_KE2, partial)


def test_shares_add_up_by_column_head_and_row():
    generator = torch.Generator().manual_seed(5)
    group, num_entries, num_rows = 2, 7, 3
    reported = BlockSums([attributed_read((0, num_entries * BLOCK), 0, (0, num_rows))])
    peaks, sums = reported.room(KV_HEADS, group).unbind(dim=2)
    peaks.copy_(torch.randn(peaks.shape, generator=generator).sort(dim=1).values)
    sums.copy_(torch.rand(sums.shape, generator=generator))
    lse, sinks = torch.full((num_rows, 4), 3.0), torch.arange(4.0)
    runs = [(row, row * num_entries, num_entries, 0, 6, 1, 1, 2) for row in range(num_rows)]
    columns = AttributionColumns(table(runs, 8), table([(0, 1, 0, 1), (1, 3, 1, 3)], 4))
    found = (torch.zeros(2, 6), torch.full((2, 6), -1.0), torch.zeros(2, 6, dtype=torch.int32))
    NativeBlockAttribution.load()(reported.take(), lse, sinks, columns, found, sink_column=5, first_head=100)

    shares = (sums * (peaks - 3.0).exp()).view(KV_HEADS, num_rows, group, num_entries).transpose(0, 1).flatten(1, 2)
    wanted = torch.zeros(num_rows, 4, 6)
    for entry in range(6):  # the first one's column has one more before it
        wanted[:, :, 1 + (entry + 1) // 2] += shares[:, :, entry]
    wanted[:, :, 5] = (sinks - 3.0).exp()
    wanted = torch.stack([wanted[0], wanted[1:].mean(dim=0)])
    torch.testing.assert_close(found[0], wanted.sum(dim=1))
    torch.testing.assert_close(found[1], wanted.amax(dim=1))
    assert (found[2] == 100 + wanted.argmax(dim=1)).all()
