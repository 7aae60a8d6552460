"""Objects in a folder: written in a durable order, and removed with their folders."""

import os
import threading

import pytest

from longleaf.errors import AlreadyExists, NotFound, StorageUnavailable
from longleaf.storage.files import PART
from longleaf.storage.store import Store


@pytest.fixture(name="store")
def store_of(tmp_path) -> Store:
    return Store.open(str(tmp_path / "kept"))


def test_delete_leaves_no_empty_folders(store, tmp_path):
    for name in ("a/b/c/one", "a/b/two", "a/three"):
        store.put(name, [b"1"])
    store.delete(["a/b/c/one"])
    assert not (tmp_path / "kept" / "a" / "b" / "c").exists()
    store.delete(["a/b/two", "a/three", "a/none"])
    assert not list((tmp_path / "kept").iterdir())
    store.put("a/b/c/one", [b"1"])


def test_folders_are_not_objects(store):
    store.put("a/b", [b"1"])
    assert not store.exists("a")
    with pytest.raises(NotFound):
        store.get("a")
    with pytest.raises(NotFound):
        store.get("a/b/c")
    assert not store.exists("a/b/c")
    store.delete(["a/b/c", "a"])
    assert store.get("a/b") == b"1"


def test_missing_folder_is_a_storage_failure_not_a_missing_object(store, tmp_path):
    (tmp_path / "kept").rename(tmp_path / "elsewhere")
    calls = (
        lambda: store.get("a"),
        lambda: store.exists("a"),
        lambda: list(store.list()),
        lambda: store.delete(["a"]),
        lambda: store.put("a/b", [b"1"]),
    )
    for call in calls:
        with pytest.raises(StorageUnavailable, match="no longer exists"):
            call()
    assert not (tmp_path / "kept").exists()


def test_links_out_of_the_folder_are_not_listed(store, tmp_path):
    (tmp_path / "kept" / "link").symlink_to("/etc")
    (tmp_path / "kept" / "file").symlink_to("/etc/passwd")
    assert not list(store.list())


@pytest.mark.parametrize("is_new", [True, False])
def test_object_is_synced_before_it_is_renamed(store, tmp_path, monkeypatch, is_new):
    """The order of calls determines the data that a power failure may destroy."""
    steps = []

    def record(name, path_of_call):
        original = getattr(os, name)

        def call(*arguments, **options):
            steps.append((name, path_of_call(*arguments)))
            return original(*arguments, **options)

        monkeypatch.setattr(os, name, call)

    def path_of(descriptor, *_):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        return "part" if path.endswith(PART) else os.path.relpath(path, tmp_path)

    record("write", path_of)
    record("fsync", path_of)
    for name in ("replace", "link"):
        record(name, lambda source, target: os.path.relpath(target, tmp_path))
    store.put("a/b/c", [b"12", b"34"], is_new=is_new)
    assert steps == [
        ("fsync", "kept"),  # the created folders
        ("fsync", "kept/a"),
        ("write", "part"),
        ("write", "part"),
        ("fsync", "part"),
        ("link" if is_new else "replace", "kept/a/b/c"),
        ("fsync", "kept/a/b"),
    ]


def test_failed_put_leaves_nothing(store, tmp_path, monkeypatch):
    def fsync(descriptor):
        raise OSError("no")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StorageUnavailable):
        store.put("a", [b"1"])
    assert not list((tmp_path / "kept").iterdir())


def test_concurrent_puts_and_deletes_in_one_folder(store):
    """The folder is repeatedly removed while objects are written to it."""
    failures = []

    def live(number):
        try:
            for _ in range(50):
                store.put(f"a/b/{number}", [b"1"])
                assert store.get(f"a/b/{number}") == b"1"
                store.delete([f"a/b/{number}"])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=live, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert not list(store.list())


def test_only_one_concurrent_put_of_a_new_object_succeeds(store):
    winners, barrier = [], threading.Barrier(4)

    def live(number):
        barrier.wait()
        try:
            store.put("a/b", [bytes([number])], is_new=True)
            winners.append(number)
        except AlreadyExists:
            pass

    threads = [threading.Thread(target=live, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.get("a/b") == bytes(winners)
    assert [entry.name for entry in store.list()] == ["a/b"]


def test_object_deleted_right_after_its_creation_was_written(store, tmp_path, monkeypatch):
    replace = os.replace

    def replace_and_delete(part, path):
        replace(part, path)
        Store.open(str(tmp_path / "kept"), probe=False).delete(["a/b"])

    monkeypatch.setattr(os, "replace", replace_and_delete)
    assert store.put("a/b", [b"1"]).num_bytes == 1
    assert not (tmp_path / "kept" / "a").exists()
