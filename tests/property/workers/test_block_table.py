"""The entries of a block table after runs arrived in any order, moved and were lost, compared with a table of
positions.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longleaf.positions import EVERY_RANK
from longleaf.rank_protocol.group_messages import SegmentLayout
from longleaf.rank_protocol.step import RunTransfer
from longleaf.runs import Run, ceil_div
from workers.kv_cache.block_table import BlockTable, SegmentSlots

BLOCK = 4
RANGES = st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def run_at(start, end, rank=0, first_block=0, step=1):
    return Run(rank, start, end, tuple(first_block + step * i for i in range(ceil_div(end - start, BLOCK))))


def table_of(extents):
    """Slot by position; in order of position, and nothing twice."""
    positions = [position for extent in extents for position in range(extent.start, extent.end)]
    assert positions == sorted(set(positions))
    return {extent.slot + i: extent.start + i for extent in extents for i in range(extent.end - extent.start)}


def slots_of(run):
    return {run.blocks[i // BLOCK] * BLOCK + i % BLOCK: run.start + i for i in range(len(run))}


@given(
    st.lists(st.tuples(RANGES, st.booleans(), st.sampled_from([1, 2])), max_size=25),
    st.tuples(st.integers(-1, 90), st.integers(-1, 90)),
)
def test_the_table_has_the_last_runs(puts, bounds):
    resident, model = SegmentSlots(), dict[int, int]()
    for number, ((start, end), is_put, step) in enumerate(puts):
        model = {slot: position for slot, position in model.items() if not start <= position < end}
        if is_put:
            run = run_at(start, end, first_block=100 * number, step=step)
            resident.put(run, BLOCK)
            model |= slots_of(run)
        else:
            resident.drop(start, end)
        assert table_of(resident.extents) == model
    low, high = bounds
    found = table_of(list(resident.within(low, high)))
    assert found == {slot: position for slot, position in model.items() if low <= position < high}


def test_a_run_that_comes_in_the_middle_leaves_those_behind_it():
    """A run that vanished here was missing in every answer, without an error."""
    resident = SegmentSlots()
    for start in (0, 256, 512, 768, 128):
        resident.put(run_at(start, start + 128, first_block=start), BLOCK)
    assert [(extent.start, extent.end) for extent in resident.extents] == [
        (0, 128),
        (128, 256),
        *((s, s + 128) for s in (256, 512, 768)),
    ]


def test_a_run_that_grew_is_there_once():
    resident = SegmentSlots()
    resident.put(Run(0, 5, 8, (7,)), BLOCK)
    resident.put(Run(0, 5, 12, (7, 3)), BLOCK)
    assert table_of(resident.extents) == {28: 5, 29: 6, 30: 7, 31: 8, 12: 9, 13: 10, 14: 11}


FIRST, SECOND, THIRD = Run(1, 0, 8, (4, 5)), Run(0, 8, 16, (1, 2)), Run(1, 16, 20, (9,))


def positions(ledger, path, end, rank):
    return [p for extent in ledger.extents(path, 0, end, rank) for p in range(extent.start, extent.end)]


def test_a_segment_starts_at_its_layout_start_after_losing_its_first_run():
    ledger = BlockTable(0, BLOCK)
    ledger.replace([SegmentLayout(3, 0, (SECOND,)), SegmentLayout(4, 12, ())])
    assert ledger.parts((3, 4), 20) == [(3, 0, 12), (4, 12, 20)]
    assert positions(ledger, (3, 4), 20, 0) == [8, 9, 10, 11]
    ledger.put(3, [run_at(0, 8, 0, 20)])
    assert positions(ledger, (3,), 20, 0) == list(range(16))


def test_recomputed_runs_are_found_only_with_the_start_of_the_layout():
    """With a start guessed from the remaining runs, the keys of the first run are resident but never read."""
    reported, guessed = BlockTable(0, BLOCK), BlockTable(0, BLOCK)
    reported.replace([SegmentLayout(3, 0, (SECOND,))])
    guessed.put(3, [SECOND])
    seen = []
    for ledger in (reported, guessed):
        ledger.put(3, [run_at(0, 8, 0, 20)])
        (part,) = ledger.parts((3,), 16)
        seen.append(table_of(list(ledger.resident_extents(3, part.start, part.end))).values())
    assert [sorted(found) for found in seen] == [list(range(16)), list(range(8, 16))]


def test_a_layout_replaces_all_runs():
    ledger = BlockTable(0, BLOCK)
    ledger.put(3, [FIRST], [run_at(4, 8, EVERY_RANK)])
    ledger.put(5, [run_at(0, 8, 0, 30)])
    ledger.replace([SegmentLayout(3, 0, (SECOND, THIRD), (run_at(10, 20, EVERY_RANK, 2),))])
    assert [positions(ledger, (3,), 20, rank) for rank in (0, 1, EVERY_RANK)] == [
        list(range(8, 16)),
        list(range(16, 20)),
        list(range(10, 20)),
    ]
    with pytest.raises(KeyError):
        ledger.parts((5,), 8)


def test_only_the_listed_runs_move():
    ledger = BlockTable(0, BLOCK)
    ledger.replace([SegmentLayout(3, 0, (FIRST, SECOND, THIRD))])
    half = RunTransfer(3, Run(0, 12, 16, (2,)), Run(2, 12, 16, (6,)))
    ledger.move([half, RunTransfer(3, FIRST, Run(0, 0, 8, (11, 30)))])
    found = {rank: table_of(list(ledger.extents((3,), 0, 20, rank))) for rank in range(3)}
    assert found == {
        0: slots_of(Run(0, 0, 8, (11, 30))) | slots_of(Run(0, 8, 12, (1,))),
        1: slots_of(THIRD),
        2: slots_of(half.target),
    }


def test_a_run_that_moved_grows_at_its_new_place():
    ledger = BlockTable(0, BLOCK)
    ledger.replace([SegmentLayout(3, 0, (FIRST, SECOND, THIRD))])
    ledger.move([RunTransfer(3, THIRD, Run(0, 16, 20, (7,)))])
    ledger.put(3, [grown := Run(0, 16, 22, (7, 8))])
    assert [positions(ledger, (3,), 30, rank) for rank in range(2)] == [list(range(8, 22)), list(range(8))]
    assert table_of(list(ledger.extents((3,), 16, 30))) == slots_of(grown)


@pytest.mark.parametrize(
    "wrong",
    [
        RunTransfer(3, Run(0, 0, 8, (4, 5)), Run(1, 0, 8, (8, 9))),
        RunTransfer(3, Run(1, 0, 8, (5, 4)), Run(0, 0, 8, (8, 9))),
        RunTransfer(3, Run(1, 0, 12, (4, 5, 6)), Run(0, 0, 12, (8, 9, 10))),
        RunTransfer(9, FIRST, Run(0, 0, 8, (8, 9))),
    ],
    ids=["of another rank", "in other blocks", "longer than it is", "of a segment that is none"],
)
def test_nothing_moves_when_one_run_is_not_there(wrong):
    ledger = BlockTable(0, BLOCK)
    ledger.replace([SegmentLayout(3, 0, (FIRST, SECOND, THIRD))])
    before = [list(ledger.extents((3,), 0, 20, rank)) for rank in range(2)]
    with pytest.raises(ValueError, match="has no run to move"):
        ledger.move([RunTransfer(3, SECOND, Run(1, 8, 16, (20, 21))), wrong])
    assert [list(ledger.extents((3,), 0, 20, rank)) for rank in range(2)] == before


@given(RANGES.filter(lambda pair: pair[0] < pair[1]), st.integers(0, 90), st.booleans())
def test_truncated_positions_are_in_no_slot(positions, end, is_window):
    start, last = positions
    ledger, runs = BlockTable(0, BLOCK), (run_at(start, last, rank=0), run_at(last, last + 3, rank=1, first_block=50))
    windows = (run_at(start, last + 3, EVERY_RANK, 80),) if is_window else ()
    ledger.put(7, runs, windows)
    ledger.put(8, (run_at(0, 9, rank=1),))
    end = max(end, start)
    ledger.cut_back(7, end)
    for run in (*runs, *windows):
        found = [
            position
            for one in ledger.resident_extents(7, 0, 1 << 20, run.rank)
            for position in range(one.start, one.end)
        ]
        assert found == list(range(run.start, min(run.end, end)))
    assert ledger.holds(8, run_at(0, 9, rank=1))


def test_a_segment_is_cut_back_of_which_a_rank_has_given_everything_away():
    ledger = BlockTable(0, BLOCK)
    ledger.put(3, (FIRST, SECOND))
    ledger.move([RunTransfer(3, FIRST, Run(0, FIRST.start, FIRST.end, (8, 9)))])
    ledger.cut_back(3, 9)
    assert [(one.start, one.end) for rank in range(2) for one in ledger.resident_extents(3, 0, 20, rank)] == [
        (0, 8),
        (8, 9),
    ]
