"""Processes that are killed during writes: no reader accepts a partial write."""

import time

from longleaf.errors import DataLoss
from longleaf.storage.files import PART
from longleaf.storage.gc import sweep
from longleaf.storage.inventory import read_manifests, read_notes
from longleaf.storage.local import LocalFiles
from longleaf.storage.names import Attempt
from longleaf.storage.store import Store
from tests.support.dying import killed_at_each_call
from tests.support.kept_segments import keep, manifest_of, put_note

SERVICE = "a"


def test_segment_is_stored_whole_or_not_stored(tmp_path):
    store, numbers = Store.open(str(tmp_path)), []
    for number in killed_at_each_call(lambda number: keep(Store(LocalFiles(tmp_path), ""), attempt_of(number))):
        numbers.append(number)
        names = {entry.name for entry in store.list()}
        for name, manifest in read_manifests(store):
            assert not isinstance(manifest, DataLoss)
            assert manifest == manifest_of(attempt_of(int(name.split("/")[4])))
            assert names.issuperset(manifest.objects)
    assert len(numbers) > 20
    complete = attempt_of(len(numbers))
    assert complete.manifest in dict(read_manifests(store))
    live = {complete.manifest, *manifest_of(complete).objects}
    assert any(entry.name.endswith(PART) for entry in store.list())
    sweep(store, SERVICE, time.time() + 10, 0, live)
    assert {entry.name for entry in store.list()} == live


def attempt_of(number: int) -> Attempt:
    return Attempt(SERVICE, "a-1", f"{number}")


def test_note_is_replaced_atomically(tmp_path):
    store = Store.open(str(tmp_path))
    put_note(store, SERVICE, "moby", 0)
    last = 0

    def delete(number):
        put_note(Store(LocalFiles(tmp_path), ""), SERVICE, "moby", number + 1, is_deleted=True)

    for number in killed_at_each_call(delete):
        found = read_notes(store)
        assert not found.damaged
        note = found.newest[SERVICE, "moby"]
        assert note.place.number in (last, number + 1)
        assert (note.record is None) == (note.place.number > 0)
        last = note.place.number
    assert last > 0  # some were killed after they had written
    assert read_notes(store).newest[SERVICE, "moby"].place.number > last


def test_killed_deletion_can_be_repeated(tmp_path):
    store, names = Store.open(str(tmp_path)), ["a/b/c", "a/b/d"]
    put_all(store, names)
    found = set()
    for _ in killed_at_each_call(lambda _: Store(LocalFiles(tmp_path), "").delete(names)):
        found.add(tuple(entry.name for entry in store.list()))
        put_all(store, names)
    assert found == {("a/b/c", "a/b/d"), ("a/b/d",), ()}
    assert not list(tmp_path.iterdir())


def put_all(store: Store, names: list[str]) -> None:
    for name in names:
        store.put(name, [b"1"])
