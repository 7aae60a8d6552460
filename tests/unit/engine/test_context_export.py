"""Contexts that are exported from an engine: the exported segments, and the manifests that stay on storage
meanwhile."""

import asyncio
from pathlib import Path

import pytest

from coordinator.persistence.snapshots.snapshot_index import RetentionPolicy
from longleaf.errors import DataLoss, NotFound, StorageUnavailable
from longleaf.fingerprint import read_fingerprint
from tests.support.coming import comes
from tests.support.service import write_model
from tests.support.storing import NOW, Service, Storage, ingest_two, serving

pytestmark = pytest.mark.timeout(60)
DEMAND = RetentionPolicy("demand", grace=NOW)


def protected_manifests(service: Service) -> list[str]:
    """Manifests that stay on storage for the exports."""
    return service.snapshots._sender.pinned


async def test_export_contains_all_segments_and_is_repeatable() -> None:
    async with serving(Storage(), policy=DEMAND) as service:
        ids = await ingest_two(service.engine)
        exporting = await service.engine.transfers.open_export("book", with_keys=True)
        assert [each.id for each in exporting.segments] == list(ids)
        assert [list(each.token_ids) for each in exporting.segments] == [list(range(40)), list(range(100, 120))]
        assert (exporting.context.segment, exporting.context.num_tokens) == (ids[-1], 60)
        assert list(exporting.manifests) == list(ids)
        for manifest in exporting.manifests.values():
            for piece in manifest.pieces:
                assert len(await exporting.read(piece)) == piece.num_bytes
        again = await service.engine.transfers.open_export("book", with_keys=True)
        assert (again.context, again.segments, again.manifests) == (
            exporting.context,
            exporting.segments,
            exporting.manifests,
        )


async def test_export_without_keys_saves_nothing() -> None:
    async with serving(Storage(), policy=DEMAND) as service:
        await ingest_two(service.engine)
        exporting = await service.engine.transfers.open_export("book", with_keys=False)
        assert len(exporting.segments) == 2
        assert not exporting.manifests
        assert not service.ranks.num_saves
        assert not protected_manifests(service)
        with pytest.raises(NotFound):
            await service.engine.transfers.open_export("other", with_keys=False)


async def test_evicted_context_is_exported_with_its_stored_keys() -> None:
    storage = Storage()
    async with serving(storage, policy=DEMAND) as service:
        first, _ = await ingest_two(service.engine)
        await service.snapshots.save([first])
    async with serving(storage, policy=DEMAND) as service:
        exporting = await service.engine.transfers.open_export("book", with_keys=True)
        assert list(exporting.manifests) == [first]
        assert len(exporting.segments) == 2
        assert len(protected_manifests(service)) == 1


async def test_export_without_storage_has_no_keys() -> None:
    async with serving(Storage(), policy=RetentionPolicy("off", grace=NOW)) as service:
        await ingest_two(service.engine)
        exporting = await service.engine.transfers.open_export("book", with_keys=True)
        assert not exporting.manifests
        assert len(exporting.segments) == 2


async def test_exported_manifests_stay_on_storage_until_the_export_closes() -> None:
    storage = Storage()
    async with serving(storage, policy=DEMAND) as service:
        await ingest_two(service.engine)
        exporting = await service.engine.transfers.open_export("book", with_keys=True)
        other = await service.engine.transfers.open_export("book", with_keys=True)
        await service.engine.delete_context("book")
        await exporting.close()
        await exporting.close()
        for manifest in other.manifests.values():
            for piece in manifest.pieces:
                await other.read(piece)
        assert len(protected_manifests(service)) == 2
        await other.close()
        assert not protected_manifests(service)
        await comes(lambda: not storage.num_objects)


@pytest.mark.parametrize("is_missing", [True, False])
async def test_damaged_pieces_are_not_read(is_missing: bool) -> None:
    storage = Storage()
    async with serving(storage, policy=DEMAND) as service:
        await ingest_two(service.engine)
        exporting = await service.engine.transfers.open_export("book", with_keys=True)
        piece = exporting.manifests[0].pieces[0]
        if is_missing:
            storage.files.files.remove(piece.name)
        else:
            storage.files.files.write(piece.name, [memoryview(b"x" * piece.num_bytes)], False)
        with pytest.raises(DataLoss):
            await exporting.read(piece)


@pytest.mark.parametrize("is_missing", [True, False])
async def test_segment_with_a_damaged_manifest_is_exported_without_keys(is_missing: bool) -> None:
    storage = Storage()
    async with serving(storage, policy=DEMAND) as service:
        first, last = await ingest_two(service.engine)
        await service.snapshots.save([first, last])
        name = service.snapshots._records[first].manifest
        if is_missing:
            storage.files.files.remove(name)
        else:
            storage.files.files.write(name, [memoryview(b"nothing")], False)
        exporting = await service.engine.transfers.open_export("book", with_keys=True)
        assert list(exporting.manifests) == [last]
        await exporting.close()
        assert not protected_manifests(service)


async def test_storage_failure_is_raised_and_no_manifest_stays_protected() -> None:
    storage = Storage()
    async with serving(storage, policy=DEMAND) as service:
        ids = await ingest_two(service.engine)
        await service.snapshots.save(ids)
        await comes(lambda: not storage.lasting.catalog._outbox)  # all changes have been reported
        storage.files.fail(1)
        with pytest.raises(StorageUnavailable):
            await service.engine.transfers.open_export("book", with_keys=True)
        assert not protected_manifests(service)
        exporting = await service.engine.transfers.open_export("book", with_keys=True)
        assert len(exporting.manifests) == 2


async def test_failed_save_fails_the_export() -> None:
    storage = Storage()
    async with serving(storage, policy=DEMAND) as service:
        await ingest_two(service.engine)
        service.ranks.storage_error = "it is away"
        with pytest.raises(StorageUnavailable, match="it is away"):
            await service.engine.transfers.open_export("book", with_keys=True)


async def test_disconnect_during_a_save_protects_no_manifest() -> None:
    async with serving(Storage(), policy=DEMAND) as service:
        await ingest_two(service.engine)
        service.ranks.may_save.clear()
        opening = asyncio.create_task(service.engine.transfers.open_export("book", with_keys=True))
        await comes(lambda: service.ranks.num_saves)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        service.ranks.may_save.set()
        assert not protected_manifests(service)
        exporting = await service.engine.transfers.open_export("book", with_keys=True)
        assert len(exporting.manifests) == 2


async def test_checkpoint_is_read_once(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    expected = read_fingerprint(folder)
    async with serving(Storage(), policy=DEMAND, model=str(folder)) as service:
        assert await service.engine.transfers.fingerprint() == expected
        (folder / "config.json").write_text("{}")
        assert await service.engine.transfers.fingerprint() == expected
