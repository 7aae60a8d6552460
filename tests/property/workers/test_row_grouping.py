"""Rows of many sequences on a tree of segments: the reads compared with a scan of rows and positions."""

import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.kv_cache.block_placer import BlockPlacer
from longleaf.attention.masks import Reads
from longleaf.kernels.dense import DenseBackend
from longleaf.merge import PartialCodec
from longleaf.positions import AttentionSpan
from longleaf.rank_protocol.step import Decode, Positions, Row
from longleaf.runs import Run
from tests.support.attention.dense import reaches, visible
from workers.kv_cache.block_table import BlockTable
from workers.kv_cache.slots import FloatKvPool
from workers.model.model import LayerSpec
from workers.step.gathered_prefill import PastBuilder
from workers.step.inputs import InputBuilder, Inputs
from workers.step.last_tokens import HostIds
from workers.step.row_grouping import MIN_SHARED

BLOCK = 4
NUM_BLOCKS = 2000
IDS = 1000
"""The i-th token of sequence n has the id n * IDS + i."""


class Forest:
    """Segments that branch off one another anywhere, distributed over ranks, and rows that continue at their ends."""

    def __init__(self, seed: int, world_size: int, *, can_hide: bool = False) -> None:
        self.can_hide = can_hide
        self.world_size = world_size
        self.dice = random.Random(seed)
        self.placer = BlockPlacer([NUM_BLOCKS] * world_size, BLOCK)
        self.reservation = self.placer.reserve(self.placer.num_blocks)
        self.paths: list[tuple[int, ...]] = []
        self.runs: list[tuple[Run, ...]] = []
        self.rows: list[Row] = []

    def grow(self, parent: int | None, count: int, *, at_end: bool = False) -> int:
        """A segment of `count` tokens that continues another one, from some position of it on."""
        assert self.reservation is not None
        path, start = (), 0
        if parent is not None:
            path, end = self.paths[parent], self.runs[parent][-1].end
            start = end if at_end else self.dice.randint(self.runs[parent][0].start + 1, end)
        if self.dice.random() < 0.5:
            runs = self.placer.place_chunk(start, start + count, self.dice.randrange(4), self.reservation)
        else:
            runs = self.placer.grow(None, start, count, self.reservation)
        self.paths.append((*path, len(self.paths)))
        self.runs.append(runs)
        return len(self.paths) - 1

    def add_row(self, parent: int | None, num_resident: int, count: int, *, at_end: bool = False) -> None:
        """A sequence whose own segment holds `held` tokens and receives `count` more."""
        own, number = self.grow(parent, num_resident + count, at_end=at_end), len(self.rows)
        start, path = self.runs[own][0].start + num_resident, self.paths[own]
        ids = tuple(number * IDS + i for i in range(count)) if count > 1 or self.dice.random() < 0.5 else ()
        index = self.dice.choice([-1, 0, 7])
        hidden = self._hidden(self.runs[own][0].start) if self.can_hide else ()
        self.rows.append(Row(number, path, start, ids, self.runs[own], index, hidden=hidden))

    def _hidden(self, end: int) -> tuple[Positions, ...]:
        """Nothing, or some positions before the row's own tokens."""
        edges = sorted(self.dice.sample(range(end + 1), min(end + 1, 2 * self.dice.randint(0, 3))))
        return tuple(zip(edges[::2], edges[1::2], strict=False))

    def inputs(self, rank: int, reach: AttentionSpan) -> Inputs:
        make, last_ids = self.builder(rank, reach), self.last_ids()
        return make.decode(Decode(tuple(self.rows)), last_ids)

    def last_ids(self) -> HostIds:
        return HostIds({row.sequence: row.sequence * IDS for row in self.rows})

    def builder(self, rank: int, reach: AttentionSpan) -> InputBuilder:
        layers = {0: LayerSpec(2, 1, 8, reach)}
        pool, ledger = FloatKvPool(layers, NUM_BLOCKS, BLOCK, torch.float32, "cpu"), BlockTable(rank, BLOCK)
        for path, runs in zip(self.paths, self.runs, strict=True):
            ledger.put(path[-1], runs)
        size = self.world_size
        pasts = PastBuilder(ledger, pool, layers, world_size=size, way="auto", wire=PartialCodec(DenseBackend()))
        return InputBuilder(ledger, pool, layers, world_size=size, pasts=pasts)

    def slots(self, row: Row, rank: int) -> dict[int, int]:
        """By position, the slots of a row's path that `rank` holds."""
        found: dict[int, tuple[int, int]] = {}
        for segment in row.path:
            found = {p: place for p, place in found.items() if p < self.runs[segment][0].start}
            for run in self.runs[segment]:
                for i, position in enumerate(range(run.start, run.end)):
                    found[position] = run.rank, run.blocks[i // BLOCK] * BLOCK + i % BLOCK
        return {position: slot for position, (holder, slot) in found.items() if holder == rank}


@st.composite
def forests(draw: st.DrawFn, longest: int = 20, *, can_hide: bool = False) -> Forest:
    forest = Forest(draw(st.integers(0, 2**31)), draw(st.integers(1, 3)), can_hide=can_hide)

    def parent(num_sealed: int) -> int | None:
        number = draw(st.integers(0, num_sealed))
        return number - 1 if number else None

    for _ in range(draw(st.integers(0, 5))):
        forest.grow(parent(len(forest.paths)), draw(st.integers(1, longest)))
    sealed = len(forest.paths)
    for _ in range(draw(st.integers(1, 8))):
        forest.add_row(parent(sealed), draw(st.integers(0, 9)), draw(st.sampled_from([1, 1, 1, 2, 5])))
    return forest


def shown(reads: Reads) -> Counter[tuple[int, int]]:
    """Each (row, slot) of the reads, and how often they show it."""
    found: Counter[tuple[int, int]] = Counter()
    for read in reads:
        for i, row in enumerate(range(read.row_start, read.row_end)):
            for j, slot in enumerate(range(read.slot_start, read.slot_end)):
                distance = 0 if read.offset is None else read.offset + i - j
                if distance >= 0 and (read.offset is None or read.window is None or distance < read.window):
                    found[row, slot] += 1
    return found


def tokens(forest: Forest, inputs: Inputs) -> list[tuple[Row, int]]:
    """The row and position of each token, derived from its id."""
    by_id = [divmod(token_id, IDS) for token_id in inputs.token_ids_T.tolist()]
    return [(forest.rows[number], forest.rows[number].start + i) for number, i in by_id]


def check(forest: Forest, reach: AttentionSpan) -> list[Inputs]:
    """On every rank each row reads each key that it sees, once. Gives the inputs by rank."""
    found = [forest.inputs(rank, reach) for rank in range(forest.world_size)]
    for rank, inputs in enumerate(found):
        expected: Counter[tuple[int, int]] = Counter()
        for row, (sequence, position) in enumerate(tokens(forest, inputs)):
            seen_S = visible(range(position, position + 1), range(position + 1), reach)[0]
            for low, high in sequence.hidden:
                seen_S[low:high] = False
            seen = seen_S.nonzero().flatten().tolist()
            slots = forest.slots(sequence, rank)
            expected.update((row, slots[p]) for p in seen if p in slots)
        assert shown(inputs.layers[0].reads) == expected
    return found


@settings(max_examples=120, deadline=None)
@given(forests(), reaches(most=30))
def test_all_ranks_say_alike_how_many_rows_read_together_and_none_has_more(forest, reach):
    work, last_ids = Decode(tuple(forest.rows)), forest.last_ids()
    found = [forest.builder(rank, reach).numbers(work, last_ids) for rank in range(forest.world_size)]
    (most,) = {rows.most_together for rows in found}
    spans = [read.row_end - read.row_start for rows in found for read in rows.reads[reach]]
    assert max(spans) <= most
    if forest.world_size == 1 and reach.is_full:
        assert max(spans) == most


@settings(max_examples=120, deadline=None)
@given(forests(), reaches(most=30))
def test_each_row_reads_each_key_it_sees_once(forest, reach):
    check(forest, reach)


@settings(max_examples=60, deadline=None)
@given(forests(longest=3 * MIN_SHARED), reaches(MIN_SHARED, 3 * MIN_SHARED))
def test_each_row_reads_each_key_of_a_wide_reach_once(forest, reach):
    check(forest, reach)


@settings(max_examples=120, deadline=None)
@given(forests(can_hide=True), reaches(most=30))
def test_each_row_reads_nothing_that_is_hidden_from_it(forest, reach):
    check(forest, reach)


@settings(max_examples=60, deadline=None)
@given(forests(longest=3 * MIN_SHARED, can_hide=True), reaches(MIN_SHARED, 3 * MIN_SHARED))
def test_each_row_of_a_wide_reach_reads_nothing_that_is_hidden_from_it(forest, reach):
    check(forest, reach)


@settings(max_examples=120, deadline=None)
@given(forests())
def test_keys_that_many_sequences_see_are_in_one_read(forest):
    for inputs in check(forest, AttentionSpan()):
        sequences: dict[int, set[int]] = {}
        for row, slot in shown(inputs.layers[0].reads):
            sequences.setdefault(slot, set()).add(tokens(forest, inputs)[row][0].sequence)
        num_reads = Counter(slot for read in inputs.layers[0].reads for slot in range(read.slot_start, read.slot_end))
        assert all(num_reads[slot] == 1 for slot, readers in sequences.items() if len(readers) > 1)


@settings(max_examples=60, deadline=None)
@given(forests())
def test_what_belongs_to_a_row_follows_it(forest):
    for rank, inputs in enumerate(check(forest, AttentionSpan())):
        rows = tokens(forest, inputs)
        assert inputs.positions_T.tolist() == [position for _, position in rows]
        trash = NUM_BLOCKS * BLOCK
        slots = inputs.layers[0].slots_T.tolist()
        assert slots == [forest.slots(row, rank).get(position, trash) for row, position in rows]
        wanted = [(row, row.start + row.num_tokens - 1) for row in forest.rows if row.token_index >= 0]
        assert [rows[i] for i in inputs.sample_rows_R.tolist()] == wanted, "in the plan's order"


def test_what_rows_see_together_is_read_once_though_they_hide_different_things():
    forest = Forest(0, 1)
    document = forest.grow(None, 1000)
    for i in range(4):
        forest.add_row(document, 3, 1, at_end=True)
        forest.rows[-1] = replace(forest.rows[-1], hidden=((100 * i, 100 * i + 50),))
    (inputs,) = check(forest, AttentionSpan())
    num_apart = 2 * 50  # by the rows before and behind the one that hides, except for the first and the last one
    assert inputs.layers[0].reads.num_keys == 1000 + num_apart + 4 * 4


def test_rows_that_hide_many_different_things_have_no_more_reads_together_than_apart():
    forest, dice = Forest(0, 1), random.Random(0)
    document = forest.grow(None, 7000)
    for _ in range(16):
        forest.add_row(document, 3, 1, at_end=True)
        edges = sorted(dice.sample(range(7000), 512))
        hidden = tuple(zip(edges[::2], edges[1::2], strict=True))
        forest.rows[-1] = replace(forest.rows[-1], hidden=hidden)
    (inputs,) = check(forest, AttentionSpan())
    tails = 2
    assert len(inputs.layers[0].reads) <= 16 * (256 + 1 + tails)


SHARED = [
    (AttentionSpan(), True),
    (AttentionSpan(2 * MIN_SHARED), True),
    (AttentionSpan(MIN_SHARED), False),
    (AttentionSpan(section=4 * MIN_SHARED), True),
    (AttentionSpan(section=2 * MIN_SHARED), False),
]


@pytest.mark.parametrize(("reach", "is_shared"), SHARED)
def test_a_document_is_read_once_however_many_ask(reach, is_shared):
    def num_keys(num_sequences):
        forest = Forest(0, 1)
        document = forest.grow(None, 3 * MIN_SHARED - 8)
        for _ in range(num_sequences):
            forest.add_row(document, 3, 1, at_end=True)
        (inputs,) = check(forest, reach)
        return inputs.layers[0].reads.num_keys

    one, many = num_keys(1), num_keys(8)
    assert many == one + 7 * 4 if is_shared else many == 8 * one
