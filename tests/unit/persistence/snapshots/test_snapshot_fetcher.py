"""Fetches from storage beside the steps: the selected members, the number of attempts, and missing pieces."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from coordinator.kv_cache.block_placer import BlockCount
from coordinator.kv_cache.rank_mapping import RankMapping
from coordinator.kv_cache.segment_placement import SegmentPlacement
from coordinator.persistence.snapshots import snapshot_fetcher
from coordinator.recovery.fault_score import BREAK_SCORE
from longleaf.errors import DataLoss, LongleafError, NotFound, ResourceExhausted
from longleaf.positions import AttentionSpan, WindowSpec
from longleaf.rank_protocol.step import Prefill, Restore
from tests.support.coming import comes
from tests.support.returning import AWAY, BLOCK, TOKENS, Members, opened

pytestmark = pytest.mark.timeout(60)
WINDOWS = WindowSpec(reaches=(AttentionSpan(window=4),), num_blocks=16)


def is_restorable(placement: SegmentPlacement) -> bool:
    """Whether the segment may still be restored from storage."""
    return placement.loss is not None and placement.loss.may_return


async def test_stored_segments_are_restored_and_members_free_their_pieces() -> None:
    async with opened() as bench:
        placement = bench.lost(3)
        await bench.restore_all()
        assert placement.loss is None
        assert sorted((run.start, run.end) for run in placement.runs) == [(0, 8), (8, 16)]
        assert {member for member, _ in bench.ranks.orders} == {0, 1}, "they share the work"
        assert sorted(bench.ranks.names) == [bench.piece(3, 0), bench.piece(3, 1)]
        await bench.until(lambda: not bench.ranks.fetched)
        assert bench.archive.asked == [3]
        assert not bench.archive.forgotten


async def test_manifest_is_read_once_for_concurrent_requests() -> None:
    async with opened() as bench:
        bench.archive.is_answering.clear()
        bench.lost(3)
        await bench.turn_often()
        bench.segments.retain(bench.segments.placements.with_losses[0].segment.path)  # a second user of the segment
        bench.lost(4)
        await bench.until(lambda: 4 in bench.archive.asked)
        assert bench.archive.asked == [3, 4]
        assert bench.num_changes == 0
        bench.archive.is_answering.set()
        await bench.restore_all()
        assert bench.archive.asked == [3, 4]
        assert len(bench.ranks.orders) == 4


async def test_fetched_data_signals_a_change() -> None:
    async with opened() as bench:
        bench.lost(3)
        bench.turn()
        await comes(lambda: bench.num_changes == 1)  # the manifest
        bench.turn()
        await comes(lambda: bench.num_changes == 3)  # each of the pieces


@pytest.mark.parametrize("error", [NotFound("the manifest"), DataLoss("the manifest", "a byte is flipped")])
async def test_segment_without_a_valid_manifest_is_recomputed_and_removed(error: LongleafError) -> None:
    async with opened() as bench:
        placement, other = bench.lost(3), bench.lost(4)
        bench.archive.failures[3] = error
        await bench.until(lambda: not is_restorable(placement))
        assert is_restorable(other)
        await bench.until(lambda: 3 not in bench.archive.manifests)
        assert bench.archive.forgotten == [(3, str(error))]
        assert bench.archive.asked == [3, 4]


async def test_new_snapshot_of_a_damaged_segment_is_trusted_again() -> None:
    async with opened() as bench:
        for count in (1, 2):
            placement = bench.lost(3)
            bench.archive.failures[3] = DataLoss("the manifest", "a byte is flipped")
            await bench.until(lambda: 3 not in bench.archive.manifests)
            assert len(bench.archive.forgotten) == count
            bench.segments.release(placement.segment.path)
            bench.archive.failures.clear()
        again = bench.lost(3)
        await bench.restore_all()
        assert again.loss is None


@pytest.mark.parametrize("is_slow", [True, False])
async def test_unreachable_storage_is_not_waited_for_and_loses_nothing(
    is_slow: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened() as bench:
        placement = bench.lost(3)
        if is_slow:
            monkeypatch.setattr(snapshot_fetcher, "FETCH_SECONDS", 0.0)
            bench.archive.is_answering.clear()
        else:
            bench.archive.failures[3] = AWAY
        await bench.until(lambda: not is_restorable(placement))
        bench.turn()
        assert bench.archive.manifests.keys() == {3}
        assert not bench.archive.forgotten
        assert not bench.ranks.orders
        assert "recomputing segment 3" in caplog.text
        assert ("no result within" if is_slow else str(AWAY)) in caplog.text


@pytest.mark.parametrize("is_missing", [True, False])
async def test_only_damaged_pieces_are_recomputed_after_the_restore(is_missing: bool) -> None:
    async with opened() as bench:
        placement = bench.lost(3, num_pieces=4)
        name = bench.piece(3, 1)
        bench.ranks.pieces[name] = frozenset()
        if is_missing:
            del bench.ranks.pieces[name]
        await bench.until(lambda: len(bench.ranks.fetched) == 3)
        await bench.turn_often()
        assert not bench.archive.forgotten, "other pieces of it may still be fetched"
        while is_restorable(placement):
            bench.turn()
            bench.restore()
        assert placement.loss is not None
        assert placement.loss.left == [(4, 8)]
        await bench.until(lambda: 3 not in bench.archive.manifests)
        (reported,) = bench.archive.forgotten
        assert name in reported[1]
        assert bench.ranks.names.count(name) == 1
        await bench.until(lambda: not bench.ranks.fetched)


@pytest.mark.parametrize("cut", [6, 9, TOKENS - 1])
async def test_pieces_ending_inside_a_block_are_recomputed_in_reserved_blocks(cut: int) -> None:
    """An imported archive may have such a manifest: digests only detect damage. The restored blocks and those of the
    recomputed tokens would be more than the segment takes."""
    async with opened() as bench:
        placement = bench.lost(3)
        first, second = (manifest := bench.archive.manifests[3]).pieces
        pieces = (
            replace(first, runs=((0, cut),), num_bytes=cut),
            replace(second, runs=((cut, TOKENS),), num_bytes=TOKENS - cut),
        )
        bench.archive.manifests[3] = replace(manifest, pieces=pieces)
        bench.archive.manifests[3].check()
        bench.ranks.pieces |= {piece.name: frozenset(range(*piece.runs[0])) for piece in pieces}
        await bench.until(lambda: not is_restorable(placement) or bench.can_restore)
        while placement.loss is not None:
            assert bench.recovery.plan([], TOKENS) is not None
            bench.recovery.commit()
            bench.turn()
        assert sum(len(run.blocks) for run in placement.runs) == TOKENS // BLOCK
        assert bench.placer.num_reserved == BlockCount()


@pytest.mark.parametrize("problem", ["manifest", "piece", "epoch"])
async def test_after_a_damaged_restore_its_archive_is_no_longer_used(problem: str) -> None:
    async with opened() as bench:
        bench.archive.imported = frozenset(range(3, 12))
        segments = {number: bench.keep(number) for number in range(3, 13)}
        first = bench.call(segments[3])
        if problem == "manifest":
            bench.archive.failures[3] = DataLoss("the manifest", "it is forged")
        elif problem == "piece":
            bench.ranks.pieces[bench.piece(3)] = frozenset()
        others = [bench.call(segments[number]) for number in (4, 5)]
        if problem == "epoch":
            await bench.until(lambda: bench.can_restore)
            work = bench.recovery.plan([], TOKENS)
            assert isinstance(work, Restore)
            first = bench.segments.placements.find(work.segment)
            assert first is not None
            bench.recovery.undo([work], BREAK_SCORE)
            bench.recovery.change_ranks(RankMapping(2, (0, 1), (32, 32)))
        await bench.until(lambda: not (is_restorable(first) or any(map(is_restorable, others))))
        last = [bench.call(segments[number]) for number in (6, 12)]
        await bench.until(lambda: len(bench.archive.forgotten) == 9)
        assert sorted(bench.archive.manifests) == [12], "a snapshot that was not requested is dropped"
        num_orders = len(bench.ranks.orders)
        while last[1].loss is not None:
            await bench.until(lambda: bench.can_restore)
            bench.restore()
        assert {order.name for _, order in bench.ranks.orders[num_orders:]} <= {bench.piece(12, 0), bench.piece(12, 1)}
        assert last[0].loss is not None
        assert not bench.recovery.restoring.has(last[0])


async def test_failed_restore_of_own_snapshots_discards_only_that_snapshot() -> None:
    async with opened() as bench:
        placements = [bench.lost(3), bench.lost(4)]
        await bench.until(lambda: bench.can_restore)
        work = bench.recovery.plan([], TOKENS)
        assert isinstance(work, Restore)
        bench.recovery.undo([work], BREAK_SCORE)
        bench.recovery.change_ranks(RankMapping(2, (0, 1), (32, 32)))
        await bench.turn_often()
        assert [is_restorable(one) for one in placements] == [one.segment.id != work.segment for one in placements]
        assert not bench.archive.forgotten


async def test_damaged_piece_recomputes_the_whole_segment_with_windows() -> None:
    async with opened(WINDOWS) as bench:
        placement = bench.lost(3)
        bench.ranks.pieces[bench.piece(3)] = frozenset()
        await bench.until(lambda: bench.archive.forgotten)
        assert placement.loss is not None
        assert (placement.loss.left, is_restorable(placement)) == ([(0, TOKENS)], False)
        await bench.until(lambda: not bench.ranks.fetched)


async def test_windows_are_fetched_by_every_member() -> None:
    async with opened(WINDOWS) as bench:
        placement = bench.lost(3)
        windows = bench.archive.manifests[3].windows
        assert windows is not None
        await bench.restore_all()
        assert sorted(member for member, order in bench.ranks.orders if order.name == windows.name) == [0, 1]
        assert [(run.start, run.end) for run in placement.window_runs] == [(TOKENS - BLOCK, TOKENS)]
        await bench.until(lambda: not bench.ranks.fetched)


@pytest.mark.parametrize("is_slow", [True, False])
async def test_pieces_that_cannot_be_fetched_are_recomputed_and_stay_on_storage(
    is_slow: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened() as bench:
        placement = bench.lost(3)
        bench.ranks.is_fetching.clear()
        monkeypatch.setattr(snapshot_fetcher, "FETCH_SECONDS", 30.0)
        await bench.until(lambda: bench.recovery.restoring._returns[3].left is not None)
        if is_slow:
            monkeypatch.setattr(snapshot_fetcher, "FETCH_SECONDS", 0.0)
        else:
            bench.ranks.storage_error = "the storage is away"
            bench.ranks.is_fetching.set()
        await bench.until(lambda: not is_restorable(placement))
        bench.turn()
        assert bench.archive.manifests.keys() == {3}
        assert not bench.archive.forgotten
        reported = [record.message for record in caplog.records if record.name == snapshot_fetcher.__name__]
        assert len(reported) == 1, "once for a segment, regardless of its number of pieces"


async def test_snapshot_that_cannot_be_removed_is_not_trusted() -> None:
    async with opened() as bench:
        placement = bench.lost(3)
        bench.archive.may_forget = False
        bench.archive.failures[3] = NotFound("the manifest")
        await bench.until(lambda: bench.archive.forgotten)
        await bench.turn_often()
        assert len(bench.archive.forgotten) == 1
        bench.segments.release(placement.segment.path)
        again = bench.call(placement.segment)
        bench.turn()
        assert not bench.recovery.restoring.has(again)
        assert bench.archive.asked == [3]


async def test_failed_removal_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_fetcher, "FORGET_SECONDS", 0.01)
    async with opened() as bench:
        bench.lost(3)
        bench.archive.may_forget = False
        bench.archive.failures[3] = NotFound("the manifest")
        await bench.until(lambda: len(bench.archive.forgotten) > 2)
        bench.archive.may_forget = True
        await bench.until(lambda: 3 not in bench.archive.manifests)


async def test_loss_of_a_member_is_not_a_storage_error() -> None:
    async with opened() as bench:
        placement = bench.lost(3)
        bench.ranks.is_fetching.clear()
        await bench.until(lambda: len(bench.ranks.orders) == 2)
        bench.ranks.lose(1, "it died")
        bench.ranks.is_fetching.set()
        await comes(lambda: bench.ranks.fetched)
        assert is_restorable(placement), "only the epoch ends"
        bench.end_epoch(0)
        tickets = {order.ticket for _, order in bench.ranks.orders}
        await bench.restore_all()
        again = bench.ranks.orders[2:]
        assert {member for member, _ in again} == {0}
        assert tickets.isdisjoint(order.ticket for _, order in again)
        assert not bench.archive.forgotten
        await bench.until(lambda: not bench.ranks.fetched)


async def test_pieces_fetched_in_an_ended_epoch_are_discarded() -> None:
    async with opened() as bench:
        bench.lost(3)
        await bench.until(lambda: len(bench.ranks.fetched) == 2)
        bench.end_epoch(0, 1)
        bench.fetching.run_pending()
        await comes(lambda: not bench.ranks.fetched)


async def test_late_manifest_is_used_in_the_next_epoch() -> None:
    async with opened() as bench:
        placement = bench.lost(3)
        bench.archive.is_answering.clear()
        await bench.until(lambda: bench.archive.asked)
        bench.end_epoch(0, 1)
        bench.archive.is_answering.set()
        await comes(lambda: bench.num_changes)
        await bench.restore_all()
        assert placement.loss is None
        assert len(bench.ranks.orders) == 2


async def test_manifest_of_a_released_segment_is_ignored() -> None:
    async with opened() as bench:
        placement = bench.lost(3)
        bench.archive.is_answering.clear()
        await bench.until(lambda: bench.archive.asked)
        bench.segments.release(placement.segment.path)
        bench.archive.is_answering.set()
        await comes(lambda: bench.num_changes)
        bench.turn()
        assert not bench.ranks.orders
        assert not bench.recovery.restoring.needs(3)


async def test_fetch_of_a_released_segment_is_discarded() -> None:
    async with opened() as bench:
        placement = bench.lost(3)
        bench.ranks.is_fetching.clear()
        await bench.until(lambda: len(bench.ranks.orders) == 2)
        discarded = recorded_discards(bench.ranks)
        bench.segments.release(placement.segment.path)
        await bench.until(lambda: len(discarded) == 2)
        assert sorted(discarded) == sorted((member, order.ticket) for member, order in bench.ranks.orders)


def recorded_discards(ranks: Members) -> list[tuple[int, int]]:
    """Records the discards that are sent to each member from now on."""
    found, discard = list[tuple[int, int]](), ranks.discard

    async def note(member: int, tickets: Sequence[int]) -> None:
        found.extend((member, ticket) for ticket in tickets)
        await discard(member, tickets)

    ranks.discard = note
    return found


async def test_segment_dropped_before_its_order_leaves_nothing_on_members() -> None:
    async with opened() as bench:
        placement = bench.lost(3)
        bench.turn()
        await comes(lambda: bench.num_changes)
        bench.recovery.reserve_lost([])  # it is ordered
        bench.segments.release(placement.segment.path)
        bench.recovery.reserve_lost([])  # and dropped before the poll that would report it
        other = bench.lost(4)
        bench.turn()
        await bench.restore_all()
        assert other.loss is None
        await bench.until(lambda: not bench.ranks.fetched)


@pytest.mark.parametrize("place", ["manifest", "_list", "fetch"])
async def test_unexpected_error_recomputes_only_its_segment(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened() as bench:
        placement, other = bench.lost(3), bench.lost(4)
        owner = {"manifest": bench.archive, "_list": bench.recovery.restoring, "fetch": bench.ranks}[place]
        call = getattr(owner, place)

        def fail(first: Any, *args: Any) -> Any:
            number = (
                args[0].name.split("/")[3]
                if place == "fetch"
                else getattr(first, "id", None) or getattr(first, "segment_id", first)
            )
            if number in (3, "service-3"):
                raise IndexError(7)
            return call(first, *args)

        monkeypatch.setattr(owner, place, fail)
        await bench.until(lambda: not is_restorable(placement))
        assert is_restorable(other)
        while other.loss is not None:
            await bench.until(lambda: bench.can_restore)
            bench.restore()
        assert not bench.archive.forgotten
        assert "recomputing segment 3: unexpected error" in caplog.text


@pytest.mark.parametrize("method", ["place_restored", "place_windows"])
async def test_segment_that_cannot_be_placed_is_recomputed_and_its_reservation_freed(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(WINDOWS) as bench:
        placement = bench.lost(3)
        free = bench.placer.num_free

        def fail(*_: Any) -> Any:
            raise ResourceExhausted("blocks", "too few are reserved")

        with monkeypatch.context() as patched:
            patched.setattr(bench.placer, method, fail)
            if method == "place_windows":
                await bench.until(lambda: bench.can_restore)
                plan = bench.recovery.plan([], TOKENS)
                assert plan is None or isinstance(plan, Prefill)
            else:
                await bench.until(lambda: not is_restorable(placement))
        assert not is_restorable(placement)
        assert len(bench.recovery.restoring.pop_faults()) == 1
        bench.recovery.undo([], 0)
        await bench.until(lambda: not bench.ranks.fetched)
        bench.segments.release(placement.segment.path)
        bench.placer.audit([])
        assert bench.placer.num_free.sharded >= free.sharded


async def test_close_cancels_fetches() -> None:
    async with opened() as bench:
        bench.lost(3)
        await bench.until(lambda: bench.recovery.restoring._returns[3].left is not None)
        bench.ranks.is_fetching.clear()
        bench.archive.is_answering.clear()
        bench.lost(4)
        await bench.until(lambda: 4 in bench.archive.asked and len(bench.ranks.orders) == 2)
        before = bench.num_changes
        async with asyncio.timeout(3):
            await bench.fetching.close()
        bench.ranks.is_fetching.set()
        bench.archive.is_answering.set()
        assert not bench.fetching._tasks
        assert not bench.ranks.fetched
        assert bench.num_changes == before
