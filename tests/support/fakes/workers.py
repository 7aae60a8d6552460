"""A rank without a model: checks the plans that it receives and answers by arithmetic."""

import bisect
import os
import re
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from longleaf.errors import DataLoss, LongleafError, ModelRefused, NotFound, StorageUnavailable
from longleaf.rank_protocol.group_messages import Join, KvLayout, Ready, SegmentLayout
from longleaf.rank_protocol.member_messages import Hello
from longleaf.rank_protocol.rank_spec import RankSpec
from longleaf.rank_protocol.row_delta import RowState
from longleaf.rank_protocol.snapshots import Discard, Failure, Fetch, Fetched, Order, Outcome, Save, Saved
from longleaf.rank_protocol.step import Decode, Move, Prefill, Restore, Row, StepPlan, StepResult
from longleaf.runs import Run, until
from longleaf.sampling import Token
from tests.support.fakes.echo_model import drafted_ends, echo_tokens
from tests.support.fakes.kv_store import FolderStore
from workers.__main__ import live
from workers.actor import WorkerActor
from workers.control import serve
from workers.rank_runtime import StepHandle, done

FaultKind = Literal["raise", "kill", "hang", "grip", "freeze", "refuse"]


class RankFault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault of member number `rank` at step number `step` (0: while loading), and optionally another one on close."""

    rank: int
    kind: FaultKind
    step: int = 0
    at_close: FaultKind | None = None

    def trigger(self, kind: FaultKind) -> None:
        match kind:
            case "raise":
                raise RuntimeError("failed on request")
            case "refuse":
                raise ModelRefused("refused on request")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                threading.Event().wait()
            case "grip":  # hangs in C code that holds the GIL
                re.match(r"(a|a)*b", "a" * 100)


Content = Mapping[int, int]
"""The token ids of a piece by position; -1 where the id is unknown."""


class EchoBlockTable:
    """The block table of an echo rank, derived from layouts and whole plans only. Raises AssertionError when a plan
    contradicts it or reads positions that are not held.
    """

    def __init__(self, block_size: int, rank: int | None = None) -> None:
        """Checks only restored runs of `rank`; None checks those of all ranks."""
        self._block_size = block_size
        self.rank = rank
        self.fetched: dict[tuple[int, int], Content] = {}
        """Fetched pieces by rank and ticket."""
        self._starts: dict[int, int] = {}
        self._segments: dict[int, list[Run]] = {}
        """In order of position."""
        self._token_ids: dict[int, dict[int, int]] = {}
        """By position: the ids of the tokens that were computed here."""
        self._last: dict[int, int] = {}

    def replace(self, segments: Sequence[SegmentLayout]) -> None:
        """Replaces the table by a layout. Sequences start again."""
        self._starts = {segment.segment: segment.start for segment in segments}
        self._segments = {segment.segment: [] for segment in segments}
        self._token_ids = {segment: self._token_ids.get(segment, {}) for segment in self._starts}
        self._last.clear()
        for segment in segments:
            for run in segment.runs:
                self._put(segment.segment, run)
        self._audit_blocks()

    def apply(self, plan: StepPlan) -> dict[int, tuple[Token, ...]]:
        """Applies the step; returns the sampled tokens by sequence."""
        for segment in plan.release_segments:
            del self._starts[segment], self._segments[segment], self._token_ids[segment]
        for segment, end in plan.cut_segments:
            self._segments[segment] = [
                until(run, end, self._block_size) for run in self._segments[segment] if run.start < end
            ]
            self._token_ids[segment] = {at: token for at, token in self._token_ids[segment].items() if at < end}
        for sequence in plan.release_sequences:
            self._last.pop(sequence, None)
        match plan.work:
            case Prefill() as work:
                self._prefill(work)
            case Move() as work:
                self._move(work)
            case Restore() as work:
                self._restore(work)
            case Decode(rows=rows):
                assert rows
                tokens = {row.sequence: self._row(row) for row in rows}
                return {row.sequence: tokens[row.sequence] for row in rows if row.token_index >= 0}
        return {}

    def _prefill(self, work: Prefill) -> None:
        assert len({run.rank for run in work.pieces}) == len(work.pieces)
        assert work.start == work.pieces[0].start
        first = 0
        for piece in work.pieces:
            self._store(work.path, piece.start, work.token_ids[first : first + len(piece)], (piece,))
            first += len(piece)
        assert first == len(work.token_ids)

    def _move(self, work: Move) -> None:
        for transfer in work.transfers:
            runs, old, new = self._segments[transfer.segment], transfer.source, transfer.target
            assert (old.start, old.end, len(old.blocks)) == (new.start, new.end, len(new.blocks))
            count = len(old.blocks)
            found = [
                run for run in runs if (run.rank, run.start, run.blocks[:count]) == (old.rank, old.start, old.blocks)
            ]
            assert found and old.end == min(found[0].end, old.start + count * self._block_size), "no such run moves"
            rest = Run(old.rank, old.end, found[0].end, found[0].blocks[count:])
            at = runs.index(found[0])
            runs[at : at + 1] = [new, rest] if len(rest) else [new]
        self._audit_blocks()

    def save(self, order: Save) -> Content:
        """The content of the saved piece."""
        known, resident = self._token_ids[order.segment], self._segments[order.segment]
        for run in order.runs:
            (whole,) = (other for other in resident if other.rank == run.rank and other.start <= run.start < other.end)
            first, rest = divmod(run.start - whole.start, self._block_size)
            there = rest == 0 and whole.blocks[first : first + len(run.blocks)] == run.blocks and run.end <= whole.end
            assert there, "what is not held is to be saved"
        return {position: known.get(position, -1) for run in order.runs for position in range(run.start, run.end)}

    def _restore(self, work: Restore) -> None:
        assert self._starts.setdefault(work.segment, work.start) == work.start
        self._segments.setdefault(work.segment, [])
        known = self._token_ids.setdefault(work.segment, {})
        for portion in work.portions:
            assert len({run.rank for run in portion.runs}) == 1
            for run in portion.runs:
                assert run.start >= work.start
                if self.rank in (None, run.rank):
                    content = self.fetched.get((run.rank, portion.ticket))
                    assert content is not None, "what was not fetched is to be restored"
                    positions = range(run.start, run.end)
                    assert content.keys() >= set(positions), "the piece has no such positions"
                    known.update({position: content[position] for position in positions})
                resident = self._segments[work.segment]
                is_free = all(run.end <= other.start or other.end <= run.start for other in resident)
                assert is_free, "positions are held twice"
                self._put(work.segment, run)
        self._audit_blocks()

    def _row(self, row: Row) -> tuple[Token, ...]:
        assert (row.terms is None) == (row.sequence in self._last), "terms are told once, with the first row"
        token_ids = row.token_ids or (self._last[row.sequence],)
        self._store(row.path, row.start, (*token_ids, *row.draft_ids), row.runs)
        sampled = echo_tokens(token_ids[-1], row.token_index, row.draft_ids)
        self._last[row.sequence] = sampled[-1]
        if row.draft_ids:
            self._cut_back(row, row.start + len(token_ids) + len(sampled) - 1)
        return tuple(map(Token, sampled))

    def _cut_back(self, row: Row, end: int) -> None:
        """Drops the refused drafts: the sequence ends at `end`."""
        segment, run, first = row.path[-1], row.runs[-1], row.start + row.num_known - 1
        assert (first - run.start) // self._block_size == (len(run) - 1) // self._block_size, "a draft opens a block"
        runs = self._segments[segment]
        runs[runs.index(run)] = until(run, end, self._block_size)
        for position in range(end, run.end):
            del self._token_ids[segment][position]

    def _store(self, path: tuple[int, ...], start: int, token_ids: tuple[int, ...], runs: tuple[Run, ...]) -> None:
        """Checks that the path is held without a gap and that `runs` receive the tokens from `start` on."""
        segment = path[-1]
        self._starts.setdefault(segment, runs[0].start)
        self._segments.setdefault(segment, [])
        assert runs[-1].end == start + len(token_ids)
        assert runs[0].start <= start < runs[0].end
        for run in runs:
            assert self._put(segment, run) == max(start, run.start), "a run has tokens that nobody brought"
        resident = self._slots_of(path, runs[-1].end)
        assert [run.start for run in resident] == [0, *(run.end for run in resident)][:-1], (
            "keys are read that are not there"
        )
        known = self._token_ids.setdefault(segment, {})
        known.update(enumerate(token_ids, start))
        self._audit_blocks()

    def _put(self, segment: int, run: Run) -> int:
        """Adds a run, or replaces its shorter version. Returns the first position that was not held before."""
        resident = self._segments[segment]
        grown = next((other for other in resident if other.start == run.start), None)
        if grown is not None:
            assert (grown.rank, grown.blocks) == (run.rank, run.blocks[: len(grown.blocks)])
            assert grown.end < run.end
            resident.remove(grown)
        assert len(run)
        assert all(run.end <= other.start or other.end <= run.start for other in resident), "positions are held twice"
        bisect.insort(resident, run, key=lambda run: run.start)
        return grown.end if grown is not None else run.start

    def token_ids(self, path: tuple[int, ...]) -> list[int]:
        """The token ids along a path."""
        found: list[int] = []
        for segment in path:
            known = self._token_ids[segment]
            found[self._starts[segment] :] = [known[position] for position in sorted(known)]
        return found

    def _slots_of(self, path: tuple[int, ...], end: int) -> list[Run]:
        """The runs of a path before `end`; each segment is cut where the next one starts."""
        ends = [*(min(self._starts[segment], end) for segment in path[1:]), end]
        return [
            msgspec.structs.replace(run, end=min(run.end, part_end))
            for segment, part_end in zip(path, ends, strict=True)
            for run in self._segments[segment]
            if run.start < part_end
        ]

    def _audit_blocks(self) -> None:
        runs = [run for segment in self._segments.values() for run in segment]
        blocks = [(run.rank, block) for run in runs for block in run.blocks]
        assert len(blocks) == len(set(blocks)), "a block is in two runs"
        assert all(len(run) <= len(run.blocks) * self._block_size for run in runs)


def failure_of(error: LongleafError) -> Failure:
    is_damaged = isinstance(error, DataLoss | NotFound)
    return Failure("damaged" if is_damaged else "unavailable", str(error))


class EchoRank:
    """Implements workers.rank_runtime.RankRuntime without torch."""

    num_exchanges = 0

    def __init__(self, spec: RankSpec, fault: RankFault | None = None, num_blocks: int = 256) -> None:
        self._spec = spec
        self._fault = fault if fault is not None and fault.rank == spec.member else None
        self._num_blocks = num_blocks
        self._store = FolderStore(spec.config.snapshot_url) if spec.config.snapshot_url else None
        self._fetched: dict[int, Content] = {}
        self.leave()

    def make_hello(self) -> Hello:
        return Hello(self._spec.member, self._spec.node, self._spec.host, os.getpid())

    def open_store(self) -> int:
        return 0

    def load(self, parts: Sequence[int] = ()) -> None:
        if self._fault and self._fault.step == 0:
            self._fault.trigger(self._fault.kind)

    def hold(self, parts: Sequence[int]) -> int:
        """Holds no weights."""
        return 0

    def join(self, join: Join) -> Ready:
        assert join.nodes[join.rank] == self._spec.node
        self._block_table.rank = join.rank
        self._block_table.fetched = {(join.rank, ticket): content for ticket, content in self._fetched.items()}
        return Ready(self._spec.member, "cpu", "float32", self._num_blocks, 64, epoch=join.epoch, form="echo")

    def set_layout(self, layout: KvLayout) -> None:
        self._block_table.replace(layout.segments)

    def start(self, plan: StepPlan) -> StepHandle:
        if self._fault and self._fault.step == plan.step:
            self._fault.trigger(self._fault.kind)
        plan = self._sequences.complete(plan)
        tokens = self._block_table.apply(plan)
        for row, end in drafted_ends(plan, tokens):
            self._sequences.cut_back(row.sequence, end)
        return done(StepResult(plan.epoch, plan.step, tokens))

    def submit_order(self, order: Order, answer: Callable[[Outcome], None]) -> None:
        """Executes the order synchronously."""
        member, rank = self._spec.member, self._block_table.rank
        match order:
            case Save() if rank is None:
                answer(Saved(member, order.ticket, failure=Failure("dropped", "the epoch has ended")))
            case Save():
                content = msgspec.msgpack.encode(self._block_table.save(order))
                try:
                    answer(Saved(member, order.ticket, *self._storage.put(order.name, [content])))
                except LongleafError as error:
                    answer(Saved(member, order.ticket, failure=failure_of(error)))
            case Fetch():
                try:
                    content = self._storage.get(order.name, order.digest)
                except LongleafError as error:
                    answer(Fetched(member, order.ticket, failure_of(error)))
                    return
                self._fetched[order.ticket] = msgspec.msgpack.decode(content, type=dict[int, int])
                if rank is not None:
                    self._block_table.fetched[rank, order.ticket] = self._fetched[order.ticket]
                answer(Fetched(member, order.ticket))
            case Discard():
                for ticket in order.tickets:
                    self._fetched.pop(ticket, None)
                    self._block_table.fetched.pop((rank or 0, ticket), None)

    @property
    def _storage(self) -> FolderStore:
        if self._store is None:
            raise StorageUnavailable("snapshot_url: none was given")
        return self._store

    def fence(self) -> None:
        """Does nothing: an echo rank never waits for others."""

    def leave(self) -> None:
        self._sequences = RowState(self._spec.config.block_size)
        self._block_table = EchoBlockTable(self._spec.config.block_size)

    def close(self) -> None:
        if self._fault and self._fault.at_close:
            self._fault.trigger(self._fault.at_close)


class EchoMain:
    """Entry point of a plain process that runs an EchoRank."""

    def __init__(self, fault: RankFault | None = None) -> None:
        self._fault = fault

    def __call__(self, spec: RankSpec) -> None:
        live(spec, lambda spec: EchoRank(spec, self._fault))


class EchoActor(WorkerActor):
    """A WorkerActor that runs an EchoRank."""

    def __init__(self, fault: RankFault | None = None) -> None:
        self._fault = fault

    def run(self, spec: RankSpec) -> int:
        return serve(spec, lambda spec: EchoRank(spec, self._fault))
