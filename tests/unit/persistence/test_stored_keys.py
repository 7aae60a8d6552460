"""Snapshots in an engine: segments that can be saved from ranks, and the times at which they are checked again."""

import asyncio
from collections.abc import Callable
from math import inf

import pytest

from coordinator.engine.engine import Engine
from coordinator.engine_messages import DocumentPrompt, Prompt, Tokens
from coordinator.persistence.catalog.records import Change
from coordinator.persistence.snapshots.segments_on_ranks import PlacedSegment, SegmentsOnRanks
from coordinator.persistence.snapshots.snapshot_index import RetentionPolicy
from longleaf.errors import StorageUnavailable, Unavailable
from longleaf.positions import EVERY_RANK, AttentionSpan, WindowSpec
from longleaf.rank_protocol.step import Prefill, Restore
from longleaf.sampling import SamplingParams
from longleaf.types import ContextSettings
from tests.support.coming import comes
from tests.support.storing import FORM, NOW, Service, Storage, serving

pytestmark = pytest.mark.timeout(60)
IDS = list(range(96))
WINDOWS = WindowSpec(reaches=(AttentionSpan(window=4),), num_blocks=32)
DEMAND = RetentionPolicy("demand", grace=1e12)


async def ingest(engine: Engine, name: str = "book", ids: list[int] = IDS) -> int:
    """The id of the context's last segment."""
    is_there = any(context.id == name for context in engine.list_contexts())
    async for _ in engine.ingest(DocumentPrompt(context=name, token_ids=ids, append=is_there)):
        pass
    return engine.named(name).path.ids[-1]


async def ask(engine: Engine, name: str = "book") -> list[int]:
    prompt = Prompt(context=name, token_ids=(1, 2), sampling=SamplingParams(max_tokens=4))
    events = [event async for event in engine.submit(prompt)]
    return [token for event in events if isinstance(event, Tokens) for token in event.token_ids]


def on_ranks(service: Service) -> SegmentsOnRanks:
    assert service.engine._store._on_ranks is not None
    return service.engine._store._on_ranks


def segment_on_ranks(service: Service, segment: int) -> PlacedSegment | None:
    return on_ranks(service).placed(segment)


def num_recomputed(service: Service) -> int:
    """The number of prefilled tokens of the first segment."""
    works = [plan.work for plan in service.ranks.plans]
    return sum(len(work.token_ids) for work in works if isinstance(work, Prefill) and work.path == (0,))


async def test_sealed_segment_is_reported_with_its_placement() -> None:
    async with serving(Storage(), policy=DEMAND) as service:
        number = await ingest(service.engine)
        found = segment_on_ranks(service, number)
        assert found is not None
        assert list(found.segment.token_ids) == IDS
        assert sum(len(run) for run in found.runs) == len(IDS)
        assert (found.members, found.epoch, found.window_runs) == ((0, 1), 1, ())
        assert found == segment_on_ranks(service, number)
        assert segment_on_ranks(service, number + 1) is None


async def test_replicated_windows_are_included() -> None:
    storage = Storage()
    async with serving(storage, storage.ranks(windows=WINDOWS), DEMAND) as service:
        found = segment_on_ranks(service, await ingest(service.engine))
        assert found is not None
        assert [(run.rank, run.end) for run in found.window_runs] == [(EVERY_RANK, len(IDS))]


async def test_growing_segment_is_not_reported() -> None:
    async with serving(Storage(), policy=DEMAND) as service:
        service.ranks.may_step.clear()
        reading = asyncio.create_task(ingest(service.engine))
        scheduler = service.engine._current()
        await comes(lambda: scheduler.segments.placements.find(0) is not None)
        assert segment_on_ranks(service, 0) is None
        service.ranks.may_step.set()
        assert await reading == 0
        assert segment_on_ranks(service, 0) is not None


async def test_evicted_segment_is_not_reported_until_it_is_restored() -> None:
    storage = Storage()
    async with serving(storage, policy=DEMAND) as service:
        before = segment_on_ranks(service, number := await ingest(service.engine))
        assert before is not None
    async with serving(storage, policy=DEMAND) as service:
        assert segment_on_ranks(service, number) is None
        await ask(service.engine)
        again = segment_on_ranks(service, number)
        assert again is not None
        assert again.version != before.version


async def test_lost_segment_is_reported_after_recompute() -> None:
    async with serving(Storage(), policy=DEMAND) as service:
        number = await ingest(service.engine)
        service.ranks.may_step.clear()
        service.ranks.lose(1, "it died")
        await comes(lambda: service.engine.cluster().epoch == 2)
        assert segment_on_ranks(service, number) is None
        service.ranks.may_step.set()
        await comes(lambda: (found := segment_on_ranks(service, number)) and (found.epoch, found.members) == (2, (0,)))


