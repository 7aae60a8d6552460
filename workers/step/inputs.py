"""Converts a StepPlan to the tensors and reads of one rank, before the model runs.

Rows are the queries of the step as kernels see them. In decode they are the tokens themselves, the same on every rank,
ordered so that rows that see the same keys are adjacent (`row_grouping.py`). In prefill each rank computes its own
piece; the gathered queries are concatenated by piece, each padded to the longest, so the piece of rank r begins at row
r * num_tokens. Layers that gather keys instead have only their own rows, and a past. So do windowed layers whose keys
are replicated on every rank (`workers.step.windows`); in decode these have separate slots.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from longleaf.attention.masks import QueryRun, Read, Reads, causal_reads, reads_within
from longleaf.positions import EVERY_RANK, OWN_ROPE, AttentionSpan, Rope
from longleaf.rank_protocol.step import Decode, Prefill, Row
from longleaf.runs import Run
from workers.host_copies import numbers_on
from workers.kv_cache.block_table import BlockTable, stretches
from workers.kv_cache.slots import KvPool
from workers.model.model import LayerSpec
from workers.model.rotary import Rows, row_ropes
from workers.step.attribution_plan import AttributionGroup, BlockPlan, attribution_groups, block_plan
from workers.step.gathered_prefill import PastBuilder
from workers.step.last_tokens import LastTokens
from workers.step.layers import ChunkLayer, Replicated, RowLayer, Sharded
from workers.step.row_grouping import Query, most_together, order, row_reads
from workers.step.states import StateBuilder, StateRows
from workers.step.windows import WindowBuilder

LayerT = TypeVar("LayerT", bound=ChunkLayer | RowLayer)


@dataclass(frozen=True, slots=True)
class Inputs(Generic[LayerT]):
    """Inputs of one forward pass on one rank; T tokens computed here."""

    token_ids_T: Tensor
    positions_T: Tensor
    layers: dict[int, LayerT]
    """The writes and reads of each layer."""
    num_own_tokens: int = 0
    """In prefill, the number of tokens of the own piece; the rest is padding."""
    sample_rows_R: Tensor | None = None
    """In decode, rows whose logits are wanted: to sample from, then to score, in the order of the plan."""
    ropes: Rows = field(default_factory=lambda: {OWN_ROPE: None})
    """The token rows of each rope, by which their queries and keys are rotated."""
    states: StateRows | None = None
    """The rows by sequence, with the slots of their recurrent states; None if the model has none."""


@dataclass(frozen=True, slots=True)
class RowNumbers:
    """A decode step as numbers on the host: T of each field, except for the rows to sample from."""

    token_ids: Sequence[int]
    """Unknown ids are replaced by the placeholders of `LastTokens`."""
    positions: Sequence[int]
    slots: Sequence[int]
    """Slots of sharded keys; the trash slot for tokens that another rank owns."""
    window_slots: Sequence[int]
    """Slots of keys that every rank holds; empty where there are none."""
    ropes: Sequence[Rope]
    sample_rows: Sequence[int]
    """Rows to sample from, in the order of the plan: the last one of each sequence, and those of its drafts."""
    reads: dict[AttentionSpan, Reads]
    """Reads from this rank's pool."""
    most_together: int
    """The maximum number of rows that may read keys together; the same on all ranks."""
    scored_rows: Sequence[int] = ()
    """Rows whose next token is scored, in the order of the plan."""
    attributed: Sequence[AttributionGroup] = ()
    """Requested attention attributions."""
    blocks: BlockPlan | None = None
    """The block sums that kernels report for `attributed`; None where they report none."""
    is_plain: bool = True
    """Whether rows see all tokens before them and only tokens are wanted; the same on all ranks."""

    states: StateRows | None = None
    """As in `Inputs`."""
    has_drafts: bool = False
    """Whether more positions are sampled from than there are sequences."""

    def __len__(self) -> int:
        return len(self.token_ids)


