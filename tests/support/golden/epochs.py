"""Ranks that are threads and live through epochs, driven plan by plan, with a ledger of the keys that they hold."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from coordinator.kv_cache.block_allocator import BlockAllocator
from coordinator.kv_cache.windows import WindowBlockPool
from longleaf.config import EngineConfig
from longleaf.rank_protocol.group_messages import Join, KvLayout, SegmentLayout
from longleaf.rank_protocol.step import (
    Decode,
    Move,
    Positions,
    Prefill,
    Row,
    RunTransfer,
    SamplingTerms,
    StepPlan,
    StepResult,
    Work,
)
from longleaf.runs import Run, ceil_div, cut_chunk, serpentine
from longleaf.sampling import SamplingParams
from longleaf.topology import Topology
from tests.support.golden.states import Logits
from tests.support.loopback import LoopbackComm, loopback_groups
from tests.support.on_threads import on_ends
from tests.support.threads import make_spec
from workers.kv_cache.slots import KvPool
from workers.rank import Rank
from workers.runners.kv_transfer import Content

Ids = tuple[int, ...]
NUM_BLOCKS = 150
"""Blocks of each member's pool that are used."""


class Epoch:
    """The members in rank order of an epoch, initialised with the segments that are held."""

    def __init__(self, number: int, ranks: Sequence[Rank], segments: Sequence[SegmentLayout]) -> None:
        self.ranks = ranks
        self._number = number
        self._step = 0
        for rank in ranks:
            rank.leave()
        groups = loopback_groups(Topology(("here",) * len(ranks)))
        self._ends = [group.world for group in groups if isinstance(group.world, LoopbackComm)]
        if len(ranks) > 1:
            on_ends(self._ends, lambda end: ranks[end.rank].connect(groups[end.rank]))
        else:
            ranks[0].join(Join(number, 0, "", 0, ("here",)))
        for rank in ranks:
            rank.set_layout(KvLayout(number, tuple(segments)))

    def execute(self, work: Work, release: Ids = ()) -> StepResult:
        """Rank 0's answer; the others have none."""
        self._step += 1
        plan = StepPlan(self._number, self._step, work, release_segments=release)
        first, *others = on_ends(self._ends, lambda end: self.ranks[end.rank].execute(plan))
        assert first is not None
        assert first.has_finite_keys
        assert not any(others)
        return first


@dataclass
class Segment:
    """The coordinator's view of a segment."""

    path: Ids
    token_ids: Ids
    start: int
    runs: list[Run] = field(default_factory=list)
    window_runs: tuple[Run, ...] = ()

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    def ids(self, runs: Sequence[Run]) -> Ids:
        return tuple(t for run in runs for t in self.token_ids[run.start - self.start : run.end - self.start])

    def put(self, runs: Sequence[Run], instead_of: Sequence[Run] = ()) -> None:
        retained = [run for run in self.runs if run not in instead_of]
        self.runs = sorted([*retained, *runs], key=lambda run: run.start)


