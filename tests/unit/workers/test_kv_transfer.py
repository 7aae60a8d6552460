"""Transfers of runs between ranks: identical bits in every kind of pool, or an error that names the ranks."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longleaf.errors import TransferCorrupted
from longleaf.kernels.cpu.compiled import NativeBackend
from longleaf.positions import EVERY_RANK
from longleaf.rank_protocol.group_messages import SegmentLayout
from longleaf.rank_protocol.step import Move, RunTransfer
from longleaf.runs import Run, ceil_div
from tests.support.counting_comm import CountingComm
from tests.support.loopback import loopback
from tests.support.on_threads import on_ends
from tests.support.pools import BLOCK, FULL, NUM_BLOCKS, NUM_WINDOW_BLOCKS, POOLS, filled
from workers.kv_cache.block_table import BlockTable
from workers.kv_cache.quantized import QuantizedPool
from workers.runners import kv_transfer
from workers.runners.kv_transfer import DIGEST_BYTES, Content, move, rounds


class Rank:
    def __init__(self, make, number, layout=()):
        self.pool = filled(make, number)
        self.block_table = BlockTable(number, BLOCK)
        self.block_table.replace(layout)

    def places(self, segment, end, num_ranks):
        """Rank and slot by position."""
        return {
            extent.start + i: (rank, extent.slot + i)
            for rank in range(num_ranks)
            for extent in self.block_table.extents((segment,), 0, end, rank)
            for i in range(extent.end - extent.start)
        }


def carry_out(work, ranks, wrap=lambda comm: comm):
    return on_ends(
        loopback(len(ranks)),
        lambda comm: move(work, wrap(comm), ranks[comm.rank].pool, ranks[comm.rank].block_table),
    )


def deal(seed, num_ranks):
    """Runs of a segment on ranks, and transfers of some of them into blocks that are free there."""
    dice = random.Random(seed)
    free = [dice.sample(range(NUM_BLOCKS), NUM_BLOCKS) for _ in range(num_ranks)]
    runs, transfers, start = [], [], 0
    for _ in range(3 * num_ranks):
        rank, length = dice.randrange(num_ranks), dice.randint(1, 2 * BLOCK)
        count = ceil_div(length, BLOCK)
        if len(free[rank]) >= count:
            runs.append(Run(rank, start, start + length, tuple(free[rank].pop() for _ in range(count))))
            start += length
    for run in runs:
        to = dice.choice([rank for rank in range(num_ranks) if rank != run.rank])
        if dice.random() < 0.7 and len(free[to]) >= len(run.blocks):
            target = Run(to, run.start, run.end, tuple(free[to].pop() for _ in run.blocks))
            transfers.append(RunTransfer(4, run, target))
    return SegmentLayout(4, 0, tuple(runs)), tuple(transfers)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", POOLS)
def test_moved_blocks_are_bit_identical_and_others_are_unchanged(name, num_ranks, monkeypatch):
    make = POOLS[name]
    monkeypatch.setattr(kv_transfer, "PIECE_BYTES", 2 * max(1, Content(make()).bytes_per_block))
    for seed in range(4):
        layout, transfers = deal(seed, num_ranks)
        assert transfers
        ranks = [Rank(make, number, [layout]) for number in range(num_ranks)]
        expected = [Content(rank.pool).export(range(NUM_BLOCKS)) for rank in ranks]
        for _, source, target in ((t.segment, t.source, t.target) for t in transfers):
            expected[target.rank][list(target.blocks)] = expected[source.rank][list(source.blocks)]
        carry_out(Move(transfers), ranks)
        for rank, bits in zip(ranks, expected, strict=True):
            assert torch.equal(Content(rank.pool).export(range(NUM_BLOCKS)), bits)
        moved = {transfer.source: transfer.target for transfer in transfers}
        wanted = Rank(make, 0, [SegmentLayout(4, 0, tuple(moved.get(run, run) for run in layout.runs))])
        places = wanted.places(4, 999, num_ranks)
        assert all(rank.places(4, 999, num_ranks) == places for rank in ranks)


@pytest.mark.parametrize("name", ["plain", "half", "latents", "narrow values", "int8"])
def test_keys_and_values_read_equal_after_a_move(name):
    ranks = [Rank(POOLS[name], number) for number in range(2)]
    layout = SegmentLayout(4, 0, (Run(0, 0, 5, (8, 2)),))
    for rank in ranks:
        rank.block_table.replace([layout])
    slots = [(24, 25, 26, 6, 7), (9, 10, 11, 15, 16)]
    before = [ranks[0].pool.take(layer, torch.tensor(slots[0])) for layer in range(2)]
    carry_out(Move((RunTransfer(4, layout.runs[0], Run(1, 0, 5, (3, 5))),)), ranks)
    for layer, taken in enumerate(before):
        assert torch.equal(ranks[1].pool.take(layer, torch.tensor(slots[1])), taken)


def test_moved_8_bit_block_continues_with_its_exponents():
    """Its exponents are moved: a larger key shifts the keys that are already in the block."""
    here, there = [QuantizedPool({0: FULL}, 4, 4, torch.float32, "cpu") for _ in range(2)]
    backend, generator = NativeBackend(), torch.Generator().manual_seed(3)
    k, v = torch.randn(2, 2, 4, 8, generator=generator)
    k[:, 3] *= 40

    def store(pool, first_slot, low, high):
        slots = torch.arange(first_slot + low, first_slot + high)
        pool.store(backend, 0, slots, k[:, low:high].contiguous(), v[:, low:high].contiguous())

    store(here, 4, 0, 3)
    Content(there).restore([3], Content(here).export([1]))
    store(here, 4, 3, 4)
    store(there, 12, 3, 4)
    assert torch.equal(Content(here).export([1]), Content(there).export([3]))


def test_blocks_with_equal_numbers_are_swapped():
    """Each rank sends the content of a block, and receives into a block with the same number as the other's."""
    layout = SegmentLayout(4, 0, (Run(0, 0, 3, (5,)), Run(1, 3, 6, (6,)), Run(2, 6, 9, (5,))))
    targets = (Run(1, 0, 3, (5,)), Run(2, 3, 6, (6,)), Run(0, 6, 9, (6,)))
    ranks = [Rank(POOLS["plain"], number, [layout]) for number in range(3)]
    before = [Content(rank.pool).export([5, 6]) for rank in ranks]
    carry_out(Move(tuple(RunTransfer(4, *pair) for pair in zip(layout.runs, targets, strict=True))), ranks)
    after = [Content(rank.pool).export([5, 6]) for rank in ranks]
    assert torch.equal(after[1][0], before[0][0])
    assert torch.equal(after[2][1], before[1][1])
    assert torch.equal(after[0][1], before[2][0])


