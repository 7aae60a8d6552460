"""Free blocks, and the placement of new tokens."""

import itertools

import pytest

from coordinator.kv_cache.block_allocator import BlockAllocator
from coordinator.kv_cache.block_placer import BlockCount, BlockPlacer, Reservation
from longleaf.errors import ResourceExhausted
from longleaf.runs import Run


def placer(*num_blocks: int, block_size: int = 4) -> BlockPlacer:
    return BlockPlacer(num_blocks, block_size)


def reserve(placer: BlockPlacer, num_blocks: int) -> Reservation:
    reservation = placer.reserve(BlockCount(num_blocks))
    assert reservation is not None
    return reservation


def extents(runs: tuple[Run, ...]) -> list[tuple[int, int, int]]:
    return [(run.rank, run.start, run.end) for run in runs]


def test_allocation_prefers_the_smallest_sufficient_range() -> None:
    pool = BlockAllocator(12)
    pool.allocate(12)
    pool.free([0, 1, 2, 5, 6, 9, 10, 11])
    pool.audit()
    assert pool.allocate(2) == (5, 6)
    assert pool.allocate(3) == (0, 1, 2)
    pool.audit()


def test_allocation_joins_ranges_when_none_fits() -> None:
    pool = BlockAllocator(10)
    pool.allocate(10)
    pool.free([1, 2, 3, 6, 9])
    assert sorted(pool.allocate(5)) == [1, 2, 3, 6, 9]
    assert pool.num_free == 0
    pool.audit()


def test_free_merges_adjacent_blocks() -> None:
    pool = BlockAllocator(8)
    pool.allocate(8)
    for block in (3, 5, 4, 0, 7, 1, 6, 2):
        pool.free([block])
        pool.audit()
    assert pool.allocate(8) == tuple(range(8))


def test_failed_allocation_takes_no_blocks() -> None:
    pool = BlockAllocator(3)
    with pytest.raises(ResourceExhausted):
        pool.allocate(4)
    assert pool.num_free == 3
    pool.audit()


@pytest.mark.parametrize("ids", [[0], [4], [5], [1, 1]])
def test_free_of_unused_blocks_is_an_error(ids: list[int]) -> None:
    pool = BlockAllocator(5)
    pool.allocate(3)
    pool.free([0])
    with pytest.raises(ValueError, match="not all in use"):
        pool.free(ids)


@pytest.mark.parametrize(
    ("end", "turn", "expected"),
    [
        (24, 0, [(0, 0, 8), (1, 8, 16), (2, 16, 24)]),
        (24, 1, [(2, 0, 8), (1, 8, 16), (0, 16, 24)]),
        (21, 0, [(0, 0, 8), (1, 8, 16), (2, 16, 21)]),
        (5, 0, [(0, 0, 4), (1, 4, 5)]),
        (1, 1, [(2, 0, 1)]),
    ],
)
def test_chunk_is_distributed_in_serpentine_order(end: int, turn: int, expected: list[tuple[int, int, int]]) -> None:
    place = placer(10, 10, 10)
    runs = place.place_chunk(0, end, turn, reserve(place, 10))
    assert extents(runs) == expected
    place.audit(runs)


def test_chunk_of_few_pieces_goes_to_the_emptiest_ranks() -> None:
    place = placer(10, 12, 11)
    assert extents(place.place_chunk(0, 8, 0, reserve(place, 2))) == [(1, 0, 4), (2, 4, 8)]


def test_chunk_is_placed_on_ranks_with_free_blocks() -> None:
    place = placer(1, 0, 5)
    runs = place.place_chunk(100, 123, 0, reserve(place, 6))
    assert extents(runs) == [(0, 100, 104), (2, 104, 123)]
    place.audit(runs)
    assert place.num_free == BlockCount()


def test_growth_fills_the_last_run_first() -> None:
    place = placer(4, 5)
    reservation = reserve(place, 9)
    (last,) = place.place_chunk(0, 2, 0, reservation)
    assert extents(place.grow(last, 2, 2, reservation)) == [(1, 0, 4)]
    grown = place.grow(last, 2, 5, reservation)
    assert extents(grown) == [(1, 0, 4), (0, 4, 7)]
    assert extents(place.grow(grown[-1], 7, 1, reservation)) == [(0, 4, 8)]
    place.audit([*grown])


def test_reserved_blocks_stay_available() -> None:
    place = placer(2, 2)
    first = reserve(place, 3)
    assert place.reserve(BlockCount(2)) is None
    with pytest.raises(ResourceExhausted):
        place.place_chunk(0, 16, 0, first)
    place.release(first)
    assert place.num_free == BlockCount(4)


@pytest.mark.parametrize("num_prefill", [0, 1, 4, 9, 10, 11, 20, 27])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 9])
def test_blocks_needed_is_exact(num_prefill: int, num_rows: int) -> None:
    place, chunks = placer(40, 40, 40), itertools.cycle((8, 4, 12))
    reservation = place.reserve(place.blocks_needed(num_prefill, num_rows))
    assert reservation is not None
    runs: list[Run] = []
    start = 0
    while start < num_prefill:
        stop = min(start + next(chunks), num_prefill)
        runs += place.place_chunk(start, stop, len(runs), reservation)
        start = stop
    rows: list[Run] = []
    for position in range(num_prefill, num_prefill + num_rows):
        grown = place.grow(rows[-1] if rows else None, position, 1, reservation)
        rows = [*(run for run in rows if run.start != grown[0].start), *grown]
    assert reservation.left == BlockCount()
    place.audit([*runs, *rows])
