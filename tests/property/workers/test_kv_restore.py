"""Segments that some ranks save and others restore: the same bits in every slot, for any owners."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longleaf.errors import PieceNotFetched
from longleaf.positions import EVERY_RANK
from longleaf.rank_protocol.step import Restore, RestorePortion
from longleaf.runs import Run, ceil_div
from tests.support.counting_comm import CountingComm
from tests.support.loopback import loopback
from tests.support.on_threads import on_ends
from tests.support.pools import BLOCK, NUM_BLOCKS, NUM_WINDOW_BLOCKS, POOLS, filled
from workers.kv_cache.block_table import BlockTable
from workers.kv_io.kv_piece import HostCopy, KvPiece
from workers.runners.kv_restore import restore
from workers.runners.kv_transfer import Content

SEGMENT, START, BEFORE = 4, 7, 3
WINDOWED = ("windows apart", "int8 windows apart", "windows alone")


class Rank:
    def __init__(self, name, seed, number):
        self.pool = filled(POOLS[name], seed)
        self.block_table = BlockTable(number, BLOCK)
        self.pieces = {}

    def slots(self, end, rank):
        """By position, the slots that `rank` holds according to this rank's block table."""
        return {
            extent.start + i: extent.slot + i
            for extent in self.block_table.resident_extents(SEGMENT, START, end, rank)
            for i in range(extent.end - extent.start)
        }


def cut(dice, length, num_ranks):
    """A segment as runs on ranks, in blocks that are chosen at random. Only the last one ends within a block."""
    free = [dice.sample(range(NUM_BLOCKS), NUM_BLOCKS) for _ in range(num_ranks)]
    runs, start, end = [], START, START + length
    while start < end:
        rank = dice.choice([rank for rank in range(num_ranks) if free[rank]])
        stop = min(end, start + BLOCK * dice.randint(1, min(3, len(free[rank]))))
        runs.append(Run(rank, start, stop, tuple(free[rank].pop() for _ in range(ceil_div(stop - start, BLOCK)))))
        start = stop
    return runs


def deal(dice, runs):
    """Runs of each rank, in order, in up to two parts."""
    for rank in {run.rank for run in runs}:
        own = [run for run in runs if run.rank == rank]
        middle = dice.randint(0, len(own))
        yield from (part for part in (own[:middle], own[middle:]) if part)


def windows(dice, end):
    start = max(START, end - BLOCK * dice.randint(1, 3))
    start -= (start - START) % BLOCK
    blocks = dice.sample(range(NUM_WINDOW_BLOCKS), ceil_div(end - start, BLOCK))
    return (Run(EVERY_RANK, start, end, tuple(blocks)),)


def saved(rank, runs, of_windows=False):
    return b"".join(HostCopy(rank.pool, runs, of_windows=of_windows).parts())


def fetch(rank, ticket, data, runs, of_windows=False):
    ranges = [(run.start, run.end) for run in runs]
    rank.pieces[ticket] = KvPiece("piece", data, rank.pool, ranges, of_windows=of_windows)


def pieces_of(dice, name, length, num_ranks):
    """The pieces that a group saves, each with its runs; and the content of each slot of the segment, by position."""
    ranks = [Rank(name, number, number) for number in range(num_ranks)]
    runs = cut(dice, length, num_ranks)
    for rank in ranks:
        rank.block_table.restore(SEGMENT, START, runs)
    pieces = [(part, saved(ranks[part[0].rank], part)) for part in deal(dice, runs)]
    bits = [slot for rank in ranks for slot in contents(rank, START + length)]
    return pieces, dict(bits)


