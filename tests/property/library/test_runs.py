"""Bookkeeping of positions: nothing is lost, nothing is seen twice."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from longleaf.runs import Run, ceil_div, cut_chunk, extents, join, overlaps, serpentine, union, without

positions = st.integers(0, 60)


@given(positions, st.integers(0, 40), positions, st.integers(0, 40))
def test_overlaps_cover_every_causal_pair_exactly_once(query_start, num_queries, key_start, num_keys):
    seen = []
    for part in overlaps(query_start, query_start + num_queries, key_start, key_start + num_keys):
        for query in range(part.query_start, part.query_end):
            last = query + 1 if part.kind == "diagonal" else part.key_end
            seen += [(query, key) for key in range(part.key_start, last)]
    expected = [
        (query, key)
        for query in range(query_start, query_start + num_queries)
        for key in range(key_start, key_start + num_keys)
        if key <= query
    ]
    assert sorted(seen) == sorted(expected)


@given(positions, positions, st.lists(positions, max_size=8, unique=True).map(sorted))
def test_what_is_hidden_is_left_out(start, end, edges):
    hidden = list(zip(edges[::2], edges[1::2], strict=False))
    left = [position for low, high in without(start, end, hidden) for position in range(low, high)]
    assert left == [p for p in range(start, end) if not any(low <= p < high for low, high in hidden)]


@given(positions, st.integers(1, 300), st.integers(1, 32), st.integers(1, 8))
def test_pieces_cover_the_chunk_in_whole_blocks_of_almost_equal_size(start, length, block_size, num_pieces):
    pieces = cut_chunk(start, start + length, block_size, num_pieces)
    assert [p for low, high in pieces for p in range(low, high)] == list(range(start, start + length))
    assert len(pieces) <= num_pieces
    assert all((high - start) % block_size == 0 for _, high in pieces[:-1])
    blocks = [-(-(high - low) // block_size) for low, high in pieces]
    assert max(blocks) - min(blocks) <= 1


@given(positions, st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True), st.integers(1, 8), st.data())
def test_extents_give_each_position_the_slot_of_its_block(start, blocks, block_size, data):
    length = data.draw(st.integers((len(blocks) - 1) * block_size + 1, len(blocks) * block_size))
    run = Run(0, start, start + length, tuple(blocks))
    found = {p: e.slot + p - e.start for e in extents(run, block_size) for p in range(e.start, e.end)}
    assert found == {start + i: blocks[i // block_size] * block_size + i % block_size for i in range(length)}


def test_serpentine_turns_around():
    assert [serpentine(turn, 3) for turn in range(3)] == [[0, 1, 2], [2, 1, 0], [0, 1, 2]]


ranges = st.lists(st.tuples(positions, positions).map(sorted).map(tuple), max_size=8)


@given(ranges)
def test_joined_ranges_keep_content_and_order_and_are_not_adjacent(ranges):
    def positions_in(ranges):
        return [position for start, end in ranges for position in range(start, end)]

    found = join(ranges)
    assert positions_in(found) == positions_in(ranges)
    assert all(before[1] != after[0] for before, after in itertools.pairwise(found))


@given(ranges)
def test_a_union_holds_each_position_once_in_rising_order(ranges):
    found = union(ranges)
    resident = [position for start, end in found for position in range(start, end)]
    assert resident == sorted({position for start, end in ranges for position in range(start, end)})
    assert all(before[1] < after[0] for before, after in itertools.pairwise(found))


@given(positions, st.integers(1, 9))
def test_the_ceiling_of_a_division_is_the_least_number_that_is_enough(total, size):
    assert (ceil_div(total, size) - 1) * size < total <= ceil_div(total, size) * size
