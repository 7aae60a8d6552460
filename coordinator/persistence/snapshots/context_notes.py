"""Notes of contexts: each change creates one, and they are written to storage in the order of the changes."""

from collections.abc import Iterable
from collections.abc import Set as AnySet

from msgspec.structs import replace

from coordinator.persistence.catalog.records import CatalogContents, Change, OutboxEntry
from longleaf.storage.context_note import ContextNote, encode_note
from longleaf.storage.context_record import ContextRecord
from longleaf.storage.names import NotePlace


class ContextNotes:
    """Notes of a catalog's contexts that are on storage or in the outbox.

    Changes are sequential: the notes of a change are created after the previous change was stored or failed.
    """

    def __init__(self, contents: CatalogContents) -> None:
        self._service = contents.service_id
        self._next_number = contents.next_outgoing
        """A stored change moves its notes to the outbox, where they count. A failed change must not count: otherwise
        the numbers of the next service would start below those already used."""
        self._written = {context.id: _of_note(context) for context in contents.contexts}
        """The notes as last written."""

    def notes_for(self, change: Change) -> tuple[OutboxEntry, ...]:
        """The notes of a change that is to be stored. A change that only records uses has none."""
        dropped = [(name, None) for name in change.dropped_contexts if name in self._written]
        changed = [(one.id, one) for one in change.contexts if self._written.get(one.id) != _of_note(one)]
        return self._numbered([*dropped, *changed])

    def again(self, recorded: AnySet[str]) -> tuple[OutboxEntry, ...]:
        """Notes of all contexts except those with a note on storage."""
        return self._numbered(one for one in self._written.items() if one[0] not in recorded)

    def record_change(self, change: Change) -> None:
        """Records a stored change with its notes."""
        self._next_number += len(change.outgoing)
        for name in change.dropped_contexts:
            self._written.pop(name, None)
        self._written |= {one.id: _of_note(one) for one in change.contexts}

    def _numbered(self, notes: Iterable[tuple[str, ContextRecord | None]]) -> tuple[OutboxEntry, ...]:
        return tuple(self._note(number, *note) for number, note in enumerate(notes, self._next_number))

    def _note(self, number: int, context_id: str, record: ContextRecord | None) -> OutboxEntry:
        place = NotePlace(self._service, context_id, number)
        return OutboxEntry(place.name, encode_note(ContextNote(place, record)))


def _of_note(record: ContextRecord) -> ContextRecord:
    """The part of a record that its note contains."""
    return replace(record, last_used=0.0, num_hits=0, upload_id="")