def contents(rank, end):
    """The content of this rank's own slots, by position."""
    for position, slot in rank.slots(end, rank.block_table.rank).items():
        found = []
        for part in rank.pool.blocks(of_windows=False):
            block = part.tensor[:, slot // BLOCK]
            found += (block[:, slot % BLOCK] if part.has_slots else block).flatten().tolist()
        yield position, found


def portions_of(dice, pieces, num_ranks):
    """A new place for each block of a segment, as portions of pieces per rank; neighbouring blocks may separate."""
    free = [dice.sample(range(NUM_BLOCKS), NUM_BLOCKS) for _ in range(num_ranks)]
    found = {}
    for ticket, (runs, _) in enumerate(pieces):
        for run in runs:
            for start in range(run.start, run.end, BLOCK):
                rank = dice.choice([rank for rank in range(num_ranks) if free[rank]])
                new = Run(rank, start, min(start + BLOCK, run.end), (free[rank].pop(),))
                found.setdefault((ticket, rank), []).append(new)
    portions = [RestorePortion(ticket, tuple(runs)) for (ticket, _), runs in found.items()]
    return tuple(dice.sample(portions, len(portions)))


def carry_out(work, ranks):
    def one(comm):
        rank = ranks[comm.rank]
        counted = CountingComm(comm)
        restore(work, counted, rank.pool, rank.block_table, rank.pieces.get)
        return counted.num_operations

    return on_ends(loopback(len(ranks)), one)


@pytest.mark.parametrize("name", [name for name in POOLS if name != "windows alone"])
@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**31), length=st.integers(1, 9 * BLOCK), sizes=st.tuples(st.integers(1, 4), st.integers(1, 4))
)
def test_what_some_ranks_save_others_restore(name, seed, length, sizes):
    dice, end = random.Random(seed), START + length
    pieces, bits = pieces_of(dice, name, length, sizes[0])
    portions = portions_of(dice, pieces, sizes[1])
    ranks = [Rank(name, 10 + number, number) for number in range(sizes[1])]
    untouched = [Content(rank.pool).export(range(NUM_BLOCKS)) for rank in ranks]
    for portion in portions:
        runs, data = pieces[portion.ticket]
        fetch(ranks[portion.runs[0].rank], portion.ticket, data, runs)
    assert carry_out(Restore(SEGMENT, START, portions), ranks) == [1] * sizes[1]
    assert dict(slot for rank in ranks for slot in contents(rank, end)) == bits
    assert len({str([rank.slots(end, other) for other in range(sizes[1])]) for rank in ranks}) == 1
    for rank, before in zip(ranks, untouched, strict=True):
        taken = {
            block
            for portion in portions
            for run in portion.runs
            for block in run.blocks
            if run.rank == rank.block_table.rank
        }
        others = [block for block in range(NUM_BLOCKS) if block not in taken]
        assert torch.equal(Content(rank.pool).export(others), before[others])


@pytest.mark.parametrize("name", WINDOWED)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**31), length=st.integers(1, 9 * BLOCK), size=st.integers(1, 3))
def test_windows_come_back_on_every_rank(name, seed, length, size):
    dice, end = random.Random(seed), START + length
    first = Rank(name, 1, 0)
    old = windows(dice, end)
    new = (Run(EVERY_RANK, old[0].start, end, tuple(dice.sample(range(NUM_WINDOW_BLOCKS), len(old[0].blocks)))),)
    data = saved(first, old, of_windows=True)
    ranks = [Rank(name, 10 + number, number) for number in range(size)]
    for rank in ranks:
        rank.block_table.put(SEGMENT, [Run(0, START, START + BLOCK, (0,))], (Run(EVERY_RANK, START, START + 1, (5,)),))
        fetch(rank, 8, data, old, of_windows=True)
    carry_out(Restore(SEGMENT, START, (), new, 8), ranks)
    for rank in ranks:
        here, there = Content(rank.pool, of_windows=True), Content(first.pool, of_windows=True)
        whole = len(new[0]) // BLOCK
        assert torch.equal(here.export(new[0].blocks[:whole]), there.export(old[0].blocks[:whole]))
        assert rank.slots(end, EVERY_RANK).keys() == set(range(new[0].start, end))


RUN, OTHER = Run(0, START, START + 6, (1, 2)), Run(1, START + 6, START + 8, (1,))


