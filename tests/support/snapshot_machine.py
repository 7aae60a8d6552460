"""A scheduler machine whose contexts and storage survive restarts; fetches complete in any order, or never."""

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from coordinator.kv_cache.segment_placement import SegmentPlacement
from coordinator.recovery.restore import (
    DamagedRemoved,
    DiscardPiece,
    FetchPiece,
    ManifestFound,
    PieceFetched,
    ReadManifest,
    RemoveDamaged,
    SegmentUnavailable,
    SnapshotDamaged,
)
from coordinator.scheduling.scheduler import Scheduler
from longleaf.positions import EVERY_RANK, WindowSpec
from longleaf.rank_protocol.snapshots import Save
from longleaf.runs import Run
from longleaf.storage.manifest import PieceRef
from tests.support.durable_machine import DurableMachine
from tests.support.shadow_key_cache import Content


@dataclass
class Snapshot:
    """The stored pieces of a segment."""

    pieces: list[Content]
    windows: Content
    ranges: list[list[tuple[int, int]]]
    window_ranges: list[tuple[int, int]]


class SnapshotMachine(DurableMachine):
    """Storage survives the service, and counts only for segments that ranks could have written completely.

    It has only segments of contexts: a catalog knows no others, and other ids may be used twice.
    """

    def _start_ranks(self, blocks: list[int], block_size: int, windows: WindowSpec | None) -> None:
        numbers = self.keys.numbers if hasattr(self, "keys") else {}
        super()._start_ranks(blocks, block_size, windows)
        self.keys.numbers = numbers  # equal keys stay equal
        self.fetching: list[FetchPiece] = []
        if not hasattr(self, "storage"):
            self.storage: dict[int, Snapshot] = {}
            self.num_restored = 0

    def _make_scheduler(self, epoch: int, **options: Any) -> Scheduler:
        return super()._make_scheduler(epoch, is_stored=lambda segment: segment in self.storage, **options)

    # --- saving ---

    @precondition(lambda self: self.is_calm)
    @rule(data=st.data(), size=st.integers(1, 4))
    def save(self, data: st.DataObject, size: int) -> None:
        """Something that is wholly held is saved, in pieces of so many runs."""
        if placements := self._may_be_saved():
            placement = data.draw(st.sampled_from(placements), label="segment")
            self.storage[placement.segment.id] = self._saved(placement, size)

    def _may_be_saved(self) -> list[SegmentPlacement]:
        """Segments of contexts that are wholly held."""
        contexts = self.scheduler.contexts.list()
        retained = dict.fromkeys(segment for context in contexts for segment in context.path.segments)
        placements = self.scheduler.segments.placements.for_segments(retained)
        return [one for one in placements if one.loss is None and not one.is_evicted]

    def _saved(self, placement: SegmentPlacement, size: int) -> Snapshot:
        found = Snapshot([], {}, [], [(run.start, run.end) for run in placement.window_runs])
        for rank, member in enumerate(self.keys.members):
            runs = [run for run in placement.runs if run.rank == rank]
            for first in range(0, len(runs), size):
                some = runs[first : first + size]
                found.pieces.append(self._content(member, placement, some))
                found.ranges.append([(run.start, run.end) for run in some])
        if placement.window_runs:
            found.windows = self._content(self.keys.members[0], placement, placement.window_runs, of_windows=True)
        return found

    def _content(
        self, member: int, placement: SegmentPlacement, runs: list[Run] | tuple[Run, ...], *, of_windows: bool = False
    ) -> Content:
        order = Save(0, "piece", placement.segment.id, tuple(runs), of_windows)
        return self.keys.save(member, order)

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """Storage loses something."""
        if self.storage:
            del self.storage[data.draw(st.sampled_from(sorted(self.storage)), label="lost")]

    # --- fetching ---

    def _take_orders(self) -> None:
        self._execute_actions()
        if not self.is_between:
            self.scheduler.job_recovery.resume()
        self._execute_actions()

    def _execute_actions(self) -> None:
        restoring = self.scheduler.recovery.restoring
        for action in restoring.pop_actions():
            match action:
                case ReadManifest(segment):
                    self._read_manifest(segment.id)
                case FetchPiece():
                    self.fetching.append(action)
                case DiscardPiece(ticket):
                    self.fetching = [part for part in self.fetching if part.ticket != ticket]
                    self.keys.fetched = {key: keys for key, keys in self.keys.fetched.items() if key[1] != ticket}
                case RemoveDamaged(reasons):
                    for segment_id in reasons:
                        self.storage.pop(segment_id, None)
                    restoring.handle(DamagedRemoved(reasons))
                case _:
                    pass

    def _read_manifest(self, segment_id: int) -> None:
        restoring = self.scheduler.recovery.restoring
        if (found := self.storage.get(segment_id)) is None:
            restoring.handle(SegmentUnavailable(segment_id))
            return
        pieces = [
            PieceRef(name=str(i), runs=tuple(ranges), num_bytes=0, digest="") for i, ranges in enumerate(found.ranges)
        ]
        windows = (
            PieceRef(name="windows", runs=tuple(found.window_ranges), num_bytes=0, digest="")
            if found.window_ranges
            else None
        )
        restoring.handle(ManifestFound(segment_id, pieces, windows))

    @rule(data=st.data(), is_there=st.sampled_from([True, True, True, False]))
    def fetch(self, data: st.DataObject, is_there: bool) -> None:
        """Something has been fetched, or cannot be."""
        self._take_orders()
        if self.fetching:
            self._fetch(data.draw(st.sampled_from(self.fetching), label="part"), is_there)

    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        """Storage times out: later answers for the segment are ignored."""
        self._take_orders()
        if self.fetching:
            part = data.draw(st.sampled_from(self.fetching), label="part")
            self.scheduler.recovery.restoring.handle(SegmentUnavailable(part.segment_id))

    def _fetch(self, part: FetchPiece, is_there: bool) -> None:
        self.fetching.remove(part)
        found = self.storage.get(part.segment_id)
        is_there &= found is not None
        if is_there and found is not None:
            members = self.keys.members if part.rank == EVERY_RANK else [self.keys.members[part.rank]]
            content = found.windows if part.of_windows else found.pieces[int(part.piece.name)]
            self.keys.fetched |= {(member, part.ticket): content for member in members}
        damaged = SnapshotDamaged(part.segment_id, "the piece is missing", ticket=part.ticket)
        self.scheduler.recovery.restoring.handle(PieceFetched(part.ticket) if is_there else damaged)

    def _fetch_all(self) -> bool:
        """Whether there was something."""
        self._take_orders()
        found = list(self.fetching)
        for part in found:
            self._fetch(part, True)
        return bool(found)

    def _schedule(self) -> bool:
        return super()._schedule() or (self._fetch_all() and super()._schedule())

    def _no_job_is_stuck(self) -> None:
        if not any(map(self.scheduler.recovery.restoring.has, self.scheduler.segments.placements)):
            super()._no_job_is_stuck()

    @rule(data=st.data(), steps=st.integers(1, 9))
    def save_and_die(self, data: st.DataObject, steps: int) -> None:
        """Everything is saved; then everything is restored from storage."""
        self.run_steps(steps, 2, 0.001)
        while self.plans and not self.is_between:
            self.commit()
        if self.is_calm:
            for placement in self._may_be_saved():
                self.storage[placement.segment.id] = self._saved(placement, 2)
        self.die(data)