async def test_no_segment_is_reported_between_epochs() -> None:
    async with serving(Storage(), policy=DEMAND) as service:
        number = await ingest(service.engine)
        service.ranks.may_form.clear()
        service.ranks.break_epoch("they hung")
        await comes(lambda: service.engine._epochs.is_over)
        assert segment_on_ranks(service, number) is None
        service.ranks.may_form.set()
        await comes(lambda: (found := segment_on_ranks(service, number)) and found.epoch == 2)


async def test_no_segment_is_reported_during_a_rebalance() -> None:
    async with serving(Storage(), policy=DEMAND) as service:
        number = await ingest(service.engine)
        service.ranks.may_step.clear()
        service.ranks.load(7)
        await comes(lambda: service.engine.cluster().epoch == 2)
        scheduler = service.engine._current()
        assert scheduler.segments.placements.is_whole
        assert segment_on_ranks(service, number) is None
        service.ranks.may_step.set()
        await comes(lambda: segment_on_ranks(service, number))
        found = segment_on_ranks(service, number)
        assert found is not None
        assert {found.members[run.rank] for run in found.runs} == {0, 1, 7}


@pytest.mark.parametrize(
    ("form", "windows", "message"),
    [
        (FORM, None, f"{FORM}|"),
        (FORM, WINDOWS, f"{FORM}|fake windows"),
        ("", None, ""),
    ],
)
async def test_format_covers_all_pools_or_is_empty_without_saving(
    form: str, windows: WindowSpec | None, message: str
) -> None:
    storage = Storage()
    async with serving(storage, storage.ranks(windows=windows, form=form), DEMAND) as service:
        assert service.snapshots.form == message
        assert service.snapshots.may_write == bool(message)


async def test_segments_have_the_last_use_of_their_contexts() -> None:
    async with serving(Storage(), policy=DEMAND) as service:
        number = await ingest(service.engine)
        await service.engine.fork_context("book", "fork", 10)
        await ingest(service.engine, "fork", [7, 8])
        _, fork = service.engine.named("fork").path.ids
        assert on_ranks(service).last_uses() == {number: 12.0, fork: 12.0}
        await service.engine.update_context("fork", ContextSettings(is_pinned=True))
        assert on_ranks(service).last_uses() == {number: inf, fork: inf}
        await service.engine.delete_context("fork")
        assert on_ranks(service).last_uses() == {number: 12.0}


async def test_saved_segment_is_restored_without_recompute() -> None:
    storage = Storage()
    async with serving(storage) as service:
        number = await ingest(service.engine)
        answer = await ask(service.engine)
        await comes(lambda: service.snapshots.is_usable(number))
    async with serving(storage) as service:
        assert await ask(service.engine) == answer
        assert any(isinstance(plan.work, Restore) for plan in service.ranks.plans)
        assert num_recomputed(service) == 0
        await comes(lambda: not service.ranks.fetched)


async def test_damaged_segment_is_recomputed_and_saved_again() -> None:
    storage = Storage()
    async with serving(storage) as service:
        number = await ingest(service.engine)
        answer = await ask(service.engine)
        await comes(lambda: service.snapshots.is_usable(number))
    before, damaged = set(storage.pieces), min(storage.pieces)
    num_lost = len(storage.pieces.pop(damaged))
    async with serving(storage) as service:
        assert await ask(service.engine) == answer
        assert num_recomputed(service) == num_lost
        await comes(lambda: storage.pieces.keys() - before)
        await comes(lambda: service.snapshots.is_usable(number))
        manifest = await service.snapshots.manifest(service.engine.named("book").path.segments[0])
        assert before.isdisjoint(manifest.objects)


async def test_unreachable_storage_causes_recompute_and_keeps_its_snapshots() -> None:
    storage = Storage()
    async with serving(storage) as service:
        number = await ingest(service.engine)
        answer = await ask(service.engine)
        await comes(lambda: service.snapshots.is_usable(number))
    ranks = storage.ranks()
    ranks.storage_error = "it is away"
    async with serving(storage, ranks) as service:
        assert await ask(service.engine) == answer
        assert num_recomputed(service) == len(IDS)
        assert service.snapshots.is_usable(number)