class FlippingComm:
    """Flips a bit of the received data."""

    def __init__(self, comm, at, number=0):
        self.rank, self.world_size = comm.rank, comm.world_size
        self._comm, self._at, self._left = comm, at, number

    def __getattr__(self, name):
        operation = getattr(self._comm, name)

        def flipped(tensor, *args):
            received = operation(tensor, *args)
            if name in ("permute", "broadcast"):
                if self._left == 0:
                    received[self._at] ^= 4
                self._left -= 1
            return received

        return flipped


@pytest.mark.parametrize("at", [0, DIGEST_BYTES, 150], ids=["checksum", "first key", "another"])
@pytest.mark.parametrize("number", [0, 1], ids=["first round", "second round"])
def test_flipped_bit_is_detected_and_reported_by_all_ranks(at, number, monkeypatch):
    make = POOLS["plain"]
    monkeypatch.setattr(kv_transfer, "PIECE_BYTES", Content(make()).bytes_per_block)
    layout = SegmentLayout(4, 0, (Run(0, 0, 6, (1, 2)), Run(1, 6, 9, (3,))))
    transfers = (
        RunTransfer(4, layout.runs[0], Run(2, 0, 6, (4, 6))),
        RunTransfer(4, layout.runs[1], Run(0, 6, 9, (5,))),
    )
    ranks = [Rank(make, number, [layout]) for number in range(3)]
    before, retained = ranks[0].places(4, 9, 3), [Content(rank.pool).export(range(4)) for rank in ranks]

    def reported_ranks(comm):
        comm_here = FlippingComm(comm, at, number) if comm.rank == 2 else comm
        with pytest.raises(TransferCorrupted, match="rank 2 received other keys than rank 0 sent") as raised:
            move(Move(transfers), comm_here, ranks[comm.rank].pool, ranks[comm.rank].block_table)
        return raised.value.source, raised.value.target

    assert on_ends(loopback(3), reported_ranks) == [(0, 2)] * 3
    assert all(rank.places(4, 9, 3) == before for rank in ranks)
    for rank, bits in zip(ranks, retained, strict=True):
        assert torch.equal(Content(rank.pool).export(range(4)), bits)


@pytest.mark.parametrize("name", ["windows apart", "int8 windows apart", "windows alone"])
def test_windows_are_sent_by_rank_0(name, monkeypatch):
    make = POOLS[name]
    size = Content(make(), of_windows=True).bytes_per_block
    monkeypatch.setattr(kv_transfer, "PIECE_BYTES", 2 * size)
    ranks = [Rank(make, number) for number in range(3)]
    sharded = [Content(rank.pool).export(range(NUM_BLOCKS)) for rank in ranks]
    windows = [Content(rank.pool, of_windows=True) for rank in ranks]
    before = [content.export(range(NUM_WINDOW_BLOCKS)) for content in windows]
    runs = (Run(EVERY_RANK, 4, 12, (6, 0, 3)), Run(EVERY_RANK, 40, 41, (1,)), Run(EVERY_RANK, 9, 11, (5,)))
    carry_out(Move((), runs), ranks)
    for number, rank in enumerate(ranks):
        after = windows[number].export(range(NUM_WINDOW_BLOCKS))
        for block in range(NUM_WINDOW_BLOCKS):
            assert torch.equal(after[block], before[0 if block in (6, 0, 3, 1, 5) else number][block])
        assert torch.equal(Content(rank.pool).export(range(NUM_BLOCKS)), sharded[number])


