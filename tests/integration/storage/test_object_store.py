"""A store in a real S3 server, and one that becomes unreachable."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from longleaf.errors import AlreadyExists, DataLoss, InvalidArgument, NotFound, StorageUnavailable
from longleaf.storage.gc import sweep
from longleaf.storage.inventory import read_manifests, read_notes
from longleaf.storage.names import Attempt
from longleaf.storage.store import Store
from tests.support.kept_segments import keep, put_note
from tests.support.object_store import CREDENTIALS, ObjectStore, object_store

LARGE = 6 << 20


@pytest.fixture(scope="module", name="server")
def running_server() -> Iterator[ObjectStore]:
    with object_store() as server:
        yield server


def test_stored_objects_exist(server):
    store, other = Store.open(server.url), Store.open(server.url)
    assert not list(store.list())
    written = store.put("a/b", [os.urandom(LARGE), b"end"])
    assert written.num_bytes == LARGE + 3
    assert len(other.get("a/b", written.digest)) == other.size("a/b") == LARGE + 3
    store.put("a/with%2Fpercent", [])
    # another process sees a write immediately: listings are not cached
    assert [(entry.name, entry.num_bytes) for entry in other.list("a")] == [("a/b", LARGE + 3), ("a/with%2Fpercent", 0)]
    assert all(abs(entry.modified - time.time()) < 3600 for entry in other.list())
    store.delete(["a/b", "a/none"])
    assert [entry.name for entry in other.list("a")] == ["a/with%2Fpercent"]
    assert not other.exists("a/b")
    assert not other.exists("a")
    with pytest.raises(NotFound):
        other.get("a/b")
    with pytest.raises(DataLoss):
        store.get("a/with%2Fpercent", written.digest)
    other.delete(["a/with%2Fpercent"])
    assert not list(store.list("a"))


def test_folders_are_distinguished_from_longer_names(server):
    store = Store.open(f"{server.url}/folders")
    for name in ("services/a/x", "services/ab/x", "services/a-b/x"):
        store.put(name, [b"1"])
    assert [entry.name for entry in store.list("services/a")] == ["services/a/x"]
    assert [entry.name for entry in Store.open(f"{server.url}/folder").list()] == []


def test_create_replaces_no_existing_object(server):
    store = Store.open(f"{server.url}/new")
    store.put("a", [b"first"], is_new=True)
    with pytest.raises(AlreadyExists):
        store.put("a", [b"second"], is_new=True)
    assert store.get("a") == b"first"


def test_segments_and_notes_are_stored_and_collected(server):
    store = Store.open(f"{server.url}/swept")
    live = keep(store, Attempt("a", "a-1", "1f"))
    keep(store, Attempt("a", "a-1", "2f"))
    notes = [put_note(store, "a", "moby.dick", number) for number in (9, 10)]
    assert sweep(store, "a", time.time(), 3600, live).num_objects == 0
    assert sweep(store, "a", time.time() + 7200, 3600, live).num_objects == 4
    assert {entry.name for entry in store.list()} == live | {notes[1]}
    assert [note.place.number for note in read_notes(store).newest.values()] == [10]
    assert [name for name, _ in read_manifests(store)] == [Attempt("a", "a-1", "1f").manifest]


def test_missing_bucket_is_refused_and_not_created(server):
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="s3://none-such/x cannot be written: .*bucket does not exist"):
            Store.open("s3://none-such/x")


@pytest.mark.extended
def test_stopped_server():
    with object_store() as server:
        store = Store.open(server.url, timeout=3)
        store.put("a", [b"1"])
        server.stop()
        for call in (
            lambda: store.put("b", [b"1"]),
            lambda: store.get("a"),
            lambda: Store.open(server.url, timeout=3),
        ):
            before = time.monotonic()
            with pytest.raises(StorageUnavailable, match="check that it .*can be reached"):
                call()
            assert time.monotonic() - before < 60  # and less than the retries of a driver take


def test_server_that_never_answers(server, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(StorageUnavailable, match="no answer within 500 ms"):
            Store.open(server.url, timeout=0.5)


def test_process_without_credentials_gets_an_error(server, tmp_path):
    """It neither hangs at exit nor prints messages of drivers."""
    environment = {name: value for name, value in os.environ.items() if name not in CREDENTIALS}
    environment |= {"AWS_EC2_METADATA_DISABLED": "true", "HOME": str(tmp_path)}
    code = f"""
from longleaf.storage.store import Store
try:
    Store.open({server.url!r})
except Exception as error:
    print(type(error).__name__, error)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert "StorageUnavailable" in done.stdout
    assert "credentials" in done.stdout
    assert not done.stderr
