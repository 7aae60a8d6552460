"""Stored forms of contexts have their own fields first, as the formats on storage have them."""

import msgspec

from longleaf.context_archive.records import ContextHead
from longleaf.storage.context_note import ContextNote, encode_note
from longleaf.storage.context_record import ContextMetadata, ContextRecord
from longleaf.storage.envelope import unwrap
from longleaf.storage.names import NotePlace

METADATA = ["num_tokens", "ends", "capacity", "created", "updated", "display_name", "is_pinned", "expires"]
PLACE = NotePlace("service", "moby", 1)
RECORD = ContextRecord(
    id="moby",
    segment=3,
    num_tokens=8,
    ends=(4, 8),
    capacity=9,
    created=1.5,
    updated=2.5,
    display_name="x",
    is_pinned=True,
    expires=3.5,
    last_used=4.5,
)


def test_order_of_stored_fields() -> None:
    assert list(ContextMetadata.__struct_fields__) == METADATA
    assert list(ContextHead.__struct_fields__) == ["fingerprint", "model", "context", *METADATA]


def stored(note: ContextNote) -> list[tuple[str, object]]:
    """The fields of a note in their order."""
    content = unwrap(encode_note(note), b"note", 1, note.place.name)
    return list(msgspec.msgpack.decode(content).items())


def test_note_has_the_metadata_of_its_record() -> None:
    own = [("service", "service"), ("context", "moby"), ("number", 1), ("is_deleted", False), ("segment", "service-3")]
    values: list[object] = [8, [4, 8], 9, 1.5, 2.5, "x", True, 3.5]
    assert stored(ContextNote(PLACE, RECORD)) == [*own, *zip(METADATA, values, strict=True)]


def test_note_of_a_deletion_has_no_metadata() -> None:
    own = [("service", "service"), ("context", "moby"), ("number", 1), ("is_deleted", True), ("segment", None)]
    values: list[object] = [0, [], 0, 0.0, 0.0, "", False, None]
    assert stored(ContextNote(PLACE, None)) == [*own, *zip(METADATA, values, strict=True)]
