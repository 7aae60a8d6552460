"""A store reports errors of its storage, and its calls are bounded in time."""

import errno
from array import array
from contextlib import suppress

import pytest
from blake3 import blake3

from longleaf.errors import AlreadyExists, DataLoss, InvalidArgument, NotFound, StorageUnavailable
from longleaf.storage.store import Store
from longleaf.storage.timed_calls import MAX_HANGING
from tests.support.fakes.storage import FlakyFiles, MemoryFiles


@pytest.fixture(name="files")
def flaky_files() -> FlakyFiles:
    return FlakyFiles(MemoryFiles())


@pytest.fixture(name="store")
def store_of(files: FlakyFiles) -> Store:
    return Store(files, "fake://user:secret@host/folder?key=secret", timeout=30)


def names(store):
    return sorted(entry.name for entry in store.list())


def test_parts_of_any_buffer_type_are_joined(store):
    parts = [b"one", bytearray(b"two"), memoryview(array("I", [1, 2])), b"", memoryview(b"abc")[1:]]
    content = b"".join(bytes(part) for part in parts)
    written = store.put("a/b", parts)
    assert (written.num_bytes, written.digest) == (len(content), blake3(content).hexdigest())
    assert store.get("a/b", written.digest) == content
    assert store.size("a/b") == len(content)


def test_new_object_replaces_nothing(store):
    store.put("a", [b"first"])
    with pytest.raises(AlreadyExists):
        store.put("a", [b"second"], is_new=True)
    assert store.get("a") == b"first"


def test_missing_objects_raise_not_found(store):
    with pytest.raises(NotFound):
        store.get("a")
    with pytest.raises(NotFound):
        store.size("a")
    assert not store.exists("a")
    assert not list(store.list("a"))
    store.delete(["a"])


def test_changed_content_is_detected(store):
    digest = store.put("a", [b"first"]).digest
    store.put("a", [b"other"])
    with pytest.raises(DataLoss, match="a is damaged"):
        store.get("a", digest)


@pytest.mark.parametrize(
    "name", ["", "/a", "a/", "a//b", "..", "a/../b", ".", ".a", "a b", "a\0", "ä", "a\n", "x" * 1001]
)
def test_names_cannot_escape_the_storage(store, name):
    for call in (store.get, store.size, store.exists, lambda name: store.put(name, [b""]), lambda n: store.delete([n])):
        with pytest.raises(InvalidArgument, match="name"):
            call(name)
    if name:
        with pytest.raises(InvalidArgument, match="name"):
            store.list(name)


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (OSError(errno.EIO, "input/output error"), "input/output error"),
        (OSError(errno.ENOSPC, "no space"), "free space"),
        (OSError(errno.EDQUOT, "quota"), "free space"),
        (OSError(errno.EROFS, "read-only"), "mount it for writing"),
        (PermissionError("403"), "credentials"),
        (FileExistsError("surprise"), "surprise"),
        (ValueError("https://me:password@host/x failed"), "https://host/x failed"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_failures_are_storage_errors_with_a_remedy(store, files, error, reported):
    calls = (
        lambda: store.put("a", [b"1"]),
        lambda: store.get("a"),
        lambda: store.size("a"),
        lambda: store.exists("a"),
        lambda: store.list(),
        lambda: store.delete(["a"]),
    )
    for call in calls:
        files.fail(1, error)
        with pytest.raises(StorageUnavailable, match=reported) as caught:
            call()
        assert "fake://host/folder cannot be" in str(caught.value)
        assert "secret" not in str(caught.value)
        assert "password" not in str(caught.value)


def test_local_memory_error_is_not_a_storage_error(store, files):
    files.fail(1, MemoryError())
    with pytest.raises(MemoryError):
        store.get("a")


def test_full_storage_can_be_read_and_emptied(store, files):
    files.max_bytes = 10
    store.put("a", [b"12345678"])
    with pytest.raises(StorageUnavailable, match="full"):
        store.put("b", [b"123"])
    assert store.get("a") == b"12345678"
    store.delete(["a"])
    store.put("b", [b"123"])


def test_torn_object_is_detected(store, files):
    files.tear(3)
    with pytest.raises(StorageUnavailable):
        store.put("a", [b"12", b"34"])
    assert store.get("a") == b"123"
    with pytest.raises(DataLoss):
        store.get("a", blake3(b"1234").hexdigest())


def test_hanging_storage_times_out_and_recovers(files):
    hasty, patient = Store(files, "fake://x", timeout=0.01), Store(files, "fake://x", timeout=60)
    files.is_answering.clear()
    errors = [""]
    while "no answer within 10 ms" in errors[-1] or not errors[-1]:  # a thread that starts later than that is cancelled
        with pytest.raises(StorageUnavailable) as raised:
            hasty.put("a", [b"1"])
        errors.append(str(raised.value))
    assert f"{MAX_HANGING} earlier calls" in errors[-1]
    for _ in range(MAX_HANGING):
        files.begun.acquire()
    assert not files.begun.acquire(blocking=False)
    files.is_answering.set()
    patient.put("a", [b"1"])
    assert patient.get("a") == b"1"
    with suppress(StorageUnavailable):  # 10 ms may be too few, but the storage is asked again
        hasty.put("b", [b"2"])
    assert patient.get("b") == b"2"
