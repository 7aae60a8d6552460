"""A folder on a disk that is full, read-only, or gone."""

import pytest

from longleaf.errors import InvalidArgument, StorageUnavailable
from longleaf.storage.store import Store
from tests.support.small_disk import small_disk

SIZE = 1 << 20


def test_full_disk_keeps_existing_objects_and_no_torn_one(tmp_path):
    with small_disk(tmp_path / "disk", SIZE) as disk:
        store = Store.open(str(disk.folder / "kept"))
        digest = store.put("a/first", [bytes(SIZE // 2)]).digest
        with pytest.raises(StorageUnavailable, match="is full; free space"):
            store.put("a/second", [bytes(SIZE // 4), bytes(SIZE)])
        assert [entry.name for entry in store.list()] == ["a/first"]
        assert not store.exists("a/second")
        assert len(store.get("a/first", digest)) == SIZE // 2
        store.delete(["a/first"])
        store.put("a/second", [bytes(SIZE // 2)])


def test_full_disk_can_be_opened_and_read(tmp_path):
    with small_disk(tmp_path / "disk", SIZE) as disk:
        store = Store.open(str(disk.folder))
        store.put("first", [b"1"])
        with pytest.raises(OSError, match="No space"):
            (disk.folder / "others").write_bytes(bytes(2 * SIZE))
        assert Store.open(str(disk.folder)).get("first") == b"1"
        with pytest.raises(StorageUnavailable, match="full"):
            store.put("second", [b"1"])


def test_read_only_disk_is_readable_but_cannot_be_opened_for_writing(tmp_path):
    with small_disk(tmp_path / "disk", SIZE) as disk:
        store = Store.open(str(disk.folder))
        store.put("first", [b"1"])
        disk.make_read_only()
        for call in (lambda: store.put("second", [b"1"]), lambda: store.delete(["first"])):
            with pytest.raises(StorageUnavailable, match="read-only; mount it for writing"):
                call()
        assert store.get("first") == b"1"
        for folder in (disk.folder, disk.folder / "below"):
            with pytest.raises(InvalidArgument, match="snapshot_url: .*read-only"):
                Store.open(str(folder))