async def test_save_interrupted_by_a_loss_is_repeated_after_recovery() -> None:
    async with serving(Storage()) as service:
        service.ranks.may_save.clear()
        number = await ingest(service.engine)
        await comes(lambda: service.ranks.num_saves)
        service.ranks.may_step.clear()
        service.ranks.lose(1, "it died")
        service.ranks.may_save.set()
        await comes(lambda: service.engine.cluster().epoch == 2)
        assert not service.snapshots.is_usable(number)
        service.ranks.may_step.set()
        await comes(lambda: service.snapshots.is_usable(number))
        assert service.engine.cluster().epoch == 2


async def test_save_interrupted_by_a_rebalance_is_repeated_after_it() -> None:
    async with serving(Storage()) as service:
        service.ranks.may_save.clear()
        number = await ingest(service.engine)
        await comes(lambda: service.ranks.num_saves)
        service.ranks.may_step.clear()
        service.ranks.load(7)
        await comes(lambda: service.engine.cluster().epoch == 2)
        service.ranks.may_save.set()
        await comes(lambda: not service.snapshots._attempts)
        assert not service.snapshots.is_usable(number)
        service.ranks.may_step.set()
        await comes(lambda: segment_on_ranks(service, number))
        await comes(lambda: service.snapshots.is_usable(number))


async def test_close_does_not_wait_for_saves_and_fails_waiting_callers() -> None:
    async with serving(Storage(), policy=DEMAND) as service:
        number = await ingest(service.engine)
        service.ranks.may_save.clear()
        saving = asyncio.create_task(service.snapshots.save([number]))
        await comes(lambda: service.ranks.num_saves)
        async with asyncio.timeout(3):
            await service.engine.close()
        with pytest.raises(Unavailable, match="is stopping"):
            await saving


async def test_close_does_not_wait_for_fetches() -> None:
    storage = Storage()
    async with serving(storage) as service:
        number = await ingest(service.engine)
        await comes(lambda: service.snapshots.is_usable(number))
    async with serving(storage) as service:
        service.ranks.may_fetch.clear()
        asking = asyncio.create_task(ask(service.engine))
        await comes(lambda: service.ranks.num_fetches)
        async with asyncio.timeout(3):
            await service.engine.close()
        with pytest.raises(Unavailable, match="is stopping"):
            await asking
        service.ranks.may_fetch.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not service.ranks.fetched


async def test_segment_that_does_not_fit_on_the_disk_delays_no_other() -> None:
    def check_room(num_bytes: int) -> None:
        if num_bytes > 1 << 20:
            raise StorageUnavailable("the disk lacks room")

    storage = Storage()
    ranks = storage.ranks(form="blocks of 4; keys.0 F32 2x4x8192")  # 256 KiB each
    async with serving(storage, ranks, policy=DEMAND, check_room=check_room) as service:
        large = await ingest(service.engine, "large", list(range(40)))
        small = await ingest(service.engine, "small", list(range(100, 108)))
        saving = asyncio.create_task(service.snapshots.save([large]))
        await service.snapshots.save([small])
        with pytest.raises(StorageUnavailable, match="lacks room"):
            await saving
        assert service.snapshots.is_usable(small)
        assert not service.snapshots.is_usable(large)


async def test_one_timer_retries_segments_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of snapshot checks meanwhile does not matter."""
    loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
    call_later = loop.call_later

    def record(seconds: float, callback: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        timers.append(call_later(seconds, callback, *args))
        return timers[-1]

    def check_room(num_bytes: int) -> None:
        if num_bytes:
            raise StorageUnavailable("the disk lacks room")

    async with serving(Storage(), policy=RetentionPolicy(grace=NOW), check_room=check_room) as service:
        monkeypatch.setattr(loop, "call_later", record)
        for number in range(4):
            await ingest(service.engine, f"book{number}")
            with pytest.raises(StorageUnavailable, match="lacks room"):
                await service.snapshots.save([service.engine.named(f"book{number}").path.ids[-1]])
        retries = [timer for timer in timers if getattr(timer, "_callback", None) == service.snapshots.notify]
        await comes(lambda: sum(not timer.cancelled() for timer in retries) == 1)
    assert all(timer.cancelled() for timer in retries)


async def test_deleting_a_segment_that_did_not_fit_clears_the_storage_error() -> None:
    """Another segment still waits for its restore."""

    def check_room(num_bytes: int) -> None:
        if num_bytes:
            raise StorageUnavailable("the disk lacks room")

    storage = Storage()
    async with serving(storage) as service:
        service.ranks.may_save.clear()
        await ingest(service.engine, "evicted")
    async with serving(storage, check_room=check_room) as service:
        await ingest(service.engine, "large", list(range(40)))
        await comes(lambda: service.snapshots.view().error)
        await service.snapshots.commit(Change(dropped_contexts=("large",)))
        await comes(lambda: not service.snapshots.view().error)
