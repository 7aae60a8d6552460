"""The parts that a rank finds on a path whose segments are used only up to a position, compared with a scan of
positions.
"""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from coordinator.kv_cache.block_placer import BlockPlacer
from longleaf.runs import Run
from workers.kv_cache.block_table import BlockTable, stretches

BLOCK = 3
NUM_BLOCKS = 200


@dataclass(frozen=True)
class Tree:
    """Segments by id: where each starts and ends, and which path it continues."""

    world_size: int
    starts: list[int]
    ends: list[int]
    paths: list[tuple[int, ...]]
    runs: list[list[Run]]

    def slots(self, path: tuple[int, ...], end: int) -> dict[int, tuple[int, int]]:
        """Rank and slot of each position before `end`."""
        found: dict[int, tuple[int, int]] = {}
        for segment in path:  # a later segment overrides the positions of an earlier one beyond its start
            for run in self.runs[segment]:
                for i, position in enumerate(range(run.start, run.end)):
                    found[position] = (run.rank, run.blocks[i // BLOCK] * BLOCK + i % BLOCK)
            found = {position: place for position, place in found.items() if position < self.ends[segment]}
        return {position: place for position, place in found.items() if position < end}


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Each new segment continues an earlier one, from any position of it on."""
    world_size = draw(st.integers(1, 3))
    placer = BlockPlacer([NUM_BLOCKS] * world_size, BLOCK)
    reservation = placer.reserve(placer.num_blocks)
    assert reservation is not None
    tree = Tree(world_size, [], [], [], [])
    for number in range(draw(st.integers(1, 6))):
        parent = draw(st.integers(0, number - 1)) if number else None
        start = 0 if parent is None else draw(st.integers(tree.starts[parent] + 1, tree.ends[parent]))
        end, runs = start, list[Run]()
        for turn, size in enumerate(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))):
            if draw(st.booleans()):
                grown = placer.grow(runs[-1] if runs else None, end, size, reservation)
                runs = [*(run for run in runs if run.start != grown[0].start), *grown]
            else:
                runs += placer.place_chunk(end, end + size, turn, reservation)
            end += size
        tree.starts.append(start)
        tree.ends.append(end)
        tree.paths.append((*(() if parent is None else tree.paths[parent]), number))
        tree.runs.append(runs)
    return tree


def block_table(tree: Tree, rank: int) -> BlockTable:
    ledger = BlockTable(rank, BLOCK)
    for number, runs in enumerate(tree.runs):
        for run in runs:
            ledger.put(number, [run])
    return ledger


@given(trees(), st.data())
def test_a_path_reads_each_position_where_its_last_part_put_it(tree: Tree, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(tree.paths) - 1))
    path, start = tree.paths[number], data.draw(st.integers(0, tree.ends[number]))
    end = data.draw(st.integers(tree.starts[number] + 1, tree.ends[number]))
    expected = tree.slots(path, end)
    found: dict[int, tuple[int, int]] = {}
    for rank in range(tree.world_size):
        positions = []
        for extent in block_table(tree, 0).extents(path, start, end, rank):
            positions += range(extent.start, extent.end)
            found |= {p: (rank, extent.slot + p - extent.start) for p in range(extent.start, extent.end)}
        assert positions == sorted(set(positions)), "out of order, or told twice"
    assert found == {position: place for position, place in expected.items() if position >= start}


@given(trees(), st.data())
def test_stretches_hold_each_position_of_a_path_once(tree: Tree, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(tree.paths) - 1))
    path, end = tree.paths[number], data.draw(st.integers(tree.starts[number] + 1, tree.ends[number]))
    expected = list(tree.slots(path, end).values())
    for rank in range(tree.world_size):
        found = [
            slot for low, high in stretches(block_table(tree, rank).extents(path, 0, end)) for slot in range(low, high)
        ]
        assert sorted(found) == sorted(slot for holder, slot in expected if holder == rank)


def test_a_segment_that_was_released_may_come_again_elsewhere() -> None:
    ledger = BlockTable(0, BLOCK)
    ledger.put(7, [Run(0, 5, 8, (1,))])
    ledger.release([7])
    ledger.put(1, [Run(0, 0, 6, (2, 3))])
    ledger.put(7, [Run(0, 4, 6, (1,))])
    assert [tuple(extent) for extent in ledger.extents((1, 7), 0, 6)] == [(0, 4, 6), (4, 6, 3)]
