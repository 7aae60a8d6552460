"""Snapshots on real storage, with ranks that write data: when they are saved, and which segments are deleted and
retained."""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.kv_cache.token_paths import EMPTY_PATH, Segment
from coordinator.persistence.catalog.records import Change
from coordinator.persistence.snapshots.kv_format import KvFormat
from coordinator.persistence.snapshots.snapshot_index import RetentionPolicy
from coordinator.persistence.snapshots.snapshots import Snapshots
from longleaf.errors import DataLoss, InvalidArgument, NotFound, RankLost, StorageUnavailable, Unavailable
from longleaf.runs import Run
from longleaf.storage.context_record import ContextRecord
from longleaf.storage.inventory import read_notes
from longleaf.storage.local import LocalFiles
from longleaf.storage.names import segments_folder
from longleaf.storage.segment_record import SegmentRecord
from longleaf.storage.store import Buffer, Store, WriteResult
from longleaf.types import Storage
from tests.support.fakes.catalog import FakeCatalog
from tests.support.fakes.snapshot_ranks import FakeSnapshotRanks

FORM = KvFormat("blocks of 4; keys.0 F32 2x4x1048576", 4)
SERVICE = "0" * 32


def segment(number: int, num_tokens: int = 10) -> Segment:
    found = Segment(number, EMPTY_PATH)
    found.extend(array("I", range(number, number + num_tokens)))
    found.is_sealed = True
    return found


def change(number: int, name: str, num_tokens: int = 10) -> Change:
    found = segment(number, num_tokens)
    record = ContextRecord(
        id=name,
        segment=number,
        num_tokens=num_tokens,
        ends=(num_tokens,),
        capacity=99,
        created=1,
        updated=1,
        last_used=1,
    )
    return Change(segments=(SegmentRecord(id=number, token_ids=found.token_ids),), contexts=(record,))


class Bench:
    """Snapshots, their storage, and a stand-in for the component that changes contexts."""

    def __init__(self, folder: Path, policy: RetentionPolicy, catalog: FakeCatalog | None = None) -> None:
        self.store = Store.open(str(folder))
        self.folder = folder
        self.catalog = catalog or FakeCatalog()
        self.ranks = FakeSnapshotRanks(self.store)
        self.views = list[Storage]()
        """The storage view at each reported change."""
        self.snapshots = Snapshots(self.store, self.catalog, self.catalog.contents, "checkpoint", policy, lambda: 1e12)

    def hold(self, number: int, version: int = 0) -> None:
        runs = [Run(0, 0, 8, (0, 1)), Run(1, 8, 10, (0,))]
        self.ranks.hold(segment(number), runs, version=version)
        self.ranks.uses[number] = 1.0

    async def ingest(self, number: int, name: str = "book") -> None:
        self.hold(number)
        await self.snapshots.commit(change(number, name))

    @property
    def objects(self) -> set[str]:
        """Of segments, by the last part of their names."""
        return {entry.name.rpartition("/")[2] for entry in self.store.list(segments_folder(SERVICE))}

    def is_marked_deleted(self, name: str) -> bool:
        note = read_notes(self.store).newest.get((SERVICE, name))
        return note is not None and note.record is None


