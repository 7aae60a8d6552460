"""Contexts that are exported from an engine: the exported segments, and the manifests that stay on storage
meanwhile."""

import asyncio
from pathlib import Path

import pytest

from coordinator.persistence.snapshots.retention import RetentionPolicy
from longleaf.errors import DataLoss, NotFound, StorageUnavailable
from longleaf.fingerprint import read_fingerprint
from tests.support.coming import comes
from tests.support.service import write_model
from tests.support.storing import NOW, Service, Storage, ingest_two, serving

pytestmark = pytest.mark.timeout(60)
DEMAND = RetentionPolicy("demand", grace=NOW)


def held(service: Service) -> list[str]:
    """Manifests that stay on storage for the exports."""
    return service.snapshots._sender.held


async def test_a_context_leaves_with_all_that_is_held_and_equal_each_time() -> None:
    async with serving(Storage(), policy=DEMAND) as service:
        ids = await ingest_two(service.engine)
        exporting = await service.engine.house.open_export("book", with_keys=True)
        assert [each.id for each in exporting.segments] == list(ids)
        assert [list(each.token_ids) for each in exporting.segments] == [list(range(40)), list(range(100, 120))]
        assert (exporting.context.segment, exporting.context.num_tokens) == (ids[-1], 60)
        assert list(exporting.manifests) == list(ids)
        for manifest in exporting.manifests.values():
            for piece in manifest.pieces:
                assert len(await exporting.read(piece)) == piece.num_bytes
        again = await service.engine.house.open_export("book", with_keys=True)
        assert (again.context, again.segments, again.manifests) == (
            exporting.context,
            exporting.segments,
            exporting.manifests,
        )


async def test_a_context_that_leaves_without_keys_is_not_saved() -> None:
    async with serving(Storage(), policy=DEMAND) as service:
        await ingest_two(service.engine)
        exporting = await service.engine.house.open_export("book", with_keys=False)
        assert len(exporting.segments) == 2
        assert not exporting.manifests
        assert not service.ranks.num_saves
        assert not held(service)
        with pytest.raises(NotFound):
            await service.engine.house.open_export("other", with_keys=False)


async def test_what_is_parked_leaves_with_what_storage_has() -> None:
    storage = Storage()
    async with serving(storage, policy=DEMAND) as service:
        first, _ = await ingest_two(service.engine)
        await service.snapshots.save([first])
    async with serving(storage, policy=DEMAND) as service:
        exporting = await service.engine.house.open_export("book", with_keys=True)
        assert list(exporting.manifests) == [first]
        assert len(exporting.segments) == 2
        assert len(held(service)) == 1


async def test_where_nothing_is_written_contexts_leave_without_keys() -> None:
    async with serving(Storage(), policy=RetentionPolicy("off", grace=NOW)) as service:
        await ingest_two(service.engine)
        exporting = await service.engine.house.open_export("book", with_keys=True)
        assert not exporting.manifests
        assert len(exporting.segments) == 2


async def test_what_leaves_stays_on_storage_until_it_is_closed() -> None:
    storage = Storage()
    async with serving(storage, policy=DEMAND) as service:
        await ingest_two(service.engine)
        exporting = await service.engine.house.open_export("book", with_keys=True)
        other = await service.engine.house.open_export("book", with_keys=True)
        await service.engine.delete_context("book")
        await exporting.close()
        await exporting.close()
        for manifest in other.manifests.values():
            for piece in manifest.pieces:
                await other.read(piece)
        assert len(held(service)) == 2
        await other.close()
        assert not held(service)
        await comes(lambda: not storage.num_objects)


@pytest.mark.parametrize("is_missing", [True, False])
async def test_pieces_that_are_damaged_are_not_read(is_missing: bool) -> None:
    storage = Storage()
    async with serving(storage, policy=DEMAND) as service:
        await ingest_two(service.engine)
        exporting = await service.engine.house.open_export("book", with_keys=True)
        piece = exporting.manifests[0].pieces[0]
        if is_missing:
            storage.files.files.remove(piece.name)
        else:
            storage.files.files.write(piece.name, [memoryview(b"x" * piece.num_bytes)], False)
        with pytest.raises(DataLoss):
            await exporting.read(piece)


@pytest.mark.parametrize("is_missing", [True, False])
async def test_a_segment_whose_manifest_is_damaged_leaves_without_its_keys(is_missing: bool) -> None:
    storage = Storage()
    async with serving(storage, policy=DEMAND) as service:
        first, last = await ingest_two(service.engine)
        await service.snapshots.save([first, last])
        name = service.snapshots._records[first].manifest
        if is_missing:
            storage.files.files.remove(name)
        else:
            storage.files.files.write(name, [memoryview(b"nothing")], False)
        exporting = await service.engine.house.open_export("book", with_keys=True)
        assert list(exporting.manifests) == [last]
        await exporting.close()
        assert not held(service)


async def test_a_storage_that_is_away_is_told_and_nothing_stays_held() -> None:
    storage = Storage()
    async with serving(storage, policy=DEMAND) as service:
        ids = await ingest_two(service.engine)
        await service.snapshots.save(ids)
        await comes(lambda: not storage.lasting.catalog._outbox)  # all changes have been reported
        storage.files.fail(1)
        with pytest.raises(StorageUnavailable):
            await service.engine.house.open_export("book", with_keys=True)
        assert not held(service)
        exporting = await service.engine.house.open_export("book", with_keys=True)
        assert len(exporting.manifests) == 2


async def test_what_cannot_be_saved_now_does_not_leave_without_its_keys() -> None:
    storage = Storage()
    async with serving(storage, policy=DEMAND) as service:
        await ingest_two(service.engine)
        service.ranks.storage_trouble = "it is away"
        with pytest.raises(StorageUnavailable, match="it is away"):
            await service.engine.house.open_export("book", with_keys=True)


async def test_who_goes_away_while_it_is_saved_holds_nothing() -> None:
    async with serving(Storage(), policy=DEMAND) as service:
        await ingest_two(service.engine)
        service.ranks.may_save.clear()
        opening = asyncio.create_task(service.engine.house.open_export("book", with_keys=True))
        await comes(lambda: service.ranks.num_saves)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        service.ranks.may_save.set()
        assert not held(service)
        exporting = await service.engine.house.open_export("book", with_keys=True)
        assert len(exporting.manifests) == 2


async def test_the_checkpoint_is_read_once(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    expected = read_fingerprint(folder)
    async with serving(Storage(), policy=DEMAND, model=str(folder)) as service:
        assert await service.engine.house.fingerprint() == expected
        (folder / "config.json").write_text("{}")
        assert await service.engine.house.fingerprint() == expected
