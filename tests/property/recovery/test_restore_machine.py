"""Restores from storage: any order of requests, answers and ends of epochs ends every restore and frees every piece."""

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.kv_cache.block_placer import BlockCount, BlockPlacer
from coordinator.kv_cache.rank_mapping import RankMapping
from coordinator.kv_cache.segment_placement import SegmentPlacement
from coordinator.kv_cache.segments import SegmentStore
from coordinator.kv_cache.token_paths import EMPTY_PATH, Segment
from coordinator.recovery.fault_score import BREAK_SCORE, LOSS_SCORE
from coordinator.recovery.recovery import RecoveryManager
from coordinator.recovery.restore import (
    MAX_FETCHED,
    CheckSnapshot,
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
from longleaf.positions import EVERY_RANK, AttentionSpan, WindowSpec
from longleaf.rank_protocol.step import Restore, Work
from longleaf.storage.manifest import PieceRef
from tests.support.scheduler_machine import runs

SIZE = 4
RANKS = 3
BLOCKS = 90
MAX_REQUESTED = 4
"""Segments that are requested at the same time: a single rank has room for them."""
MAX_TURNS = 200
WINDOWS = WindowSpec(reaches=(AttentionSpan(window=4),), num_blocks=40)


class RestoreMachine(RuleBasedStateMachine):
    """The machine under test, and a model of storage and rank memory."""

    @initialize(windows=st.sampled_from([None, None, WINDOWS]))
    def start(self, windows: WindowSpec | None) -> None:
        self.placer = BlockPlacer([BLOCKS] * RANKS, SIZE, windows)
        self.segments = SegmentStore(self.placer)
        self.recovery = RecoveryManager(self.placer, self.segments, is_stored=lambda number: number in self.stored)
        self.restoring = self.recovery.restoring
        self.library: dict[int, Segment] = {}
        self.stored: dict[int, list[PieceRef]] = {}
        self.archive = frozenset[int]()
        """Segments that were imported together."""
        self.requested: dict[int, SegmentPlacement] = {}
        self.reading: list[int] = []
        self.fetching: dict[int, FetchPiece] = {}
        self.fetched: dict[int, FetchPiece] = {}
        self.tickets = Counter[int]()
        self.discarded = Counter[int]()
        self.damaged = set[int]()
        self.removing: list[list[int]] = []
        self.suspected: list[int] = []
        self.work: Work | None = None
        self.epoch = 1

    # --- segments ---

    @rule(
        num_blocks=st.integers(1, 20), is_stored=st.integers(0, 3).map(bool), is_imported=st.booleans(), data=st.data()
    )
    def add(self, num_blocks: int, is_stored: bool, is_imported: bool, data: st.DataObject) -> None:
        """Adds a segment, perhaps to storage, in pieces of different sizes, and requests it."""
        segment = Segment(len(self.library), EMPTY_PATH)
        segment.extend(range(num_blocks * SIZE - data.draw(st.integers(0, SIZE - 1), label="missing")))
        self.library[segment.id] = segment
        if is_stored:
            self._store(segment, data.draw(st.integers(1, num_blocks) | st.just(1), label="blocks per piece"))
            self.archive |= {segment.id} if is_imported else set()
        self._request(segment)

    def _store(self, segment: Segment, blocks: int) -> None:
        size = blocks * SIZE - (segment.id % 5 == 4)  # such pieces end within a block, and are not used
        ranges = [(start, min(start + size, segment.end)) for start in range(0, segment.end, size)]
        self.stored[segment.id] = [
            PieceRef(name=f"{segment.id}/{i}", runs=(one,), num_bytes=1, digest="") for i, one in enumerate(ranges)
        ]

    @rule(data=st.data())
    def request_again(self, data: st.DataObject) -> None:
        if released := sorted(self.library.keys() - self.requested.keys()):
            self._request(self.library[data.draw(st.sampled_from(released), label="segment")])

    def _request(self, segment: Segment) -> None:
        if len(self.requested) == MAX_REQUESTED:
            return
        self.segments.adopt(segment)
        self.requested[segment.id] = placement = self.segments.placements[segment]
        self.segments.retain(segment.path)
        self.recovery.begin_reload([placement])

    @precondition(lambda self: self.requested)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self._release(data.draw(st.sampled_from(sorted(self.requested)), label="segment"))

    def _release(self, number: int) -> None:
        del self.requested[number]
        self.segments.release(self.library[number].path)

    # --- actions ---

    @rule()
    def resume(self) -> None:
        """As the scheduler does in a step, before the engine executes the actions."""
        self.recovery.reserve_lost([])

    @rule()
    def turn(self) -> None:
        """As the engine does before it waits."""
        self.recovery.check_complete()
        self.recovery.reserve_lost([])
        self._execute_actions()

    def _execute_actions(self) -> None:
        actions = self.restoring.pop_actions()
        ordered = {action.ticket for action in actions if isinstance(action, FetchPiece)}
        assert all(action.ticket not in ordered for action in actions if isinstance(action, DiscardPiece))
        for action in actions:
            match action:
                case ReadManifest(segment):
                    assert segment.id in self.stored
                    assert self.restoring.needs(segment.id)
                    assert segment.id not in self.damaged, "it is not used until it has been removed"
                    self.reading.append(segment.id)
                case FetchPiece(ticket):
                    self.tickets[ticket] += 1
                    assert self.tickets[ticket] == 1
                    self.fetching[ticket] = action
                case DiscardPiece(ticket):
                    self.discarded[ticket] += 1
                    assert (self.tickets[ticket], self.discarded[ticket]) == (1, 1)
                    self.fetching.pop(ticket, None)
                    self.fetched.pop(ticket, None)
                case CheckSnapshot(segment_id):
                    self.suspected.append(segment_id)
                case RemoveDamaged(reasons):
                    assert reasons.keys() <= self.damaged
                    assert not any(map(self.restoring.needs, reasons))
                    assert all(number not in removed for removed in self.removing for number in reasons)
                    self.removing.append(list(reasons))

    # --- events ---

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), answer=st.sampled_from(["found", "found", "found", "unavailable", "damaged"]))
    def answer_manifest(self, data: st.DataObject, answer: str) -> None:
        number = data.draw(st.sampled_from(self.reading), label="segment")
        self.reading.remove(number)
        self._answer_manifest(number, answer)

    @rule(are_popped=st.booleans())
    def order_pieces(self, are_popped: bool) -> None:
        """Storage answers at once."""
        self.turn()
        while self.reading:
            self._answer_manifest(self.reading.pop(), "found")
        self.turn() if are_popped else self.resume()

    @rule(data=st.data(), last=st.sampled_from(["fetched", "unavailable", "damaged"]))
    def end_fetches(self, data: st.DataObject, last: str) -> None:
        """Some pieces are fetched, and a step begins to write them, before another one ends."""
        self.order_pieces(True)
        if len(self.fetching) < 2:
            return
        tickets = data.draw(st.permutations(sorted(self.fetching)), label="tickets")
        for ticket in tickets[: data.draw(st.integers(1, len(tickets) - 1), label="fetched")]:
            self._end_fetch(ticket, "fetched")
        if self.work is None and data.draw(st.booleans(), label="plan"):
            self.plan()
        self._end_fetch(tickets[-1], last)
        self.turn()

    def _answer_manifest(self, number: int, answer: str) -> None:
        if answer == "damaged" or number not in self.stored:
            self._report_damage(number)
        elif answer == "unavailable":
            self.restoring.handle(SegmentUnavailable(number))
        else:
            segment, windows = self.library[number], None
            if self.placer.windows is not None:
                first = (segment.end - 1) // SIZE * SIZE
                windows = PieceRef(
                    name=f"{number}/windows", runs=((max(0, first - SIZE), segment.end),), num_bytes=1, digest=""
                )
            self.restoring.handle(ManifestFound(number, self.stored[number], windows))

    @precondition(lambda self: self.fetching)
    @rule(data=st.data(), answer=st.sampled_from(["fetched", "fetched", "fetched", "unavailable", "damaged"]))
    def end_fetch(self, data: st.DataObject, answer: str) -> None:
        self._end_fetch(data.draw(st.sampled_from(sorted(self.fetching)), label="ticket"), answer)

    def _end_fetch(self, ticket: int, answer: str) -> None:
        fetch = self.fetching.pop(ticket)
        self.fetched[ticket] = fetch  # until it is discarded, which ranks must be ordered to do even after a failure
        if answer == "fetched":
            self.restoring.handle(PieceFetched(ticket))
        elif answer == "unavailable":
            self.restoring.handle(SegmentUnavailable(fetch.segment_id))
        else:
            self._report_damage(fetch.segment_id, ticket)

    @rule(ticket=st.integers(0, 40))
    def answer_late(self, ticket: int) -> None:
        """A rank answers after its order was discarded."""
        if self.discarded[ticket]:
            self.restoring.handle(PieceFetched(ticket))

    def _report_damage(self, number: int, ticket: int | None = None) -> None:
        imported_with = sorted(self.archive) if number in self.archive else []
        self.damaged |= {number, *imported_with}
        self.restoring.handle(SnapshotDamaged(number, "damaged", imported_with, ticket))
        for placement in [self.requested[other] for other in imported_with if other in self.requested]:
            is_written = self.restoring.under_way is placement.segment
            assert is_written or not self.restoring.has(placement), "nothing of the archive is restored"

    @precondition(lambda self: self.suspected)
    @rule(is_damaged=st.booleans())
    def answer_suspicion(self, is_damaged: bool) -> None:
        if is_damaged:
            self._report_damage(self.suspected.pop())
        else:
            self.suspected.pop()

    @precondition(lambda self: self.removing)
    @rule(is_saved_again=st.booleans())
    def remove_damaged(self, is_saved_again: bool) -> None:
        numbers = self.removing.pop(0)
        for number in numbers:
            self.stored.pop(number, None)
            self.damaged.discard(number)
            if is_saved_again:
                self._store(self.library[number], 1)
        self.archive -= set(numbers)
        self.restoring.handle(DamagedRemoved(numbers))

    # --- steps and epochs ---

    @precondition(lambda self: self.work is None)
    @rule()
    def plan(self) -> None:
        self.work = self.recovery.plan([], 2 * SIZE)
        assert not self.restoring.pop_faults()
        if isinstance(self.work, Restore):
            tickets = {portion.ticket for portion in self.work.portions}
            tickets |= {self.work.window_ticket} if self.work.window_runs else set()
            assert tickets <= self.fetched.keys(), "the ranks have all pieces that the step writes"
            assert {self.fetched[ticket].segment_id for ticket in tickets} == {self.work.segment}

    @precondition(lambda self: self.work is not None)
    @rule()
    def commit(self) -> None:
        self.work = None
        self.recovery.commit()

    @rule(data=st.data(), has_broken=st.booleans(), is_rare=st.sampled_from([False, False, False, True]))
    def end_epoch(self, data: st.DataObject, has_broken: bool, is_rare: bool) -> None:
        """Ends an epoch, perhaps in its step. Some ranks remain, in any order."""
        if not is_rare:
            return
        ended = [self.work] if self.work is not None and has_broken else []
        self.recovery.undo(ended, BREAK_SCORE if has_broken else LOSS_SCORE)
        self.work, self.epoch = None, self.epoch + 1
        assert not any(map(self.restoring.needs, self.library))
        order = data.draw(st.permutations(range(len(self.placer.pools))), label="ranks")
        survivors = tuple(order[: data.draw(st.integers(1, len(order)), label="survivors")])
        self.recovery.change_ranks(RankMapping(self.epoch, survivors, (BLOCKS,) * len(survivors)))
        self._execute_actions()
        assert not self.fetching
        assert not self.fetched, "pieces of an ended epoch are discarded"

    # --- properties ---

    @invariant()
    def no_rank_has_more_pieces_than_allowed(self) -> None:
        if self.placer.windows is None:
            counts = Counter(fetch.rank for fetch in (*self.fetching.values(), *self.fetched.values()))
            assert all(count <= MAX_FETCHED for count in counts.values())

    @invariant()
    def only_the_window_piece_goes_to_every_rank(self) -> None:
        for fetch in (*self.fetching.values(), *self.fetched.values()):
            assert fetch.of_windows == (fetch.rank == EVERY_RANK)

    @invariant()
    def no_block_is_lost(self) -> None:
        placements = list(self.segments.placements)
        self.placer.audit(run for one in placements for run in (*one.runs, *one.window_runs, *one.incoming))
        losses = [one.loss.reservation for one in placements if one.loss is not None and one.loss.reservation]
        reserved = sum((one.left for one in losses), BlockCount()) + self.recovery.num_reserved
        assert self.placer.num_reserved == reserved

    def teardown(self) -> None:
        """Once all answers have arrived, every segment is held, and no piece remains in the memory of a rank."""
        if not hasattr(self, "placer"):
            return
        for _ in range(MAX_TURNS):
            if self.work is not None:
                self.commit()
            self.turn()
            for number in [self.reading.pop() for _ in range(len(self.reading))]:
                self._answer_manifest(number, "found")
            for ticket in sorted(self.fetching):
                self._end_fetch(ticket, "fetched")
            while self.removing:
                self.remove_damaged(False)
            self.plan()
            if self.work is None and self.segments.placements.is_whole and not self.fetching:
                break
        self.turn()
        assert self.segments.placements.is_whole
        assert not any(map(self.restoring.needs, self.library))
        assert self.discarded == self.tickets
        assert self.recovery.is_over
        self.no_block_is_lost()


def test_segment_that_is_requested_again_while_a_step_restores_it_is_restored_afresh() -> None:
    machine = RestoreMachine()
    machine.start(None)
    machine.library[0] = segment = Segment(0, EMPTY_PATH)
    segment.extend(range(15 * SIZE))
    machine._store(segment, 1)
    machine._request(segment)
    machine.order_pieces(True)
    assert len(machine.fetching) < 15, "pieces are left to order"
    machine._end_fetch(0, "fetched")
    machine.plan()
    machine.commit()  # so that a rank may fetch more
    machine._end_fetch(1, "fetched")
    machine.plan()
    assert isinstance(machine.work, Restore)
    machine._release(0)
    machine._request(segment)
    machine.resume()
    assert not machine.restoring.pop_faults()
    machine.teardown()


class TestRestoreMachine(RestoreMachine.TestCase):
    settings = runs(80)


@pytest.mark.extended
class TestRestoreMachineExtended(RestoreMachine.TestCase):
    settings = runs(400)


@pytest.mark.slow
class TestRestoreMachineAtLength(RestoreMachine.TestCase):
    settings = runs(3000, is_random=True)
