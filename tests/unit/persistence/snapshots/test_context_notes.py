"""Notes of contexts: the changes that create them, and their numbers."""

from array import array

from msgspec.structs import replace

from coordinator.persistence.catalog.records import CatalogContents, Change, OutboxEntry
from coordinator.persistence.snapshots.context_notes import ContextNotes
from longleaf.storage.context_note import ContextNote, decode_note
from longleaf.storage.context_record import ContextRecord
from longleaf.storage.names import place_of_note
from longleaf.storage.segment_record import SegmentRecord

SERVICE = "0" * 32
BOOK = ContextRecord(id="book", segment=3, num_tokens=10, ends=(10,), capacity=99, created=1, updated=1, last_used=1)


def catalog(*contexts: ContextRecord, next_outgoing: int = 0) -> CatalogContents:
    segment = SegmentRecord(id=3, token_ids=array("I", range(10)))
    return CatalogContents(service_id=SERVICE, contexts=contexts, segments=(segment,), next_outgoing=next_outgoing)


def notes_from(outgoing: tuple[OutboxEntry, ...]) -> list[ContextNote]:
    found = list[ContextNote]()
    for one in outgoing:
        place = place_of_note(one.name)
        assert place is not None
        assert one.content is not None
        found.append(decode_note(one.content, place))
    return found


def test_change_creates_a_note_and_use_creates_none() -> None:
    notes = ContextNotes(catalog(BOOK))
    assert notes.notes_for(Change(contexts=(replace(BOOK, last_used=9.0, num_hits=4),))) == ()
    (note,) = notes_from(notes.notes_for(Change(contexts=(replace(BOOK, display_name="a book"),))))
    assert note.record == replace(BOOK, display_name="a book")


def test_note_numbers_grow_and_continue_in_the_next_service() -> None:
    notes = ContextNotes(catalog(next_outgoing=5))
    numbers = list[int]()
    for turn in range(4):
        change = Change(contexts=(replace(BOOK, updated=turn),))
        change = replace(change, outgoing=notes.notes_for(change))
        numbers += [note.place.number for note in notes_from(change.outgoing)]
        if turn != 1:  # that one cannot be kept
            notes.record_change(change)
    assert numbers == [5, 6, 6, 7]
    assert notes_from(ContextNotes(catalog(next_outgoing=8)).notes_for(Change(contexts=(BOOK,))))[0].place.number == 8


def test_deletion_note_requires_a_previous_note() -> None:
    notes = ContextNotes(catalog(BOOK))
    (note,) = notes_from(notes.notes_for(Change(dropped_contexts=("book", "never"))))
    assert note.record is None
    notes.record_change(Change(dropped_contexts=("book",)))
    assert notes.notes_for(Change(dropped_contexts=("book",))) == ()
    assert notes.again(set()) == ()


def test_missing_notes_are_rewritten_with_the_current_state() -> None:
    notes = ContextNotes(catalog(BOOK))
    notes.record_change(Change(contexts=(replace(BOOK, display_name="new"),)))
    assert [note.record for note in notes_from(notes.again(set()))] == [replace(BOOK, display_name="new")]
    assert notes.again({"book"}) == ()
