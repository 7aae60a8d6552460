"""The inventory of a storage, and the objects that remain after garbage collection."""

import pytest
from msgspec.structs import replace

from longleaf.errors import DataLoss, InvalidArgument, StorageUnavailable
from longleaf.storage.envelope import wrap
from longleaf.storage.gc import sweep
from longleaf.storage.inventory import read_manifests, read_notes
from longleaf.storage.manifest import encode_manifest
from longleaf.storage.names import Attempt
from longleaf.storage.store import Store
from tests.support.fakes.storage import FlakyFiles, MemoryFiles
from tests.support.kept_segments import keep, manifest_of, put_note

GRACE = 100.0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(name="clock")
def clock_of() -> Clock:
    return Clock()


@pytest.fixture(name="files")
def files_of(clock) -> FlakyFiles:
    return FlakyFiles(MemoryFiles(clock))


@pytest.fixture(name="store")
def store_of(files) -> Store:
    return Store(files, "fake://x")


def names(store):
    return {entry.name for entry in store.list()}


def test_newest_note_of_each_context_is_read(store):
    for number, context in enumerate(["moby", "emma", "moby", "moby"]):
        put_note(store, "a", context, number, is_deleted=number == 3)
    put_note(store, "b", "moby", 2)
    found = read_notes(store)
    reported = {key: (note.place.number, note.record is None) for key, note in found.newest.items()}
    assert reported == {("a", "moby"): (3, True), ("a", "emma"): (1, False), ("b", "moby"): (2, False)}
    assert not found.damaged


def test_damaged_note_is_reported_and_not_replaced_by_an_older_one(store):
    put_note(store, "a", "moby", 1)
    newest = put_note(store, "a", "moby", 2, is_deleted=True)
    put_note(store, "a", "emma", 3)
    store.put(newest, [store.get(newest)[:-1]])
    found = read_notes(store)
    assert [note.place.context for note in found.newest.values()] == ["emma"]
    assert [error.name for error in found.damaged] == [newest]


def test_damaged_and_foreign_manifests_are_reported(store):
    good, bad, torn = (Attempt("a", f"a-{number}", "1f") for number in range(3))
    for attempt in (good, bad, torn):
        keep(store, attempt)
    store.put(bad.manifest, [encode_manifest(manifest_of(good))])
    store.put(torn.manifest, [wrap(b"manifest", 1, b"")])
    store.put("services/a/segments/a-1/1f/manifest.0123.part", [b"half"])
    store.put("services/a/unknown", [b"later versions may write this"])
    found = dict(read_manifests(store))
    assert found[good.manifest] == manifest_of(good)
    assert set(found) == {good.manifest, bad.manifest, torn.manifest}
    assert all(isinstance(found[attempt.manifest], DataLoss) for attempt in (bad, torn))


def test_sweep_deletes_old_unreferenced_objects(store, clock):
    live = keep(store, Attempt("a", "a-1", "1f"))
    abandoned = keep(store, Attempt("a", "a-1", "2f"))
    store.put("services/a/segments/a-3/1f/piece-00000.safetensors.01ab.part", [b"half"])
    store.put("services/a/notes/moby/00000000000000000001.01ab.part", [b"half"])
    others = {"services/a/unknown", "services/abc/segments/x", "segments/x", "services/b/segments/b-1/1f/manifest"}
    for name in others:
        store.put(name, [b"of others"])
    assert sweep(store, "a", clock.now + GRACE, GRACE, live).num_objects == 0  # nothing is older yet
    clock.now += GRACE + 1
    young = keep(store, Attempt("a", "a-2", "3f"))
    swept = sweep(store, "a", clock.now, GRACE, live)
    assert swept.num_objects == len(abandoned) + 2
    assert names(store) == live | young | others


def test_last_note_of_a_context_is_never_deleted(store, clock):
    for number, context in enumerate(["moby", "emma", "moby", "emma"]):
        put_note(store, "a", context, number, is_deleted=True)
    clock.now += GRACE + 1
    young = put_note(store, "a", "moby", 9)
    sweep(store, "a", clock.now, GRACE, set())
    # moby's second note is superseded, but one may have listed it a moment ago
    assert names(store) == {*(f"services/a/notes/{c}/{n:020}" for c, n in (("emma", 3), ("moby", 2))), young}
    clock.now += GRACE + 1
    sweep(store, "a", clock.now, GRACE, set())
    assert {key[1]: note.place.number for key, note in read_notes(store).newest.items()} == {"emma": 3, "moby": 9}
    assert len(names(store)) == 2


def test_sweep_does_not_touch_objects_of_other_services(store, clock):
    retained = {service: keep(store, Attempt(service, f"{service}-1", "1f")) for service in ("a", "a-b")}
    for number in range(3):
        for service in retained:
            put_note(store, service, "moby", number)
    clock.now += GRACE + 1
    for service, other in (("a", "a-b"), ("a-b", "a")):
        before = {name for name in names(store) if name.startswith(f"services/{other}/")}
        assert sweep(store, service, clock.now, GRACE, set()).num_objects == len(retained[service]) + 2
        assert {name for name in names(store) if name.startswith(f"services/{other}/")} == before
    assert len(names(store)) == 2
    for service in ("", "..", "a/../b", "A"):
        with pytest.raises(InvalidArgument):
            sweep(store, service, clock.now, GRACE, set())


@pytest.mark.parametrize("num_before", range(4))
def test_interrupted_sweep_leaves_no_manifest_without_pieces(store, files, clock, num_before):
    num_objects = len(keep(store, Attempt("a", "a-1", "1f"), num_pieces=3))
    clock.now += GRACE + 1
    with pytest.raises(StorageUnavailable):
        sweep(Store(FailingFiles(files.files, num_before), "fake://x"), "a", clock.now, GRACE, set())
    assert len(names(store)) == num_objects - num_before
    assert len(dict(read_manifests(store))) == (num_before == 0)


class FailingFiles(FlakyFiles):
    """Files that fail after a number of removals."""

    def __init__(self, files: MemoryFiles, num_before: int) -> None:
        super().__init__(files)
        self._num_left = num_before

    def remove(self, name: str) -> None:
        if not self._num_left:
            raise OSError("away")
        self._num_left -= 1
        super().remove(name)


def test_manifests_include_their_windows():
    attempt = Attempt("a", "a-1", "1f")
    manifest = manifest_of(attempt)
    windows = replace(manifest.pieces[-1], name=attempt.windows(0))
    assert [*replace(manifest, windows=windows).objects] == [*manifest.objects, attempt.windows(0)]
