"""Which reads flash kernels take, and in which launches."""

import pytest
from hypothesis import given

from longleaf.attention.masks import QueryRun, Read, reads_within
from longleaf.kernels.gpu import varlen_plan
from longleaf.kernels.gpu.varlen_plan import VarlenRound, VarlenSequences, plan
from longleaf.positions import AttentionSpan
from longleaf.runs import Extent
from tests.support.attention.rectangles import rectangles

HEADS, MULTIPROCESSORS = 32, 132
NUM_ROWS = 60


@pytest.fixture
def small(monkeypatch):
    for name in ("MIN_ROWS", "MIN_KEYS"):
        monkeypatch.setattr(varlen_plan, name, 1)


def planned(reads):
    return plan(reads, HEADS, MULTIPROCESSORS)


@pytest.mark.usefixtures("small")
@given(reads=rectangles(NUM_ROWS, most=12))
def test_each_read_is_in_one_round_or_left_to_others(reads):
    found = planned(reads)
    taken = [read for one in found.rounds for read in one.reads]
    assert len(found.rounds) <= varlen_plan.MAX_ROUNDS
    assert sorted(taken + list(found.rest), key=str) == sorted(
        (read for read in reads if read.row_start < read.row_end and read.slot_start < read.slot_end), key=str
    )
    for one in found.rounds:
        ends = [0] + [read.row_end for read in one.reads]
        assert all(end <= read.row_start for end, read in zip(ends, one.reads, strict=False))
        assert all(read.is_causal if one.is_causal else read.offset is None for read in one.reads)


@pytest.mark.usefixtures("small")
@given(reads=rectangles(NUM_ROWS, most=12))
def test_sequences_cover_all_rows_once_and_have_the_keys_of_their_reads(reads):
    for one in planned(reads).rounds:
        bounds, starts, lengths = varlen_plan.sequences(one, NUM_ROWS)
        assert (bounds[0], bounds[-1], len(starts), len(lengths)) == (0, NUM_ROWS, len(bounds), len(bounds) - 1)
        assert bounds == sorted(set(bounds))
        found = [
            (low, high, start, start + length)
            for low, high, start, length in zip(bounds, bounds[1:], starts, lengths, strict=False)
            if length
        ]
        assert found == [read[:4] for read in one.reads]


@pytest.mark.usefixtures("small")
@given(reads=rectangles(NUM_ROWS, most=12))
def test_members_and_pieces_name_the_rows_of_each_round(reads):
    found = planned(reads).rounds
    bits, pieces = varlen_plan.members(found, NUM_ROWS), list(varlen_plan.pieces(found))
    for i, one in enumerate(found):
        rows = {row for read in one.reads for row in range(read.row_start, read.row_end)}
        assert {row for row in range(NUM_ROWS) if bits[row] >> i & 1} == rows
        assert [piece[:4] for piece in pieces if piece.round == i] == [
            (read.slot_start, read.slot_end, read.row_start, read.row_end) for read in one.reads
        ]


def test_pieces_of_long_reads_are_short_and_leave_nothing_out():
    size = varlen_plan.PIECE_KEYS
    one = VarlenRound(False, [Read(0, 9, 5, 5 + 2 * size + 1)])
    assert [piece[:2] for piece in varlen_plan.pieces([one])] == [
        (5, 5 + size), (5 + size, 5 + 2 * size), (5 + 2 * size, 5 + 2 * size + 1)
    ]  # fmt: skip


def test_rows_without_keys_are_sequences_too():
    one = VarlenRound(False, [Read(3, 5, 40, 47), Read(5, 6, 10, 12)])
    assert varlen_plan.sequences(one, 9) == VarlenSequences([0, 3, 5, 6, 9], [0, 40, 10, 0, 0], [0, 7, 2, 0])


def test_a_chunk_behind_a_long_past_takes_two_rounds():
    past, own = Read(0, 2048, 0, 131_072), Read(0, 2048, 131_072, 133_120, offset=0)
    assert planned([past, own]) == ([VarlenRound(False, (past,)), VarlenRound(True, (own,))], ())


def test_pieces_of_many_ranks_take_no_more_rounds_than_one():
    """The rows of all ranks' pieces see the past; the rows after this rank's piece of the chunk see all of it."""
    num_ranks, size = 64, 512
    reads = [Read(0, num_ranks * size, 0, 50_000)]
    own = Extent(5 * size, 6 * size, 50_000)
    for piece in range(num_ranks):
        row = (num_ranks - 1 - piece) * size  # in whichever order
        reads += reads_within(QueryRun(piece * size, (piece + 1) * size, row), own, AttentionSpan())
    found = planned(reads)
    assert [len(one.reads) for one in found.rounds] == [1, num_ranks - 6, 1]
    assert not found.rest


def test_of_many_stretches_the_largest_are_taken():
    reads = [Read(0, 1024, low, low + 600 + i, None) for i, low in enumerate(range(0, 7000, 1000))]
    found = planned(reads)
    assert [one.reads for one in found.rounds] == [(read,) for read in reads[:-5:-1]]
    assert found.rest == tuple(reads[:-4])


def test_where_flash_kernels_would_have_little_of_the_work_they_have_none():
    reads = [Read(0, 1024, low, low + 600) for low in range(0, 9000, 1000)]
    assert planned(reads) == ([], tuple(reads))


@pytest.mark.parametrize(
    "read",
    [
        Read(0, 63, 0, 9000),
        Read(0, 512, 0, 511),
        Read(0, 512, 0, 600, offset=88),
        Read(0, 512, 0, 512, offset=0, window=100),
        Read(0, 512, 0, 600, offset=90, window=40),
        Read(0, 256, 0, 131_072),  # of 2 x 32 programs: the device would wait for them
    ],
)
def test_what_flash_kernels_do_not_do_well_is_left_to_others(read):
    assert planned([read]) == ([], (read,))


def test_few_rows_with_few_keys_are_taken():
    read = Read(0, 256, 0, 2048)
    assert planned([read]).rounds == [VarlenRound(False, (read,))]
