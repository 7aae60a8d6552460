"""Notes of contexts: which changes make one, and how they are numbered."""

from array import array

from msgspec.structs import replace

from coordinator.persistence.catalog.records import CatalogContents, Change, ContextRecord, OutboxEntry, SegmentRecord
from coordinator.persistence.snapshots.context_notes import ContextNotes
from longleaf.storage.context_note import ContextNote, decode_note
from longleaf.storage.names import place_of_note

SERVICE = "0" * 32
BOOK = ContextRecord(id="book", segment=3, num_tokens=10, ends=(10,), capacity=99, created=1, updated=1, last_used=1)


def kept(*contexts: ContextRecord, next_outgoing: int = 0) -> CatalogContents:
    segment = SegmentRecord(id=3, token_ids=array("I", range(10)))
    return CatalogContents(service_id=SERVICE, contexts=contexts, segments=(segment,), next_outgoing=next_outgoing)


def told(outgoing: tuple[OutboxEntry, ...]) -> list[ContextNote]:
    found = list[ContextNote]()
    for one in outgoing:
        place = place_of_note(one.name)
        assert place is not None
        assert one.content is not None
        found.append(decode_note(one.content, place))
    return found


def test_a_change_makes_a_note_and_a_use_makes_none() -> None:
    notes = ContextNotes(kept(BOOK))
    assert notes.of(Change(contexts=(replace(BOOK, last_used=9.0, num_hits=4),))) == ()
    (note,) = told(notes.of(Change(contexts=(replace(BOOK, display_name="a book"),))))
    assert (note.display_name, note.segment, note.num_tokens) == ("a book", f"{SERVICE}-3", 10)


def test_numbers_grow_with_what_is_kept_and_go_on_in_the_next_service() -> None:
    notes = ContextNotes(kept(next_outgoing=5))
    numbers = list[int]()
    for turn in range(4):
        change = Change(contexts=(replace(BOOK, updated=turn),))
        change = replace(change, outgoing=notes.of(change))
        numbers += [note.number for note in told(change.outgoing)]
        if turn != 1:  # that one cannot be kept
            notes.note(change)
    assert numbers == [5, 6, 6, 7]
    assert told(ContextNotes(kept(next_outgoing=8)).of(Change(contexts=(BOOK,))))[0].number == 8


def test_what_is_dropped_is_told_if_it_was_ever_told() -> None:
    notes = ContextNotes(kept(BOOK))
    (note,) = told(notes.of(Change(dropped_contexts=("book", "never"))))
    assert note.is_deleted
    notes.note(Change(dropped_contexts=("book",)))
    assert notes.of(Change(dropped_contexts=("book",))) == ()
    assert notes.again(set()) == ()


def test_what_storage_lacks_is_told_again_as_it_is_now() -> None:
    notes = ContextNotes(kept(BOOK))
    notes.note(Change(contexts=(replace(BOOK, display_name="new"),)))
    assert [note.display_name for note in told(notes.again(set()))] == ["new"]
    assert notes.again({"book"}) == ()