async def until(is_so: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110, the condition is on storage
            await asyncio.sleep(0.005)


@asynccontextmanager
async def opened(
    folder: Path, policy: RetentionPolicy | None = None, catalog: FakeCatalog | None = None
) -> AsyncIterator[Bench]:
    bench = Bench(folder, policy or RetentionPolicy(), catalog)
    bench.snapshots.begin(bench.ranks, bench.ranks, FORM, lambda: bench.views.append(bench.snapshots.view()))
    try:
        yield bench
    finally:
        async with asyncio.timeout(3):
            await bench.snapshots.close()


async def test_sealed_segments_are_saved_and_readable(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        await bench.ingest(3)
        await until(lambda: bench.snapshots.is_usable(3))
        manifest = await bench.snapshots.manifest(segment(3))
        assert [piece.runs for piece in manifest.pieces] == [((0, 4),), ((4, 8),), ((8, 10),)]
        for piece in manifest.pieces:
            assert await bench.snapshots.read(piece.name, piece.digest)
        assert bench.objects == {"manifest", *(f"piece-0000{i}.safetensors" for i in range(3))}
        assert {member for member, _ in bench.ranks.orders} == {10, 11}
        assert [each.segment for each in bench.catalog.contents.snapshots] == [3]
        with pytest.raises(DataLoss, match="it does not match segment 3 in the catalog"):
            await bench.snapshots.manifest(segment(3, 9))


async def test_concurrent_save_requests_share_one_save(tmp_path: Path) -> None:
    async with opened(tmp_path, RetentionPolicy("demand")) as bench:
        await bench.ingest(3)
        assert not bench.snapshots.is_usable(3)
        await asyncio.gather(*(bench.snapshots.save([3]) for _ in range(20)))
        assert len(bench.ranks.orders) == 3
        with pytest.raises(Unavailable, match="is not in memory"):
            await bench.snapshots.save([4])


async def test_disabled_snapshots_write_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path, RetentionPolicy("off")) as bench:
        await bench.ingest(3)
        with pytest.raises(InvalidArgument, match="--snapshots off"):
            await bench.snapshots.save([3])
        assert not bench.ranks.orders


async def test_segment_moved_during_its_save_is_saved_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        bench.ranks.may_answer.clear()
        await bench.ingest(3)
        await until(lambda: bench.ranks.orders)
        bench.hold(3, version=1)
        bench.ranks.may_answer.set()
        await until(lambda: bench.snapshots.is_usable(3))
        await until(lambda: len(list(bench.store.list(segments_folder(SERVICE)))) == 4)


class SlowStore(Store):
    """A store with slow writes."""

    def put(self, name: str, parts: Sequence[Buffer], *, is_new: bool = False) -> WriteResult:
        time.sleep(0.2)
        return super().put(name, parts, is_new=is_new)


async def test_pieces_written_after_a_failure_are_deleted(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        bench.ranks.store = SlowStore(LocalFiles(tmp_path), str(tmp_path))
        bench.ranks.failures = [StorageUnavailable("it is away")]
        await bench.ingest(3)
        await until(lambda: bench.snapshots.is_usable(3))
        await until(lambda: len(list(bench.store.list(segments_folder(SERVICE)))) == 4)
        assert len({entry.name.split("/")[-2] for entry in bench.store.list(segments_folder(SERVICE))}) == 1


async def test_segment_deleted_during_its_save_leaves_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        bench.ranks.may_answer.clear()
        await bench.ingest(3)
        await until(lambda: bench.ranks.orders)
        await bench.snapshots.commit(Change(dropped_contexts=("book",)))
        bench.ranks.may_answer.set()
        await until(lambda: len(bench.ranks.orders) >= 3)
        await until(lambda: not bench.objects and not bench.snapshots._attempts)
        assert bench.catalog.contents.snapshots == ()


async def test_deleted_segments_leave_storage_and_stay_deleted(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        await bench.ingest(3)
        await until(lambda: bench.snapshots.is_usable(3))
        await bench.snapshots.commit(Change(dropped_contexts=("book",)))
        await until(lambda: not bench.objects)
        await until(lambda: bench.is_marked_deleted("book"))


async def test_deletion_during_a_full_resend_stays_deleted(tmp_path: Path) -> None:
    """A storage that is empty or replaced receives all contexts at the start, while changes continue."""
    catalog = FakeCatalog()
    for number, name in enumerate(("book", "other")):
        await catalog.commit(change(number, name))
    catalog.hold()
    async with opened(tmp_path, catalog=catalog) as bench:
        await until(bench.snapshots._turn.locked)
        deleting = asyncio.create_task(bench.snapshots.commit(Change(dropped_contexts=("book",))))
        await asyncio.sleep(0)
        catalog.release()
        await deleting
        await until(lambda: (SERVICE, "other") in read_notes(bench.store).newest)
        await until(lambda: bench.is_marked_deleted("book"))
        assert read_notes(bench.store).newest[SERVICE, "other"].record is not None
        numbers = [note.place.number for note in read_notes(bench.store).newest.values()]
        assert len(set(numbers)) == len(numbers)


async def test_exported_segments_are_held_back_from_deletion(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        await bench.ingest(3)
        await until(lambda: bench.snapshots.is_usable(3))
        name = bench.snapshots.pin(3)
        await bench.snapshots.commit(Change(dropped_contexts=("book",)))
        await until(lambda: bench.is_marked_deleted("book"))
        assert "manifest" in bench.objects
        bench.snapshots.unpin(name)
        await until(lambda: not bench.objects)


async def test_unavailable_storage_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(tmp_path, RetentionPolicy(grace=1e12)) as bench:
        bench.ranks.failures = [StorageUnavailable("it is away")]
        await bench.ingest(3)
        await until(lambda: bench.snapshots.view().error)
        assert "it is away" in bench.snapshots.view().error
        await until(lambda: bench.snapshots.is_usable(3))
        assert not bench.snapshots.view().error
        assert caplog.text.count("failed, will retry") == caplog.text.count("succeeded again") == 1
        assert [view.error for view in bench.views] == ["it is away", ""]
        assert bench.views[-1] == Storage(snapshots="seal", url=bench.store.url)


async def test_storage_error_state_ends_with_its_operation(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        bench.ranks.failures = [StorageUnavailable("it is away")]
        await bench.ingest(3)
        await until(lambda: bench.snapshots.view().error)
        await bench.snapshots.commit(Change(dropped_contexts=("book",)))
        await until(lambda: not bench.snapshots.view().error)
        assert not bench.snapshots._wanted


async def test_lost_rank_is_not_a_storage_error(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        bench.ranks.failures = [RankLost(1, "it died")]
        await bench.ingest(3)
        await until(lambda: not bench.ranks.failures)
        assert not bench.snapshots.view().error
        await asyncio.sleep(0.05)
        bench.snapshots.notify()
        await until(lambda: bench.snapshots.is_usable(3))


async def test_ranks_with_different_storage_are_reported(tmp_path: Path) -> None:
    async with opened(tmp_path / "here") as bench:
        bench.ranks.store = Store.open(str(tmp_path / "there"))
        await bench.ingest(3)
        await until(lambda: "--snapshot-url must be storage that all machines share" in bench.snapshots.view().error)


async def test_missing_segments_are_saved_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        await bench.ingest(3)
        await until(lambda: bench.snapshots.is_usable(3))
        before = (await bench.snapshots.manifest(segment(3))).pieces[0].name
        await bench.snapshots.forget({3: "a byte is flipped"})
        bench.snapshots.notify()
        await until(lambda: bench.snapshots.is_usable(3))
        assert (await bench.snapshots.manifest(segment(3))).pieces[0].name != before
        await until(lambda: len(list(bench.store.list(segments_folder(SERVICE)))) == 4)


async def test_another_service_trusts_only_existing_segments(tmp_path: Path) -> None:
    catalog = FakeCatalog()
    async with opened(tmp_path / "a", catalog=catalog) as bench:
        await bench.ingest(3)
        await until(lambda: bench.snapshots.is_usable(3))
    async with opened(tmp_path / "a", catalog=catalog) as bench:
        assert bench.snapshots.is_usable(3)
        assert bench.snapshots.num_bytes({3: 1}) > 0
    async with opened(tmp_path / "b", catalog=catalog) as bench:
        await until(lambda: not bench.snapshots.is_usable(3))
        await until(lambda: (SERVICE, "book") in read_notes(bench.store).newest)
        with pytest.raises(NotFound):
            await bench.snapshots.manifest(segment(3))