class InputBuilder:
    """Builds the inputs of one rank. `windows` is None where no layer's keys are replicated on every rank, and `states`
    where the model has no recurrent states. `attributes_blocks`: whether the kernels can report sums per block of keys.
    """

    def __init__(
        self,
        block_table: BlockTable,
        pool: KvPool,
        layers: dict[int, LayerSpec],
        *,
        world_size: int,
        pasts: PastBuilder,
        windows: WindowBuilder | None = None,
        states: StateBuilder | None = None,
        attributes_blocks: bool = False,
    ) -> None:
        self._block_table = block_table
        self._rank = block_table.rank
        self.pool = pool
        self._reaches = {layer: spec.reach for layer, spec in layers.items()}
        self.reaches = frozenset(self._reaches.values())
        self._full_layers = sorted(layer for layer, reach in self._reaches.items() if reach.is_full)
        self._bytes_per_key = dict.fromkeys(self.reaches, 0)
        for layer, reach in self._reaches.items():
            self._bytes_per_key[reach] += pool.bytes_per_slot(layer)
        self._world_size = world_size
        self._pasts = pasts
        self._windows = windows
        self._states = states
        self._attributes_blocks = attributes_blocks

    def prefill(self, work: Prefill) -> Inputs[ChunkLayer]:
        """The rank's piece of a chunk, padded with trash tokens to the longest piece, at least one token."""
        self._block_table.put(work.path[-1], work.pieces, work.window_runs)
        num_tokens = max(len(piece) for piece in work.pieces)
        queries = [QueryRun(piece.start, piece.end, piece.rank * num_tokens) for piece in work.pieces]
        mine, ids = own_piece(work, self._rank)
        padding = num_tokens - len(mine)
        slots = [*self._slots(mine, mine.start, mine.end), *[self.pool.trash_slot] * padding]
        positions = [*range(mine.start, mine.end), *[0] * padding]
        there = numbers_on(self.pool.device, [*slots, *positions, *ids, *[0] * padding])
        slots_T, positions_T, token_ids_T = there.split(num_tokens)
        layers = self._pasts.build(work, slots_T)
        if self._windows:
            layers |= self._windows.chunk(work)
        rest = {layer: reach for layer, reach in self._reaches.items() if layer not in layers}
        past_row = (0, num_tokens * self._world_size)
        sharded = {
            reach: Sharded(slots_T, self._chunk_reads(work, queries, reach, past_row)) for reach in set(rest.values())
        }
        return Inputs(
            token_ids_T=token_ids_T,
            positions_T=positions_T,
            layers=layers | {layer: sharded[reach] for layer, reach in rest.items()},
            num_own_tokens=len(mine),
            ropes={work.rope: None},
            states=self._states.chunk(work) if self._states else None,
        )

    def decode(self, work: Decode, last_ids: LastTokens) -> Inputs[RowLayer]:
        """The rows of all sequences. `last_ids` gives the token of rows that bring none."""
        return self.tensors(self.numbers(work, last_ids), last_ids)

    def numbers(self, work: Decode, last_ids: LastTokens) -> RowNumbers:
        """The host-side numbers of all rows of all sequences. Raises ValueError for drafts where there must be none."""
        for row in work.rows:
            check_drafts(row)
            self._block_table.put(row.path[-1], row.runs, row.window_runs)
        found = [(row, self._block_table.parts(row.path, row.start + row.num_tokens)) for row in work.rows]
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        queries: list[Query] = []
        ropes: list[Rope] = []
        last_rows: dict[int, int] = {}
        found.sort(key=lambda pair: order(pair[1], pair[0].start))
        for row, parts in found:
            end = row.start + row.num_tokens
            queries.append(Query(QueryRun(row.start, end, len(ids)), parts, row.hidden))
            ids += row.token_ids or (last_ids[row.sequence],)
            ids += row.draft_ids
            positions += range(row.start, end)
            slots += self._row_slots(row.runs, row.start, end)
            ropes += [row.rope] * row.num_tokens
            last_rows[row.sequence] = len(ids) - 1 - len(row.draft_ids)
        near_rank = EVERY_RANK if self._windows else self._rank
        scored = [last_rows[row.sequence] - i for row in work.rows for i in range(row.num_scored, 0, -1)]
        reads = row_reads(self._block_table, queries, self.reaches, near_rank)
        attribution = attribution_groups(
            self._block_table, zip((row for row, _ in found), queries, strict=True), self._full_layers
        )
        return RowNumbers(
            token_ids=ids,
            positions=positions,
            slots=slots,
            window_slots=self._windows.row_slots([row for row, _ in found]) if self._windows else (),
            ropes=ropes,
            sample_rows=[
                last_rows[row.sequence] + i
                for row in work.rows
                if row.token_index >= 0
                for i in range(1 + len(row.draft_ids))
            ],
            reads=reads,
            most_together=most_together(queries),
            scored_rows=scored,
            attributed=attribution,
            blocks=self._blocks(reads, attribution),
            is_plain=not (attribution or scored or any(row.hidden for row in work.rows)),
            has_drafts=any(row.draft_ids for row in work.rows),
            states=self._states.rows([row for row, _ in found]) if self._states else None,
        )

    def _blocks(self, reads: dict[AttentionSpan, Reads], attributed: Sequence[AttributionGroup]) -> BlockPlan | None:
        """Plans block sums in the kernels for the requested attributions, if the kernels support it."""
        plan = block_plan(reads[AttentionSpan()], attributed) if attributed and self._attributes_blocks else None
        if plan is not None:
            reads[AttentionSpan()].attributed = plan.sums
        return plan

    def tensors(self, rows: RowNumbers, last_ids: LastTokens) -> Inputs[RowLayer]:
        """The inputs of a step. All numbers go to the device in one copy."""
        wanted = (*rows.sample_rows, *rows.scored_rows)
        parts = (rows.token_ids, rows.positions, rows.slots, rows.window_slots, wanted)
        there = numbers_on(self.pool.device, [number for part in parts for number in part])
        ids_T, positions_T, slots_T, window_slots_T, sample_rows_R = there.split([len(part) for part in parts])
        return Inputs(
            token_ids_T=last_ids.resolve(ids_T),
            positions_T=positions_T,
            layers=self.row_layers(rows.reads, slots_T, window_slots_T),
            sample_rows_R=sample_rows_R,
            ropes=row_ropes(rows.ropes, self.pool.device),
            states=rows.states,
        )

    def row_layers(
        self, reads: dict[AttentionSpan, Reads], slots_T: Tensor, window_slots_T: Tensor
    ) -> dict[int, RowLayer]:
        """The writes and reads of each layer, for rows with these reads whose keys go into these slots."""
        made: dict[AttentionSpan, RowLayer] = {reach: Sharded(slots_T, found) for reach, found in reads.items()}
        if self._windows:
            made |= {reach: Replicated(window_slots_T, reads[reach]) for reach in made if not reach.is_full}
        return {layer: made[reach] for layer, reach in self._reaches.items()}

    def kv_bytes_read(self, rows: RowNumbers) -> int:
        """Bytes of this rank's keys and values that rows read in all layers; shared reads count once."""
        return sum(reads.num_keys * self._bytes_per_key[reach] for reach, reads in rows.reads.items())

    def _chunk_reads(
        self, work: Prefill, runs: list[QueryRun], reach: AttentionSpan, past_row: tuple[int, int]
    ) -> Reads:
        """Reads of the query runs of a chunk; the runs are in position order."""
        return Reads(self._full_reads(work, runs, past_row) if reach.is_full else self._near(work, runs, reach))

    def _full_reads(self, work: Prefill, runs: list[QueryRun], past_row: tuple[int, int]) -> Iterator[Read]:
        """Reads of full attention: all rows see the past before the first query, each run also the positions between
        that and itself; from there on, causally.
        """
        for slots in stretches(self._block_table.extents(work.path, 0, runs[0].start, hidden=work.hidden)):
            yield Read(*past_row, *slots)
        for run in runs:
            for slots in stretches(self._block_table.extents(work.path, runs[0].start, run.start, hidden=work.hidden)):
                yield Read(run.row, run.row + run.end - run.start, *slots)
            for extent in self._block_table.extents(work.path, run.start, run.end):
                yield from causal_reads(run, extent)

    def _near(self, work: Prefill, runs: list[QueryRun], reach: AttentionSpan) -> Iterator[Read]:
        for run in runs:
            for extent in self._block_table.extents(work.path, reach.first(run.start), run.end, hidden=work.hidden):
                yield from reads_within(run, extent, reach)

    def _row_slots(self, runs: Sequence[Run], start: int, end: int) -> list[int]:
        slots = [self.pool.trash_slot] * (end - start)
        for run in runs:
            low, high = max(run.start, start), min(run.end, end)
            if run.rank == self._rank and low < high:
                slots[low - start : high - start] = self._slots(run, low, high)
        return slots

    def _slots(self, run: Run, start: int, end: int) -> list[int]:
        size = self.pool.block_size
        return [run.blocks[i // size] * size + i % size for i in range(start - run.start, end - run.start)]


def check_drafts(row: Row) -> None:
    """Raises ValueError for drafts where there must be none."""
    if row.draft_ids and (row.token_index < 0 or row.num_scored):
        raise ValueError(f"a row of sequence {row.sequence} has drafts, but is scored or not sampled from")


def own_piece(work: Prefill, rank: int) -> tuple[Run, Sequence[int]]:
    """The piece of a chunk that a rank computes, and its ids; empty where it has none."""
    first = 0
    for piece in work.pieces:
        if piece.rank == rank:
            return piece, work.token_ids[first : first + len(piece)]
        first += len(piece)
    return Run(rank, 0, 0, ()), ()