def group(size=2):
    source = Rank("plain", 1, 0)
    runs = [Run(0, START, START + 8, (4, 5, 6))]
    data = saved(source, runs)
    ranks = [Rank("plain", 10 + number, number) for number in range(size)]
    for rank in ranks:
        fetch(rank, 0, data, runs)
        rank.block_table.put(BEFORE, [Run(0, 0, START, (9, 10, 11))])
    return ranks


@pytest.mark.parametrize(
    ("portions", "reported"),
    [
        ((RestorePortion(0, (RUN,)), RestorePortion(3, (OTHER,))), "rank 1 has no fetched piece for ticket 3"),
        ((RestorePortion(0, (Run(0, START, START + 5, (1, 2)),)),), "rank 0 has no fetched piece for ticket 0"),
        ((RestorePortion(0, (Run(1, START + 6, START + 9, (1,)),)),), "rank 1 has no fetched piece for ticket 0"),
    ],
    ids=["another ticket", "a part of a block", "past its end"],
)
def test_what_was_not_fetched_is_named_on_every_rank(portions, reported):
    ranks = group()

    def refused(comm):
        rank = ranks[comm.rank]
        with pytest.raises(PieceNotFetched, match=reported):
            restore(Restore(SEGMENT, START, portions), comm, rank.pool, rank.block_table, rank.pieces.get)

    on_ends(loopback(2), refused)
    assert [rank.block_table.parts((BEFORE,), 99) for rank in ranks] == [[(BEFORE, 0, 99)]] * 2
    carry_out(Restore(SEGMENT, START, (RestorePortion(0, (RUN,)), RestorePortion(0, (OTHER,)))), ranks)


def test_a_window_is_not_taken_for_something_else():
    ranks = group(1)
    with pytest.raises(PieceNotFetched):
        carry_out(Restore(SEGMENT, START, (), (Run(EVERY_RANK, START, START + 6, (1, 2)),), 0), ranks)


@pytest.mark.parametrize(
    "portions",
    [
        (RestorePortion(0, (RUN, OTHER)),),
        (RestorePortion(0, ()),),
        (RestorePortion(0, (Run(2, START, START + 6, (1, 2)),)),),
        (RestorePortion(0, (RUN,)), RestorePortion(1, (Run(0, START + 6, START + 8, (2,)),))),
        (RestorePortion(0, (RUN,)), RestorePortion(1, (Run(1, START, START + 6, (1, 2)),))),
        (RestorePortion(0, (Run(0, START, START + 6, (1,)),)),),
        (RestorePortion(0, (Run(0, START - 1, START + 2, (1,)),)),),
    ],
    ids=["two ranks", "nothing", "nobody", "a block twice", "positions twice", "too few blocks", "before it starts"],
)
def test_what_makes_no_sense_restores_nothing(portions):
    ranks = group()
    before = [Content(rank.pool).export(range(NUM_BLOCKS)) for rank in ranks]

    def refused(comm):
        rank, counted = ranks[comm.rank], CountingComm(comm)
        with pytest.raises(ValueError, match="a block|a run|a portion|positions"):
            restore(Restore(SEGMENT, START, portions), counted, rank.pool, rank.block_table, rank.pieces.get)
        return counted.num_operations

    assert on_ends(loopback(2), refused) == [0, 0]
    for rank, bits in zip(ranks, before, strict=True):
        assert torch.equal(Content(rank.pool).export(range(NUM_BLOCKS)), bits)


def test_resident_keys_are_not_restored():
    ranks = group()
    carry_out(Restore(SEGMENT, START, (RestorePortion(0, (RUN,)),)), ranks)
    for start, portion in [
        (START, RestorePortion(0, (Run(1, START + 3, START + 6, (1,)),))),
        (START + 1, RestorePortion(0, (OTHER,))),
    ]:
        with pytest.raises(ValueError, match="already has positions|does not start"):
            carry_out(Restore(SEGMENT, start, (portion,)), ranks)
