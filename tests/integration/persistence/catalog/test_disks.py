"""Disks that are full, read-only, fail or disappear: commits raise errors, leave nothing behind, and work again
afterwards."""

import errno
import os
import shutil
import sqlite3
import subprocess
import sys
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coordinator.persistence.catalog.catalog import DATABASE, Catalog, read_only_catalog
from coordinator.persistence.catalog.data_folder import DataFolder
from coordinator.persistence.catalog.records import Change, OutboxEntry, UploadRecord
from coordinator.persistence.catalog.reserve import Reserve
from longleaf.errors import CatalogError, StorageUnavailable
from tests.support.catalog import context, document
from tests.support.small_disk import fill, small_disk


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 1 MiB, or of the size that the test requests."""
    with small_disk(tmp_path / "disk", getattr(request, "param", 1) << 20) as made:
        yield made.folder


@asynccontextmanager
async def opened(disk: Path) -> AsyncIterator[tuple[DataFolder, Catalog]]:
    """The data folder on a disk, and its catalog with a reserve."""
    folder = DataFolder.open(disk / "data", "f" * 64, "model", {})
    catalog = await Catalog.open(folder.database, reserve=folder.reserve)
    try:
        yield folder, catalog
    finally:
        await catalog.close()
        folder.close()


async def test_full_disk_refuses_a_commit_and_accepts_the_next_one(disk: Path) -> None:
    catalog = await Catalog.open(disk / DATABASE)
    await catalog.commit(document("a", 0))
    before = await catalog.load()
    for size in (400_000, 100_000_000):
        if size > 1_000_000:
            with pytest.raises(OSError, match="No space"):
                (disk / "other").write_bytes(bytes(2_000_000))
        with pytest.raises(StorageUnavailable, match=r"catalog\.db: the disk is full .*; free disk space"):
            await catalog.commit(document("b", 1, 400_000))
        assert await catalog.load() == before
    (disk / "other").unlink()
    await catalog.commit(document("b", 1))
    assert [each.id for each in read_only_catalog(disk).contexts] == ["a", "b"]
    await catalog.close()


async def test_full_disk_prevents_the_creation_of_the_data_files(disk: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        (disk / "other").write_bytes(bytes(2_000_000))
    with pytest.raises(CatalogError, match="No space left.*on a disk that is not full"):
        DataFolder.open(disk, "f" * 64, "model", {})
    with pytest.raises(CatalogError, match="the disk is full|its disk fails|No space left"):
        await Catalog.open(disk / DATABASE)
    (disk / "other").unlink()
    catalog = await Catalog.open(disk / DATABASE)
    await catalog.close()


@pytest.mark.parametrize("disk", [16], indirect=True)
async def test_full_disk_accepts_deletions_and_restarts(disk: Path) -> None:
    """Deletions use the reserved space, which is reserved again once there is room."""
    async with opened(disk) as (folder, catalog):
        for number in range(4):
            await catalog.commit(document(f"book{number}", number, 30_000))
        size = (folder.path / "reserve").stat().st_size
        assert size == (16 << 20) // 32
        folder.reserve.check()
        fill(disk / "other")
        with pytest.raises(StorageUnavailable, match="are reserved for deletions"):
            folder.reserve.check()
        with pytest.raises(StorageUnavailable, match="the disk is full"):
            await catalog.commit(document("late", 9, 100_000))
        assert (folder.path / "reserve").exists(), "new data must not use the reserve"
        assert (await catalog.commit(Change(dropped_contexts=("book0",)))).segments == (0,)
        (disk / "other").unlink()
        await catalog.commit(Change(dropped_contexts=("book1",)))
        assert (folder.path / "reserve").stat().st_size == size
    fill(disk / "other")
    async with opened(disk) as (folder, catalog):
        await catalog.note_epoch(7)
        for name in ("book2", "book3"):
            await catalog.commit(Change(dropped_contexts=(name,)))
        retained = await catalog.load()
        assert (retained.contexts, retained.epoch) == ((), 7)


@pytest.mark.parametrize("disk", [16], indirect=True)
async def test_disk_filled_between_deletions_leaves_space_for_the_next_one(disk: Path) -> None:
    """Includes the start of a service that ended meanwhile."""
    async with opened(disk) as (_, catalog):
        for number in range(8):
            await catalog.commit(document(f"book{number}", number, 20_000))
    for half in (range(4), range(4, 8)):
        async with opened(disk) as (_, catalog):
            await catalog.note_epoch(7)
            for number in half:
                fill(disk / f"other{number}")
                await catalog.commit(Change(dropped_contexts=(f"book{number}",)))
        fill(disk / f"more{half.start}")
    async with opened(disk) as (_, catalog):
        assert not (await catalog.load()).contexts


@pytest.mark.parametrize("disk", [16], indirect=True)
async def test_outbox_entries_leave_space_for_the_next_deletion(disk: Path) -> None:
    async with opened(disk) as (_, catalog):
        await catalog.commit(document("book", 0, 20_000))
        await catalog.commit(Change(outgoing=tuple(OutboxEntry(f"{number:0200}", None) for number in range(1000))))
        keys = [key for key, _ in await catalog.outgoing(256)]
        for start in range(0, len(keys), 64):
            fill(disk / f"other{start}")
            await catalog.done(keys[start : start + 64])
        assert (await catalog.commit(Change(dropped_contexts=("book",)))).segments == (0,)


@pytest.mark.parametrize("disk", [520], indirect=True)
async def test_space_freed_for_deletions_is_reserved_for_them(disk: Path) -> None:
    """Uploads, imports and new contexts cannot use it."""
    async with opened(disk) as (folder, catalog):
        for number in range(3):
            await catalog.commit(document(f"book{number}", number, 300_000))
        fill(disk / "other")
        with pytest.raises(StorageUnavailable):
            await catalog.commit(Change(next_segment=1000))
        assert folder.reserve.is_there
        await catalog.commit(Change(dropped_contexts=("book2",)))
        assert not folder.reserve.is_there
        upload = UploadRecord(context="up", upload_id="u", header=b"x", settled_bytes=1, updated=1.0)
        with pytest.raises(StorageUnavailable, match="are reserved for deletions"):
            await catalog.append_upload(upload, 0, array("I", [7] * 60_000))
        with pytest.raises(StorageUnavailable, match="are reserved for deletions"):
            await catalog.commit(document("late", 9, 10))
        for name in ("book0", "book1"):
            await catalog.commit(Change(dropped_contexts=(name,)))


def test_sparse_reserve_is_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "reserve").touch()  # like one that was killed meanwhile
    reserve = Reserve(tmp_path)
    assert not reserve.is_there

    def refuse(*_: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        reserve.make()
    assert not (tmp_path / "reserve").exists()
    assert not caplog.records
    reserve.make()
    assert reserve.is_there
    (tmp_path / "reserve").unlink()


@pytest.mark.parametrize("disk", [64], indirect=True)
def test_undersized_reserve_grows_with_the_free_space(disk: Path) -> None:
    reserve = Reserve(disk)
    reserve.make()
    size = (disk / "reserve").stat().st_size
    assert reserve.is_there and reserve.release()
    fill(disk / "other")
    os.truncate(disk / "other", (disk / "other").stat().st_size - size // 2)
    reserve.make()
    assert 0 < (disk / "reserve").stat().st_size < size
    os.truncate(disk / "other", (disk / "other").stat().st_size - size)
    reserve.make()
    assert reserve.is_there, "although there is less than four times its size"


async def test_read_only_disk_is_refused_at_start_and_can_be_read(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as made:
        disk = made.folder
        folder = DataFolder.open(disk / "data", "f" * 64, "model", {})
        catalog = await Catalog.open(folder.database)
        await catalog.commit(document("a", 0))
        retained = await catalog.load()
        await catalog.close()
        folder.close()
        made.make_read_only()
        with pytest.raises(CatalogError, match=f"{disk}/data/.*cannot be used: Read-only file system.*read and write"):
            DataFolder.open(disk / "data", "f" * 64, "model", {})
        with pytest.raises(CatalogError, match="it is read-only|it cannot be opened"):
            await Catalog.open(folder.database)
        assert read_only_catalog(folder.path) == retained


async def test_moved_file_is_detected_and_found_again(tmp_path: Path) -> None:
    catalog = await Catalog.open(tmp_path / DATABASE)
    await catalog.commit(document("a", 0))
    names = (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm")
    (tmp_path / "away").mkdir()
    for name in names:
        (tmp_path / name).rename(tmp_path / "away" / name)
    for number in (1, 2):
        with pytest.raises(StorageUnavailable, match="restore it"):
            await catalog.commit(document("b", number))
    for path in (tmp_path / "away").iterdir():
        path.rename(tmp_path / path.name)
    await catalog.commit(document("c", 3))
    assert [each.id for each in (await catalog.load()).contexts] == ["a", "c"]
    await catalog.close()


async def test_lock_of_another_program_is_reported_and_survived(tmp_path: Path) -> None:
    catalog = await Catalog.open(tmp_path / DATABASE, busy_seconds=0.05)
    other = sqlite3.connect(tmp_path / DATABASE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageUnavailable, match="another process has locked it") as raised:
        await catalog.commit(document("a", 0))
    assert raised.value.retry_seconds
    with pytest.raises(CatalogError, match="another process has locked it"):
        await Catalog.open(tmp_path / DATABASE, busy_seconds=0.05)
    other.close()
    await catalog.commit(document("a", 0))
    await catalog.close()


QUOTA = """
import asyncio, resource, sys
from pathlib import Path
from coordinator.persistence.catalog.catalog import Catalog
from longleaf.errors import StorageUnavailable
from tests.support.catalog import document

