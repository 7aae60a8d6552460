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
class Place:
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
        for note in sorted(self.notes, key=lambda note: note.number):
            newest[note.service, note.context] = note
        pieces = [piece for manifest in self.manifests.values() for piece in manifest.pieces]
        entries = {piece.name: ObjectInfo(piece.name, PIECE_BYTES - (piece.name in self.cut), 0.0) for piece in pieces}
        named = [note.place.name for note in self.notes] + [place.name for place in self.damaged_notes]
        for name in (*self.manifests, *self.damaged, *self.others, *named, *self.further):
            entries[name] = ObjectInfo(name, 10, self.modified.get(name, 0.0))
        return StorageContents(
            notes=NoteListing(newest, [DataLoss(place.name, "its checksum is wrong") for place in self.damaged_notes]),
            manifests=self.manifests,
            damaged={name: DataLoss(name, "its checksum is wrong") for name in self.damaged},
            others=self.others,
            entries={name: entry for name, entry in entries.items() if name not in self.missing},
        )

    def rebuilt(self) -> Rebuilt:
        return rebuild(self.stored, SERVICE)


@pytest.fixture(name="place")
def whole_place() -> Place:
    """A book, a twig that branches off it, and a poem."""
    place = Place([note_of(record, number) for number, record in enumerate((BOOK, TWIG, POEM), 1)])
    for record in (ROOT, LEAF, ALONE):
        place.put(manifest_of(record))
    return place


def names(rebuilt: Rebuilt) -> list[str]:
    return [each.id for each in rebuilt.kept.contexts]


def reasons(rebuilt: Rebuilt) -> dict[str, str]:
    return {each.name: each.reason for each in rebuilt.left_out}


def with_last_use(contexts: Iterable[object]) -> list[object]:
    return [replace(each, last_used=each.updated) for each in contexts]  # type: ignore[attr-defined]


def test_contexts_segments_and_numbers_are_as_they_were(place: Place) -> None:
    rebuilt = place.rebuilt()
    assert rebuilt.kept.contexts == tuple(with_last_use([BOOK, POEM, TWIG]))
    assert rebuilt.kept.segments == (ROOT, LEAF, ALONE)
    assert [rebuilt.kept.path(each) for each in rebuilt.kept.contexts] == [(ROOT,), (ALONE,), (ROOT, LEAF)]
    assert rebuilt.kept.snapshots[0] == SnapshotRecord(
        segment=3, manifest=manifest_name(manifest_of(ROOT)), form="float32", num_bytes=2 * PIECE_BYTES
    )
    assert [each.segment for each in rebuilt.kept.snapshots] == [3, 5, 9]
    assert (rebuilt.kept.service_id, rebuilt.kept.next_segment, rebuilt.next_outgoing) == (SERVICE, 10, 4)
    assert (rebuilt.left_out, rebuilt.num_others) == ([], 0)


def test_settings_come_back(place: Place) -> None:
    book = replace(BOOK, display_name="a book — 白鯨", is_pinned=True, expires=77.5, capacity=4_000)
    place.notes.append(note_of(book, 8))
    assert place.rebuilt().kept.contexts[0] == replace(book, last_used=book.updated)


def test_what_was_deleted_stays_deleted_and_counts_on(place: Place) -> None:
    place.notes += [deletion("book", 11), deletion("poem", 12)]
    rebuilt = place.rebuilt()
    assert names(rebuilt) == ["twig"]
    assert [each.id for each in rebuilt.kept.segments] == [3, 5]
    assert not rebuilt.left_out
    assert (rebuilt.next_outgoing, rebuilt.kept.next_segment) == (13, 10)


def test_a_damaged_newest_note_is_told_and_counts(place: Place) -> None:
    place.notes = [note for note in place.notes if note.context != "poem"]
    place.damaged_notes.append(NotePlace(SERVICE, "poem", 20))
    place.damaged_notes.append(NotePlace(OTHER, "else", 99))
    rebuilt = place.rebuilt()
    assert names(rebuilt) == ["book", "twig"]
    assert list(reasons(rebuilt)) == ["poem"]
    assert "checksum" in reasons(rebuilt)["poem"]
    assert rebuilt.next_outgoing == 21


def test_a_segment_that_is_missing_leaves_out_all_that_go_through_it(place: Place) -> None:
    del place.manifests[manifest_name(manifest_of(ROOT))]
    rebuilt = place.rebuilt()
    assert names(rebuilt) == ["poem"]
    assert reasons(rebuilt) == dict.fromkeys(["book", "twig"], f"{name_of(3)}: storage has no manifest of it")
    assert [each.id for each in rebuilt.kept.segments] == [9]


