"""A rank without a model: checks the plans it gets and answers by arithmetic."""

import os
import re
import signal
import threading
from typing import Literal

import msgspec

from longleaf.channel.fakes import echo_token
from longleaf.channel.lives import Join, Ready
from longleaf.channel.rank_spec import RankSpec
from longleaf.channel.sequences import Sequences
from longleaf.channel.step import Prefill, Row, StepPlan, StepResult
from longleaf.errors import ModelRefused
from longleaf.runs import Run
from longleaf.sampling import Token
from workers.__main__ import live
from workers.actor import WorkerActor
from workers.control import serve
from workers.pending import Pending, done

FaultKind = Literal["raise", "kill", "hang", "grip", "freeze", "refuse"]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What rank `rank` does wrong, at step number `step` (0: while loading), and perhaps once more when it closes."""

    rank: int
    kind: FaultKind
    step: int = 0
    at_close: FaultKind | None = None

    def strike(self, kind: FaultKind) -> None:
        match kind:
            case "raise":
                raise RuntimeError("was told to raise")
            case "refuse":
                raise ModelRefused("was told to refuse")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                threading.Event().wait()
            case "grip":  # hangs in C code that lets no other thread run
                re.match(r"(a|a)*b", "a" * 100)


class EchoLedger:
    """What a rank believes is stored, from whole plans alone. Raises AssertionError when one contradicts it."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._segments: dict[int, list[Run]] = {}
        self._token_ids: dict[int, list[int]] = {}
        self._last: dict[int, int] = {}

    def apply(self, plan: StepPlan) -> dict[int, Token]:
        """Does the step; sampled tokens by sequence."""
        for segment in plan.release_segments:
            del self._segments[segment], self._token_ids[segment]
        for sequence in plan.release_sequences:
            self._last.pop(sequence, None)
        if isinstance(plan.work, Prefill):
            self._prefill(plan.work)
            return {}
        assert plan.work.rows
        return {row.sequence: self._row(row) for row in plan.work.rows}

    def _prefill(self, work: Prefill) -> None:
        assert len({run.rank for run in work.pieces}) == len(work.pieces)
        self._store(work.path, work.start, work.token_ids, work.pieces)

    def _row(self, row: Row) -> Token:
        assert (row.terms is None) == (row.sequence in self._last), "terms are told once, with the first row"
        token_ids = row.token_ids or (self._last[row.sequence],)
        self._store(row.path, row.start, token_ids, row.runs)
        self._last[row.sequence] = echo_token(token_ids[-1], row.token_index)
        return Token(self._last[row.sequence])

    def _store(self, path: tuple[int, ...], start: int, token_ids: tuple[int, ...], runs: tuple[Run, ...]) -> None:
        """Checks that the path is known and gapless and that `runs` receive the tokens from `start` on."""
        own = self._segments.setdefault(path[-1], [])
        if own and own[-1].start == runs[0].start:
            grown = own.pop()
            assert (grown.rank, grown.blocks) == (runs[0].rank, runs[0].blocks[: len(grown.blocks)])
            assert grown.end == start < runs[0].end
        held = [*self._held(path, runs[0].start), *runs]
        assert [run.start for run in held] == [0, *(run.end for run in held)][:-1]
        assert runs[-1].end == start + len(token_ids)
        assert runs[0].start <= start < runs[0].end
        own.extend(runs)
        self._token_ids.setdefault(path[-1], []).extend(token_ids)
        self._audit_blocks()

    def token_ids(self, path: tuple[int, ...]) -> list[int]:
        """The tokens that a path leads through."""
        found: list[int] = []
        for segment in path:
            found[self._segments[segment][0].start :] = self._token_ids[segment]
        return found

    def _held(self, path: tuple[int, ...], end: int) -> list[Run]:
        """The runs of a path before `end`, each part cut where the next one starts."""
        starts = [self._segments[segment][0].start for segment in path[1:] if self._segments[segment]]
        ends = [*starts, end, end]  # the last segment may have no runs yet
        return [
            msgspec.structs.replace(run, end=min(run.end, part_end))
            for segment, part_end in zip(path, ends, strict=False)
            for run in self._segments[segment]
            if run.start < part_end
        ]

    def _audit_blocks(self) -> None:
        runs = [run for segment in self._segments.values() for run in segment]
        blocks = [(run.rank, block) for run in runs for block in run.blocks]
        assert len(blocks) == len(set(blocks)), "a block is in two runs"
        assert all(len(run) <= len(run.blocks) * self._block_size for run in runs)


class EchoRank:
    """Implements workers.control.Computation without torch."""

    def __init__(self, spec: RankSpec, fault: Fault | None = None, num_blocks: int = 256) -> None:
        self._spec = spec
        self._fault = fault if fault is not None and fault.rank == spec.rank else None
        self._num_blocks = num_blocks
        self._sequences = Sequences(spec.config.block_size)
        self._ledger = EchoLedger(spec.config.block_size)

    def open_store(self) -> int:
        return 0

    def load(self) -> None:
        if self._fault and self._fault.step == 0:
            self._fault.strike(self._fault.kind)

    def join(self, join: Join) -> Ready:
        assert len(join.nodes) == self._spec.config.world_size
        assert join.nodes.count(self._spec.node) == self._spec.num_ranks_here
        return Ready(self._spec.rank, "cpu", "float32", self._num_blocks, 64)

    def start(self, plan: StepPlan) -> Pending:
        if self._fault and self._fault.step == plan.step:
            self._fault.strike(self._fault.kind)
        return done(StepResult(plan.epoch, plan.step, self._ledger.apply(self._sequences.complete(plan))))

    def close(self) -> None:
        if self._fault and self._fault.at_close:
            self._fault.strike(self._fault.at_close)


class EchoMain:
    """Entry of a plain process that lives as an EchoRank."""

    def __init__(self, fault: Fault | None = None) -> None:
        self._fault = fault

    def __call__(self, spec: RankSpec) -> None:
        live(spec, lambda spec: EchoRank(spec, self._fault))


class EchoActor(WorkerActor):
    """A WorkerActor that lives as an EchoRank."""

    def __init__(self, fault: Fault | None = None) -> None:
        self._fault = fault

    def run(self, spec: RankSpec) -> int:
        return serve(spec, lambda spec: EchoRank(spec, self._fault))
