"""What the compiled decode kernel tells of blocks of keys, and what is added up of it, against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longleaf.attention.block_sums import BLOCK, NO_EDGE, BlockSums, Columns, table, told_read
from longleaf.attention.masks import Read, Reads
from longleaf.kernels import int8
from longleaf.kernels.cpu.decode import NativeDecode
from longleaf.kernels.cpu.shares import NativeShares
from tests.support.attention.partials import seeds

SCALE, KV_HEADS = 0.4, 2


def drawn_reads(data, num_rows):
    """Reads of slots one after the other, and what is told of them."""
    reads, told, slot, start = list[Read](), [], data.draw(st.integers(0, 40)), 0
    for _ in range(data.draw(st.integers(1, 4))):
        rows = sorted(data.draw(st.lists(st.integers(0, num_rows), min_size=2, max_size=2, unique=True)))
        end = slot + data.draw(st.integers(1, 140))
        offset = data.draw(st.one_of(st.none(), st.integers(-20, 150)))
        read = Read(*rows, slot, end, offset)
        some = sorted(data.draw(st.lists(st.integers(*rows), min_size=2, max_size=2)))
        edge = data.draw(st.one_of(st.just(NO_EDGE), st.integers(slot, end)))
        told.append(told_read((slot, end), start, tuple(some), edge))
        reads.append(read)
        start, slot = told[-1].end, end + data.draw(st.integers(0, 40))
    return reads, told, slot


def bounds(read, told):
    """Slots [low, high) of each entry of a row."""
    edge = {told.edge} if told.edge != NO_EDGE else set()
    first = read.slot_start // BLOCK * BLOCK + BLOCK
    cuts = sorted({read.slot_start, read.slot_end, *edge, *range(first, read.slot_end, BLOCK)})
    found = list(zip(cuts, cuts[1:], strict=False))
    if edge and told.edge % BLOCK == 0:  # no block is cut: the numbers behind the edge leave one out
        found.insert(next(i for i, (low, _) in enumerate(found) if low == told.edge), (told.edge, told.edge))
    return found


def weights(q, keys, read, row, lse, cap):
    """Of one head and row, the share of each key of a read, float64."""
    scores = keys[read.slot_start : read.slot_end].double() @ q.double() * SCALE
    if cap:
        scores = cap * torch.tanh(scores / cap)
    distance = (10**6 if read.offset is None else read.offset) + row - read.row_start
    seen = torch.arange(len(scores)) <= distance
    return torch.where(seen, (scores - lse.double()).exp(), 0.0)


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    seed=seeds,
    num_rows=st.integers(1, 24),
    group=st.integers(1, 3),
    dim=st.sampled_from([8, 64, 96]),
    cap=st.sampled_from([None, 3.0]),
    kind=st.sampled_from(["float32", "bfloat16", "int8"]),
)
def test_blocks_have_the_shares_of_dense_attention_and_change_no_bit(data, seed, num_rows, group, dim, cap, kind):
    reads, told, num_slots = drawn_reads(data, num_rows)
    generator, decode = torch.Generator().manual_seed(seed), NativeDecode.load()
    q = torch.randn(num_rows, KV_HEADS * group, dim, generator=generator)
    num_slots = -(-num_slots // 64) * 64
    keys, values = (torch.randn(KV_HEADS, num_slots, dim, generator=generator) for _ in range(2))
    if kind == "int8":
        kept = int8.empty(KV_HEADS, num_slots // 64, 64, dim, "cpu")
        int8.write(kept, torch.arange(num_slots), keys, values)
        keys = int8.keys_between(kept, 0, num_slots)
    else:
        keys, values = (each.to(getattr(torch, kind)) for each in (keys, values))

    def run(found):
        return (
            decode.over_int8(q, kept, found, SCALE, cap)
            if kind == "int8"
            else decode(q, keys, values, found, SCALE, cap)
        )

    plain, asking = run(Reads(reads)), Reads(reads)
    asking.told = BlockSums(told)
    partial = run(asking)
    assert torch.equal(partial.out_THD, plain.out_THD) and torch.equal(partial.lse_TH, plain.lse_TH)
    told_KE2 = asking.told.take()
    assert asking.told.take() is None
    for read, each in zip(reads, told, strict=True):
        for row in range(each.first_row, each.end_row):
            for head in range(KV_HEADS * group):
                lse = partial.lse_TH[row, head]
                if lse > float("-inf"):
                    wanted = weights(q[row, head], keys[head // group], read, row, lse, cap)
                    check(read, each, wanted, shares(told_KE2, each, row, head, group, lse))


def shares(told_KE2, each, row, head, group, lse):
    """Of the entries of a row and head, float64."""
    k, g = divmod(head, group)
    place = (each.start + (row - each.first_row) * each.num_entries) * group + g * each.num_entries
    peaks, sums = told_KE2[k, place : place + each.num_entries].double().T
    return sums * (peaks - lse.double()).exp()


def check(read, each, wanted, found):
    cuts = bounds(read, each)
    assert len(cuts) == each.num_entries
    for (low, high), share in zip(cuts, found.tolist(), strict=True):
        if low < high:
            assert share == pytest.approx(float(wanted[low - read.slot_start : high - read.slot_start].sum()), abs=3e-5)


def test_shares_add_up_by_column_head_and_teller():
    generator = torch.Generator().manual_seed(5)
    group, num_entries, num_rows = 2, 7, 3
    told = BlockSums([told_read((0, num_entries * BLOCK), 0, (0, num_rows))])
    peaks, sums = told.room(KV_HEADS, group).unbind(dim=2)
    peaks.copy_(torch.randn(peaks.shape, generator=generator).sort(dim=1).values)
    sums.copy_(torch.rand(sums.shape, generator=generator))
    lse, sinks = torch.full((num_rows, 4), 3.0), torch.arange(4.0)
    runs = [(row, row * num_entries, num_entries, 0, 6, 1, 1, 2) for row in range(num_rows)]
    columns = Columns(table(runs, 8), table([(0, 1, 0, 1), (1, 3, 1, 3)], 4))
    found = (torch.zeros(2, 6), torch.full((2, 6), -1.0), torch.zeros(2, 6, dtype=torch.int32))
    NativeShares.load()(told.take(), lse, sinks, columns, found, sink_column=5, first_head=100)

    shares = (sums * (peaks - 3.0).exp()).view(KV_HEADS, num_rows, group, num_entries).transpose(0, 1).flatten(1, 2)
    wanted = torch.zeros(num_rows, 4, 6)
    for entry in range(6):  # the first one's column has one more before it
        wanted[:, :, 1 + (entry + 1) // 2] += shares[:, :, entry]
    wanted[:, :, 5] = (sinks - 3.0).exp()
    wanted = torch.stack([wanted[0], wanted[1:].mean(dim=0)])
    torch.testing.assert_close(found[0], wanted.sum(dim=1))
    torch.testing.assert_close(found[1], wanted.amax(dim=1))
    assert (found[2] == 100 + wanted.argmax(dim=1)).all()