class Service:
    """Segments by number, on members that are lost and restored. Unwritten pool entries are NaN."""

    def __init__(self, config: EngineConfig) -> None:
        self.members = [Rank(make_spec(member, config)) for member in range(config.world_size)]
        for member in self.members:
            member.load()
            wipe(member.pool)
        self.alive = list(range(config.world_size))
        """Members by rank."""
        self.segments: dict[int, Segment] = {}
        self._size = config.block_size
        self._windows = self.members[0]._ready.windows
        self.window_size = self._size if self._windows is None else self._windows.block_size(self._size)
        self._window_pool = WindowBlockPool(self._windows, self.window_size)
        self._pools = [BlockAllocator(NUM_BLOCKS) for _ in self.members]
        self._number, self._sequence = 0, 0
        self._tails: dict[int, Segment] = {}
        self.enter(self.alive)

    def enter(self, alive: Sequence[int]) -> None:
        """Begins an epoch with these members, each of which keeps the segments that it held."""
        for segment in self.segments.values():
            segment.runs = [replace(run, rank=alive.index(self.alive[run.rank])) for run in segment.runs]
        self.alive = list(alive)
        self._number += 1
        layouts = [
            SegmentLayout(number, segment.start, tuple(segment.runs), segment.window_runs)
            for number, segment in self.segments.items()
        ]
        self.epoch = Epoch(self._number, [self.members[member] for member in alive], layouts)

    # --- operations of an undisturbed service ---

    def ingest(
        self, number: int, path: Ids, token_ids: Ids, start: int, chunk_size: int, hidden: tuple[Positions, ...] = ()
    ) -> None:
        """Reads tokens into a new segment."""
        segment = self.segments[number] = Segment((*path, number), token_ids, start)
        for turn, low in enumerate(range(start, segment.end, chunk_size)):
            cuts = cut_chunk(low, min(low + chunk_size, segment.end), self._size, len(self.alive))
            order = serpentine(turn, len(self.alive))
            self.read(number, [(rank, *cut) for rank, cut in zip(order, cuts, strict=False)], hidden)

    def ask(self, path: Ids, question: Ids, start: int, count: int) -> tuple[Ids, Tensor]:
        """The greedy answer, and the logits [T, V] that it was chosen from."""
        logits, rank = Logits(), self.epoch.ranks[0]
        unwatched = rank.sampler.start
        logits.watch(0, rank)
        self._sequence += 1
        number, answer = 1000 + self._sequence, list[int]()
        tail = Segment((*path, number), question, start)
        sent, terms = question, SamplingTerms(SamplingParams(max_tokens=count, ignore_end_token=True))
        for index in range(count):
            runs = self._grow(tail, start, max(1, len(sent)), index % len(self.alive))
            row = Row(self._sequence, tail.path, start, sent, runs, index, terms, window_runs=tail.window_runs)
            answer.append(self.epoch.execute(Decode((row,))).tokens[self._sequence][0].id)
            start, sent, terms = runs[-1].end, (), None
        rank.sampler.start = unwatched
        self.epoch.execute(Move(()), (number,))
        self._free(tail.runs)
        self._window_pool.free([block for run in tail.window_runs for block in run.blocks])
        return tuple(answer), logits.first(count)

    def begin(self, path: Ids, token_ids: Ids, start: int, index: int = -1, **fields: Any) -> Row:
        """The first row of a new sequence behind a path."""
        self._sequence += 1
        tail = self._tails[self._sequence] = Segment((*path, 1000 + self._sequence), token_ids, start)
        runs = self._grow(tail, start, len(token_ids), self._sequence % len(self.alive))
        terms = SamplingTerms(SamplingParams(max_tokens=100, ignore_end_token=True)) if index >= 0 else None
        return Row(
            self._sequence, tail.path, start, token_ids, runs, index, terms, window_runs=tail.window_runs, **fields
        )

    def next_row(self, row: Row) -> Row:
        """The row of the token that was sampled from a row; the sequence is sent again."""
        tail, start = self._tails[row.sequence], row.start + row.num_tokens
        runs = self._grow(tail, start, 1, (start + row.sequence) % len(self.alive))
        changed = {"start": start, "token_ids": (), "runs": runs, "token_index": row.token_index + 1, "terms": None}
        return replace(row, window_runs=tail.window_runs, **changed)

    # --- faults and recovery ---

    def lose(self, *members: int, order: Sequence[int] | None = None) -> dict[int, list[Run]]:
        """Members die, and the others, in some order, are the ranks of a new epoch. The lost runs of each segment."""
        lost: dict[int, list[Run]] = {}
        for member in members:
            wipe(self.members[member].pool)
            self._pools[member] = BlockAllocator(NUM_BLOCKS)
        for number, segment in self.segments.items():
            lost[number] = [run for run in segment.runs if self.alive[run.rank] in members]
            segment.put((), lost[number])
        self.enter(order or [member for member in self.alive if member not in members])
        return lost

    def drop(self, number: int, gone: Sequence[Run]) -> None:
        """Drops runs of a segment. A new epoch does not know them."""
        self._free(gone)
        self.segments[number].put((), gone)
        self.enter(self.alive)

    def forget(self, number: int) -> None:
        """Drops a segment."""
        segment = self.segments.pop(number)
        self._free(segment.runs)
        self._window_pool.free([block for run in segment.window_runs for block in run.blocks])
        self.enter(self.alive)

    def read(self, number: int, pieces: Sequence[tuple[int, int, int]], hidden: tuple[Positions, ...] = ()) -> None:
        """Reads (rank, start, end) of a segment, in one plan."""
        segment = self.segments[number]
        runs = tuple(Run(rank, start, end, self._allocate(rank, end - start)) for rank, start, end in pieces)
        segment.put(runs)
        self._advance_windows(segment, runs[0].start, runs[-1].end, is_chunk=True)
        ids, windows = segment.ids(runs), segment.window_runs
        self.epoch.execute(Prefill(segment.path, runs[0].start, ids, runs, window_runs=windows, hidden=hidden))

    def read_stripes(self, number: int, lost: Sequence[Run]) -> None:
        """Several lost runs in a plan, each on another rank."""
        size = len(self.alive)
        for turn, first in enumerate(range(0, len(lost), size)):
            some = zip(serpentine(turn, size), lost[first : first + size], strict=False)
            self.read(number, [(rank, run.start, run.end) for rank, run in some])

    def read_dealt(self, number: int, lost: Sequence[Run]) -> None:
        """Each lost run in a plan, cut over all ranks."""
        for run in lost:
            cuts = cut_chunk(run.start, run.end, self._size, len(self.alive))
            self.read(number, [(rank, *cut) for rank, cut in enumerate(cuts)])

    def move(self, number: int, moves: Sequence[tuple[Run, int]], windows: tuple[Run, ...] = ()) -> None:
        """Brings runs of a segment to other ranks."""
        targets = [replace(run, rank=rank, blocks=self._allocate(rank, len(run))) for run, rank in moves]
        gone = [run for run, _ in moves]
        transfers = tuple(RunTransfer(number, *pair) for pair in zip(gone, targets, strict=True))
        self.epoch.execute(Move(transfers, windows))
        for run in gone:
            wipe(self.epoch.ranks[run.rank].pool, run.blocks)
        self._free(gone)
        self.segments[number].put(targets, gone)

    # --- stored keys ---

    def keys(self, number: int) -> dict[int, Tensor]:
        """The stored keys of each token of a segment: [S, N, K, D] of each sharded layer."""
        segment, windows = self.segments[number], self._windows
        assert [run.start for run in segment.runs] == [segment.start, *(run.end for run in segment.runs)][:-1]
        layers = {i for i, spec in self.members[0].model.layers.items() if windows is None or spec.reach.is_full}
        return {layer: torch.cat([self._taken(layer, run) for run in segment.runs]) for layer in layers}

    def content(self, run: Run) -> Tensor:
        """The bytes of a run's blocks."""
        return Content(self.epoch.ranks[run.rank].pool).export(run.blocks)

    def _taken(self, layer: int, run: Run) -> Tensor:
        slots = [run.blocks[i // self._size] * self._size + i % self._size for i in range(len(run))]
        return self.epoch.ranks[run.rank].pool.take(layer, torch.tensor(slots))

    def _allocate(self, rank: int, num_tokens: int) -> tuple[int, ...]:
        return self._pools[self.alive[rank]].allocate(ceil_div(num_tokens, self._size))

    def _free(self, runs: Sequence[Run]) -> None:
        for run in runs:
            self._pools[self.alive[run.rank]].free(run.blocks)

    def _grow(self, tail: Segment, start: int, count: int, rank: int, num_drafts: int = 0) -> tuple[Run, ...]:
        """Runs for more tokens, the last of them drafts, in the last one as far as its blocks reach."""
        self._advance_windows(tail, start, start + count, is_chunk=False, num_drafts=num_drafts)
        last = tail.runs[-1] if tail.runs else None
        if last is None or len(last) + count > len(last.blocks) * self._size:
            last = Run(rank, start, start, self._allocate(rank, count))
        grown = replace(last, end=start + count)
        tail.put([grown], [last])
        return (grown,)

    def _advance_windows(self, segment: Segment, start: int, end: int, *, is_chunk: bool, num_drafts: int = 0) -> None:
        """The window runs of a segment when tokens come, as the placer has them. Each draft has a state."""
        if self._windows is not None:
            is_last_only = is_chunk or self._windows.is_state
            first = max(start, self._windows.first(end - num_drafts)) if is_last_only else start
            retained = self._window_pool.trim(segment.window_runs, start)
            segment.window_runs = self._window_pool.grow(retained, first, end)


def wipe(pool: KvPool, blocks: Sequence[int] | None = None) -> None:
    """Overwrites blocks with values that reveal any later read; by default all blocks."""
    for of_windows in (False, True) if blocks is None else (False,):
        for _, tensor, _ in pool.blocks(of_windows=of_windows):
            tensor[:, slice(None) if blocks is None else list(blocks)] = 99 if tensor.dtype == torch.int8 else torch.nan
