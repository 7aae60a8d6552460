"""Work items of GPU kernels, held against the reads that they were made of. No kernel runs here."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longleaf.attention.block_attribution import BLOCK
from longleaf.attention.masks import Read
from longleaf.kernels.gpu.work_items import HEADER, ITEM, MIN_PIECE, STRETCH, TOKEN, Shape, work_of
from tests.support.attention.rectangles import rectangles, seen_through


class Table:
    """The table of a kernel, decoded."""

    def __init__(self, numbers, num_tokens):
        num_items, stretches_at, tokens_at, shifts_at = numbers[:HEADER]
        self.items = self._rows(numbers[HEADER:stretches_at], ITEM)
        self.stretches = self._rows(numbers[stretches_at:tokens_at], STRETCH)
        bounds = self._rows(numbers[tokens_at:shifts_at], TOKEN)
        self.shifts = [numbers[shifts_at + low : shifts_at + high] for low, high in bounds]
        assert len(self.items) == num_items and len(bounds) == num_tokens

    @staticmethod
    def _rows(numbers, size):
        return [tuple(numbers[i : i + size]) for i in range(0, len(numbers), size)]

    def num_keys(self, item):
        return sum(end - start for start, end, _, _ in self.stretches[item[2] : item[3]])


def seen_by_items(table, shape, num_slots):
    """How often each row of a key head sees each slot, [T * G, S], and which part rows it writes."""
    counts = torch.zeros(shape.num_tokens * shape.group, num_slots, dtype=torch.long)
    written = [[] for _ in counts]
    for row_start, row_end, first, end, shift in table.items:
        for row in range(row_start, row_end):
            written[row].append(shift + row)
            for low, high, ahead, window in table.stretches[first:end]:
                distance = ahead + row // shape.group - torch.arange(low, high)
                counts[row, low:high] += (distance >= 0) & (distance < window)
    return counts, written


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    num_tokens=st.integers(1, 40),
    group=st.sampled_from([1, 3, 20]),
    tile_rows=st.sampled_from([16, 32]),
    num_programs=st.integers(1, 300),
)
def test_each_row_sees_through_its_items_what_it_sees_through_the_reads(
    data, num_tokens, group, tile_rows, num_programs
):
    reads = data.draw(rectangles(num_tokens))
    shape = Shape(num_tokens, group, 2, tile_rows, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longleaf.kernels.gpu.work_items.MIN_PIECE", 16)
        work = work_of(reads, shape, num_programs)
    table, num_slots = Table(work.numbers, num_tokens), max([0, *(read.slot_end for read in reads)])
    counts, written = seen_by_items(table, shape, num_slots)
    assert torch.equal(counts, seen_through(reads, num_tokens, num_slots).repeat_interleave(group, dim=0).long())
    # each row folds the parts that it wrote, and no two rows write to one place
    assert [sorted(parts) for parts in written] == [
        sorted(shift + row for shift in table.shifts[row // group]) for row in range(num_tokens * group)
    ]
    places = [place for parts in written for place in parts]
    assert len(set(places)) == len(places) and all(0 <= place < work.num_part_rows for place in places)
    assert all(end - start <= work.tile_rows for start, end, *_ in table.items)


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(), num_tokens=st.integers(1, 40), tile_keys=st.sampled_from([16, 64]), num_programs=st.integers(1, 300)
)
def test_no_block_of_a_read_is_gone_through_twice(data, num_tokens, tile_keys, num_programs):
    """Otherwise one program would overwrite the attribution of another."""
    reads = data.draw(rectangles(num_tokens))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longleaf.kernels.gpu.work_items.MIN_PIECE", 16)
        work = work_of(reads, Shape(num_tokens, 3, 2, 16, tile_keys), num_programs)
    stretches = Table(work.numbers, num_tokens).stretches
    reported = set[tuple[int, int]]()
    for (low, high, *_), number in zip(stretches, work.reads, strict=True):
        assert reads[number].slot_start <= low < high <= reads[number].slot_end
        blocks = {(number, slot // BLOCK) for slot in range(low, high)}
        assert not reported & blocks
        reported |= blocks


def items_of(reads, num_tokens=1, group=8, num_programs=264):
    work = work_of(reads, Shape(num_tokens, group, 8, 64, 64), num_programs)
    return Table(work.numbers, num_tokens), work


def test_a_long_stretch_is_cut_so_that_every_program_has_as_much_to_do():
    table, _ = items_of([Read(0, 1, 0, 1 << 20)])
    assert len(table.items) * 8 == 264
    sizes = [table.num_keys(item) for item in table.items]
    assert max(sizes) - min(sizes[:-1]) == 0 and sum(sizes) == 1 << 20


def test_short_ones_are_not_cut_below_what_starting_a_program_takes():
    table, _ = items_of([Read(0, 1, 0, 4 * MIN_PIECE)])
    assert [table.num_keys(item) for item in table.items] == [MIN_PIECE] * 4


def test_many_blocks_of_one_row_are_few_items():
    table, _ = items_of([Read(0, 1, 256 * i, 256 * i + 128) for i in range(16)])
    assert [table.num_keys(item) for item in table.items] == [MIN_PIECE] * 4 and len(table.stretches) == 16


def test_shared_keys_are_read_by_adjacent_programs():
    reads = [
        Read(0, 16, 0, 1 << 17),
        *(Read(i, i + 1, (1 << 17) + 300 * i, (1 << 17) + 300 * (i + 1)) for i in range(16)),
    ]
    table, work = items_of(reads, num_tokens=16)
    assert work.tile_rows == 64
    shared = [item for item in table.items if item[1] - item[0] == 64]
    assert shared == table.items[: len(shared)], "long ones come first"
    for one, other in zip(shared[::2], shared[1::2], strict=True):
        assert one[2:] == other[2:] and (one[0], other[0]) == (0, 64)
    assert len(table.items) - len(shared) == 16


def test_the_sizes_of_tables_and_partials_are_few():
    works = [items_of([Read(0, 1, 0, num_keys)])[1] for num_keys in range(1, 1 << 20, 9999)]
    assert len({(len(work.numbers), work.num_part_rows) for work in works}) < 10