def test_damaged_windows_are_detected():
    ranks = [Rank(POOLS["windows apart"], number) for number in range(2)]
    with pytest.raises(TransferCorrupted, match="rank 1 received other keys than rank 0"):
        carry_out(
            Move((), (Run(EVERY_RANK, 0, 3, (2,)),)), ranks, lambda comm: FlippingComm(comm, 40) if comm.rank else comm
        )


SOURCE, TARGET = Run(0, 0, 6, (1, 2)), Run(1, 0, 6, (3, 4))
NEXT = Run(1, 6, 9, (5,))


@pytest.mark.parametrize(
    "transfers",
    [
        (RunTransfer(4, SOURCE, Run(0, 0, 6, (3, 4))),),
        (RunTransfer(4, SOURCE, Run(2, 0, 6, (3, 4))),),
        (RunTransfer(4, SOURCE, Run(1, 0, 5, (3, 4))),),
        (RunTransfer(4, SOURCE, Run(1, 0, 6, (3,))),),
        (RunTransfer(4, SOURCE, Run(1, 0, 6, (5, 6))), RunTransfer(4, NEXT, Run(0, 6, 9, (5,)))),
        (RunTransfer(4, SOURCE, TARGET), RunTransfer(4, SOURCE, Run(1, 0, 6, (7, 8)))),
        (RunTransfer(4, Run(0, 0, 6, (1, 8)), TARGET),),
    ],
    ids=[
        "to itself",
        "to an unknown rank",
        "shorter",
        "into fewer blocks",
        "over blocks that are sent",
        "to two",
        "from a wrong source",
    ],
)
def test_invalid_transfer_moves_nothing(transfers):
    ranks = [Rank(POOLS["plain"], number, [SegmentLayout(4, 0, (SOURCE, NEXT))]) for number in range(2)]
    before = [Content(rank.pool).export(range(NUM_BLOCKS)) for rank in ranks]

    def refused(comm):
        counted = CountingComm(comm)
        with pytest.raises(ValueError, match="a run|no run|a block"):
            move(Move(transfers), counted, ranks[comm.rank].pool, ranks[comm.rank].block_table)
        return counted.num_operations

    assert on_ends(loopback(2), refused) == [0, 0]
    for rank, bits in zip(ranks, before, strict=True):
        assert torch.equal(Content(rank.pool).export(range(NUM_BLOCKS)), bits)
        assert rank.places(4, 9, 2).keys() == set(range(9))


def test_exchanges_are_at_most_a_piece(monkeypatch):
    make = POOLS["plain"]
    size = Content(make()).bytes_per_block
    monkeypatch.setattr(kv_transfer, "PIECE_BYTES", 3 * size)
    layout = SegmentLayout(4, 0, (Run(0, 0, 33, tuple(range(11))),))
    ranks = [Rank(make, number, [layout]) for number in range(2)]
    comms = []

    def noting(comm):
        comms.append(CountingComm(comm))
        return comms[-1]

    carry_out(Move((RunTransfer(4, layout.runs[0], Run(1, 0, 33, tuple(range(11, 0, -1)))),)), ranks, noting)
    assert {comm.num_operations for comm in comms} == {4 + 1}
    sent = {comm.rank: comm.bytes_sent for comm in comms}
    assert sent[0] - sent[1] == 11 * size + 4 * DIGEST_BYTES


@given(st.integers(0, 2**31), st.integers(2, 4), st.integers(1, 4))
def test_each_rank_has_one_peer_per_direction_in_a_round(seed, num_ranks, most):
    _, transfers = deal(seed, num_ranks)
    wanted = {
        (t.source.rank, block, t.target.rank, other)
        for t in transfers
        for block, other in zip(t.source.blocks, t.target.blocks, strict=True)
    }
    found, count = set(), 0
    for archives in rounds(transfers, most):
        assert archives
        for side in ([p.source for p in archives], [p.target for p in archives]):
            assert len(side) == len(set(side))
        for archive in archives:
            assert 0 < len(archive.source_blocks) <= most
            pairs = zip(archive.source_blocks, archive.target_blocks, strict=True)
            found |= {(archive.source, block, archive.target, other) for block, other in pairs}
            count += len(archive.source_blocks)
    assert found == wanted
    assert count == len(wanted)