async def main():
    catalog = await Catalog.open(Path(sys.argv[1]))
    await catalog.commit(document("a", 0))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        await catalog.commit(document("b", 1, 100_000))
    except StorageUnavailable as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    await catalog.commit(document("c", 2))
    print([each.id for each in (await catalog.load()).contexts])
    await catalog.close()

asyncio.run(main())
"""


def test_failing_disk_is_reported_and_survived(tmp_path: Path) -> None:
    output = subprocess.run(
        [sys.executable, "-c", QUOTA, tmp_path / DATABASE], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert "its disk failed, or a quota is exceeded (disk I/O error)" in output[0]
    assert output[1] == "['a', 'c']"


# --- damage ---


async def make(folder: Path) -> Path:
    """Three contexts in a file: one of a long segment, one of another segment, and one that continues the latter."""
    catalog = await Catalog.open(folder / DATABASE)
    await catalog.commit(document("long", 0, 200_000))
    await catalog.commit(document("short", 1, 500))
    appended = Change(contexts=(context("twin", 1, 300, display_name="the name of the twin"),))
    await catalog.commit(appended)
    await catalog.close()
    return folder / DATABASE


@pytest.mark.parametrize("share", [0, 0.001, 0.5, 0.99])
async def test_truncated_file_is_refused_with_advice(tmp_path: Path, share: float) -> None:
    path = await make(tmp_path)
    os.truncate(path, int(path.stat().st_size * share))
    for opens in (Catalog.open(path), _read(tmp_path)):
        with pytest.raises(CatalogError, match=r"catalog\.db: it is (damaged|truncated).*restore.*move"):
            await opens


async def test_file_that_is_not_a_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / DATABASE).write_bytes(b"these are notes, no database\n" * 1000)
    with pytest.raises(CatalogError, match="it is damaged .*not a database.*restore"):
        await Catalog.open(tmp_path / DATABASE)


async def test_log_without_its_database_is_refused(tmp_path: Path) -> None:
    path = await make(tmp_path)
    path.rename(f"{path}-wal")
    with pytest.raises(CatalogError, match="is missing.*restore the missing file"):
        await Catalog.open(path)


async def test_later_schema_is_refused(tmp_path: Path) -> None:
    path = await make(tmp_path)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(CatalogError, match=r"written by a later version of longleaf \(schema 9999"):
        await Catalog.open(path)
    with pytest.raises(CatalogError, match="written by another version of longleaf"):
        await _read(tmp_path)
    assert path.read_bytes() == before


async def _read(folder: Path) -> None:
    read_only_catalog(folder)


def flip(path: Path, what: bytes) -> None:
    content = bytearray(path.read_bytes())
    at = content.index(what)
    content[at] ^= 1
    path.write_bytes(content)


async def test_flipped_byte_of_ids_is_reported_and_costs_one_segment(tmp_path: Path) -> None:
    path = await make(tmp_path)
    ids = document("long", 0, 200_000).segments[0].token_ids
    flip(path, ids[70_000:70_002].tobytes())
    catalog = await Catalog.open(path)
    retained = await catalog.load()
    assert retained.damaged == {0: "its token ids from 65,536 on are damaged"}
    assert [each.id for each in retained.segments] == [1] and len(retained.contexts) == 3
    assert (await catalog.commit(Change(dropped_contexts=("long",)))).segments == (0,)
    await catalog.close()


async def test_flipped_byte_of_a_context_is_reported_and_costs_that_context(tmp_path: Path) -> None:
    path = await make(tmp_path)
    flip(path, b"the name of the twin")
    catalog = await Catalog.open(path)
    retained = await catalog.load()
    assert retained.damaged_contexts == {"twin": "its record is damaged"}
    assert [each.id for each in retained.contexts] == ["long", "short"]
    await catalog.commit(Change(dropped_contexts=("twin",)))
    assert not (await catalog.load()).damaged_contexts
    await catalog.close()


async def test_any_flipped_byte_is_detected_or_harmless(tmp_path: Path) -> None:
    whole = await make(tmp_path)
    expected = read_only_catalog(tmp_path)
    folder = tmp_path / "copy"
    folder.mkdir()
    content = whole.read_bytes()
    for at in range(40, 90_000, 499):
        (folder / DATABASE).write_bytes(content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :])
        try:
            retained = read_only_catalog(folder)
        except CatalogError:
            continue
        if not (retained.damaged or retained.damaged_contexts or retained.other_damage):
            assert retained == expected, at
        shutil.rmtree(folder)
        folder.mkdir()


def test_reserve_that_cannot_grow_is_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve, size = Reserve(tmp_path), 1 << 20
    with (tmp_path / "reserve").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)

    def fallocate(descriptor: int, start: int, length: int) -> None:
        os.truncate(descriptor, length)  # a part of the space may have been used
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patched:
        patched.setattr("os.posix_fallocate", fallocate)
        reserve.make()
    status = (tmp_path / "reserve").stat()
    assert (status.st_size, status.st_blocks * 512) == (size, size)