def test_a_damaged_manifest_leaves_out_what_needs_it(place: Place) -> None:
    name = manifest_name(manifest_of(LEAF))
    del place.manifests[name]
    place.damaged.append(name)
    rebuilt = place.rebuilt()
    assert names(rebuilt) == ["book", "poem"]
    assert "its checksum is wrong" in reasons(rebuilt)["twig"]


@pytest.mark.parametrize("fault", ["missing", "cut"])
def test_a_manifest_whose_pieces_are_not_there_is_none(place: Place, fault: str) -> None:
    piece = manifest_of(ALONE).pieces[1].name
    getattr(place, fault).add(piece)
    rebuilt = place.rebuilt()
    assert names(rebuilt) == ["book", "twig"]
    message = "is missing" if fault == "missing" else "has 39 bytes, expected 40"
    assert reasons(rebuilt) == {"poem": f"{name_of(9)}: {piece} {message}"}


def test_any_whole_attempt_will_do_and_the_newest_is_taken(place: Place) -> None:
    second, third = manifest_of(ALONE, attempt="2"), manifest_of(ALONE, attempt="3")
    place.put(second, "2", modified=50.0)
    place.put(third, "3", modified=90.0)
    place.damaged.append(manifest_name(manifest_of(ALONE), "4"))
    assert place.rebuilt().kept.snapshots[2].manifest == manifest_name(third, "3")
    place.missing.add(third.pieces[0].name)
    rebuilt = place.rebuilt()
    assert rebuilt.kept.snapshots[2].manifest == manifest_name(second, "2")
    assert not rebuilt.left_out


def test_what_another_checkpoint_has_read_is_left_out_and_counted(place: Place) -> None:
    place.others.append(place.put(manifest_of(ALONE)))
    place.others.append(manifest_name(manifest_of(ALONE, OTHER)))
    del place.manifests[place.others[0]]
    rebuilt = place.rebuilt()
    assert rebuilt.num_others == 1
    assert reasons(rebuilt) == {"poem": f"{name_of(9)}: it was read by another checkpoint"}


def test_other_services_are_left_alone(place: Place) -> None:
    place.notes.append(note_of(context("book", 1, 5), 70, OTHER))
    place.put(manifest_of(segment(1, 5), OTHER))
    rebuilt = place.rebuilt()
    assert names(rebuilt) == ["book", "poem", "twig"]
    assert (rebuilt.kept.segments, rebuilt.next_outgoing) == ((ROOT, LEAF, ALONE), 4)


def test_numbers_of_pieces_without_a_manifest_are_not_given_out_again(place: Place) -> None:
    place.further.append(manifest_of(segment(41, 5)).pieces[0].name)
    place.further.append(manifest_of(segment(80, 5), OTHER).pieces[0].name)
    assert place.rebuilt().kept.next_segment == 42


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
def test_notes_that_make_no_sense_are_told(place: Place, record, message: str) -> None:
    place.notes.append(note_of(record, 30))
    rebuilt = place.rebuilt()
    assert names(rebuilt) == ["book", "poem"]
    assert message in reasons(rebuilt)["twig"]


def test_a_note_without_a_segment_and_a_path_of_two_ropes_are_told(place: Place) -> None:
    place.notes.append(replace(note_of(POEM, 30), segment=None))
    place.put(manifest_of(replace(LEAF, rope=Rope(4096, True))))
    place.notes.append(replace(note_of(BOOK, 31), segment="of-another-name"))
    assert set(reasons(place.rebuilt())) == {"poem", "twig", "book"}


def test_the_only_service_is_taken_and_one_of_several_must_be_named(place: Place) -> None:
    assert choose_service(place.stored, None) == choose_service(place.stored, SERVICE) == SERVICE
    with pytest.raises(InvalidArgument, match=rf"--service: give the id of a service .* {SERVICE} \(3 contexts\)"):
        choose_service(place.stored, OTHER)
    place.put(manifest_of(segment(1, 5), OTHER))
    assert choose_service(place.stored, None) == SERVICE  # the other one has no notes
    place.notes.append(note_of(context("book", 1, 5), 70, OTHER))
    with pytest.raises(
        InvalidArgument, match=rf"--service: .* {SERVICE} \(3 contexts\), {OTHER} \(1 context\)"
    ) as reported:
        choose_service(place.stored, None)
    assert reported.value.field == "--service"
    assert choose_service(place.stored, OTHER) == OTHER
    with pytest.raises(InvalidArgument, match="no contexts of this checkpoint"):
        choose_service(Place().stored, None)
    assert manifest_of(ROOT).fingerprint == CHECKPOINT
