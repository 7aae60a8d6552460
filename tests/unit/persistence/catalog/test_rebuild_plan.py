"""Rebuilt catalogs: the contexts that are restored from records and manifests, and the reasons for the omissions."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from coordinator.persistence.catalog.rebuild_plan import Rebuilt, StorageContents, choose_service, rebuild
from coordinator.persistence.catalog.records import SnapshotRecord
from longleaf.errors import DataLoss, InvalidArgument
from longleaf.positions import Rope
from longleaf.storage.context_note import ContextNote
from longleaf.storage.files import ObjectInfo
from longleaf.storage.inventory import NoteListing
from longleaf.storage.manifest import SegmentManifest
from longleaf.storage.names import NotePlace
from tests.support.catalog import context, segment
from tests.support.stored_contexts import (
    CHECKPOINT,
    PIECE_BYTES,
    SERVICE,
    deletion,
    manifest_name,
    manifest_of,
    name_of,
    note_of,
)

OTHER = "aa" * 16
ROOT, LEAF, ALONE = segment(3, 30), segment(5, 20, parent=3, start=25), segment(9, 10)
BOOK, TWIG, POEM = context("book", 3, 30), context("twig", 5, 40, ends=(25, 40)), context("poem", 9, 10)


@dataclass
class StorageBuilder:
    """The content of a storage, created by the test."""

    notes: list[ContextNote] = field(default_factory=list)
    damaged_notes: list[NotePlace] = field(default_factory=list)
    manifests: dict[str, SegmentManifest] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    modified: dict[str, float] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    further: list[str] = field(default_factory=list)

    def put(self, manifest: SegmentManifest, attempt: str = "1", modified: float = 0.0) -> str:
        name = manifest_name(manifest, attempt)
        self.manifests[name], self.modified[name] = manifest, modified
        return name

    @property
    def stored(self) -> StorageContents:
        newest = dict[tuple[str, str], ContextNote]()
        for note in sorted(self.notes, key=lambda note: note.place.number):
            newest[note.place.service, note.place.context] = note
        pieces = [piece for manifest in self.manifests.values() for piece in manifest.pieces]
        entries = {piece.name: ObjectInfo(piece.name, PIECE_BYTES - (piece.name in self.cut), 0.0) for piece in pieces}
        named = [note.place.name for note in self.notes] + [damaged.name for damaged in self.damaged_notes]
        for name in (*self.manifests, *self.damaged, *self.others, *named, *self.further):
            entries[name] = ObjectInfo(name, 10, self.modified.get(name, 0.0))
        return StorageContents(
            notes=NoteListing(
                newest, [DataLoss(storage.name, "its checksum is wrong") for storage in self.damaged_notes]
            ),
            manifests=self.manifests,
            damaged={name: DataLoss(name, "its checksum is wrong") for name in self.damaged},
            others=self.others,
            entries={name: entry for name, entry in entries.items() if name not in self.missing},
        )

    def rebuilt(self) -> Rebuilt:
        return rebuild(self.stored, SERVICE)


@pytest.fixture(name="storage")
def full_storage() -> StorageBuilder:
    """A storage with a book, a fork of it, and a poem."""
    storage = StorageBuilder([note_of(record, number) for number, record in enumerate((BOOK, TWIG, POEM), 1)])
    for record in (ROOT, LEAF, ALONE):
        storage.put(manifest_of(record))
    return storage


def names(rebuilt: Rebuilt) -> list[str]:
    return [each.id for each in rebuilt.contents.contexts]


def reasons(rebuilt: Rebuilt) -> dict[str, str]:
    return {each.name: each.reason for each in rebuilt.skipped}


def with_last_use(contexts: Iterable[object]) -> list[object]:
    return [replace(each, last_used=each.updated) for each in contexts]  # type: ignore[attr-defined]


def test_contexts_segments_and_numbers_are_restored(storage: StorageBuilder) -> None:
    rebuilt = storage.rebuilt()
    assert rebuilt.contents.contexts == tuple(with_last_use([BOOK, POEM, TWIG]))
    assert rebuilt.contents.segments == (ROOT, LEAF, ALONE)
    assert [rebuilt.contents.path(each) for each in rebuilt.contents.contexts] == [(ROOT,), (ALONE,), (ROOT, LEAF)]
    assert rebuilt.contents.snapshots[0] == SnapshotRecord(
        segment=3, manifest=manifest_name(manifest_of(ROOT)), form="float32", num_bytes=2 * PIECE_BYTES
    )
    assert [each.segment for each in rebuilt.contents.snapshots] == [3, 5, 9]
    assert (rebuilt.contents.service_id, rebuilt.contents.next_segment, rebuilt.contents.next_outgoing) == (
        SERVICE,
        10,
        4,
    )
    assert (rebuilt.skipped, rebuilt.num_others) == ([], 0)


def test_settings_are_restored(storage: StorageBuilder) -> None:
    book = replace(BOOK, display_name="a book — 白鯨", is_pinned=True, expires=77.5, capacity=4_000)
    storage.notes.append(note_of(book, 8))
    assert storage.rebuilt().contents.contexts[0] == replace(book, last_used=book.updated)


def test_deleted_context_stays_deleted_and_numbers_continue(storage: StorageBuilder) -> None:
    storage.notes += [deletion("book", 11), deletion("poem", 12)]
    rebuilt = storage.rebuilt()
    assert names(rebuilt) == ["twig"]
    assert [each.id for each in rebuilt.contents.segments] == [3, 5]
    assert not rebuilt.skipped
    assert (rebuilt.contents.next_outgoing, rebuilt.contents.next_segment) == (13, 10)


def test_damaged_newest_note_is_reported_and_counted(storage: StorageBuilder) -> None:
    storage.notes = [note for note in storage.notes if note.place.context != "poem"]
    storage.damaged_notes.append(NotePlace(SERVICE, "poem", 20))
    storage.damaged_notes.append(NotePlace(OTHER, "else", 99))
    rebuilt = storage.rebuilt()
    assert names(rebuilt) == ["book", "twig"]
    assert list(reasons(rebuilt)) == ["poem"]
    assert "checksum" in reasons(rebuilt)["poem"]
    assert rebuilt.contents.next_outgoing == 21


def test_missing_segment_skips_all_its_contexts(storage: StorageBuilder) -> None:
    del storage.manifests[manifest_name(manifest_of(ROOT))]
    rebuilt = storage.rebuilt()
    assert names(rebuilt) == ["poem"]
    assert reasons(rebuilt) == dict.fromkeys(["book", "twig"], f"{name_of(3)}: storage has no manifest of it")
    assert [each.id for each in rebuilt.contents.segments] == [9]


def test_damaged_manifest_skips_its_contexts(storage: StorageBuilder) -> None:
    name = manifest_name(manifest_of(LEAF))
    del storage.manifests[name]
    storage.damaged.append(name)
    rebuilt = storage.rebuilt()
    assert names(rebuilt) == ["book", "poem"]
    assert "its checksum is wrong" in reasons(rebuilt)["twig"]


@pytest.mark.parametrize("fault", ["missing", "cut"])
def test_manifest_without_its_pieces_is_ignored(storage: StorageBuilder, fault: str) -> None:
    piece = manifest_of(ALONE).pieces[1].name
    getattr(storage, fault).add(piece)
    rebuilt = storage.rebuilt()
    assert names(rebuilt) == ["book", "twig"]
    message = "is missing" if fault == "missing" else "has 39 bytes, expected 40"
    assert reasons(rebuilt) == {"poem": f"{name_of(9)}: {piece} {message}"}


def test_newest_complete_attempt_is_used(storage: StorageBuilder) -> None:
    second, third = manifest_of(ALONE, attempt="2"), manifest_of(ALONE, attempt="3")
    storage.put(second, "2", modified=50.0)
    storage.put(third, "3", modified=90.0)
    storage.damaged.append(manifest_name(manifest_of(ALONE), "4"))
    assert storage.rebuilt().contents.snapshots[2].manifest == manifest_name(third, "3")
    storage.missing.add(third.pieces[0].name)
    rebuilt = storage.rebuilt()
    assert rebuilt.contents.snapshots[2].manifest == manifest_name(second, "2")
    assert not rebuilt.skipped


def test_contexts_of_another_checkpoint_are_skipped_and_counted(storage: StorageBuilder) -> None:
    storage.others.append(storage.put(manifest_of(ALONE)))
    storage.others.append(manifest_name(manifest_of(ALONE, OTHER)))
    del storage.manifests[storage.others[0]]
    rebuilt = storage.rebuilt()
    assert rebuilt.num_others == 1
    assert reasons(rebuilt) == {"poem": f"{name_of(9)}: it was read by another checkpoint"}


def test_other_services_are_ignored(storage: StorageBuilder) -> None:
    storage.notes.append(note_of(context("book", 1, 5), 70, OTHER))
    storage.put(manifest_of(segment(1, 5), OTHER))
    rebuilt = storage.rebuilt()
    assert names(rebuilt) == ["book", "poem", "twig"]
    assert (rebuilt.contents.segments, rebuilt.contents.next_outgoing) == ((ROOT, LEAF, ALONE), 4)


def test_numbers_of_pieces_without_a_manifest_are_not_reused(storage: StorageBuilder) -> None:
    storage.further.append(manifest_of(segment(41, 5)).pieces[0].name)
    storage.further.append(manifest_of(segment(80, 5), OTHER).pieces[0].name)
    assert storage.rebuilt().contents.next_segment == 42


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (replace(TWIG, num_tokens=46, ends=(46,)), "is not the predecessor in its path"),
        (replace(TWIG, num_tokens=25, ends=(25,)), "is not the predecessor in its path"),
        (replace(TWIG, ends=(40, 40)), "is inconsistent"),
        (replace(TWIG, ends=(25, 39)), "is inconsistent"),
        (replace(TWIG, ends=(0, 40)), "is inconsistent"),
        (replace(TWIG, capacity=39), "is inconsistent"),
    ],
)
def test_invalid_notes_are_reported(storage: StorageBuilder, record, message: str) -> None:
    storage.notes.append(note_of(record, 30))
    rebuilt = storage.rebuilt()
    assert names(rebuilt) == ["book", "poem"]
    assert message in reasons(rebuilt)["twig"]


def test_path_of_two_ropes_is_reported(storage: StorageBuilder) -> None:
    storage.put(manifest_of(replace(LEAF, rope=Rope(4096, True))))
    assert set(reasons(storage.rebuilt())) == {"twig"}


def test_only_service_is_selected_and_several_must_be_named(storage: StorageBuilder) -> None:
    assert choose_service(storage.stored, None) == choose_service(storage.stored, SERVICE) == SERVICE
    with pytest.raises(InvalidArgument, match=rf"--service: give the id of a service .* {SERVICE} \(3 contexts\)"):
        choose_service(storage.stored, OTHER)
    storage.put(manifest_of(segment(1, 5), OTHER))
    assert choose_service(storage.stored, None) == SERVICE  # the other one has no notes
    storage.notes.append(note_of(context("book", 1, 5), 70, OTHER))
    with pytest.raises(
        InvalidArgument, match=rf"--service: .* {SERVICE} \(3 contexts\), {OTHER} \(1 context\)"
    ) as raised:
        choose_service(storage.stored, None)
    assert raised.value.field == "--service"
    assert choose_service(storage.stored, OTHER) == OTHER
    with pytest.raises(InvalidArgument, match="no contexts of this checkpoint"):
        choose_service(StorageBuilder().stored, None)
    assert manifest_of(ROOT).fingerprint == CHECKPOINT
