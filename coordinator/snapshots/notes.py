"""Notes of contexts: each change makes one, and they go to storage in the order of the changes."""

from collections.abc import Iterable
from itertools import count

from msgspec.structs import replace

from coordinator.catalog.records import Change, ContextRecord, Kept, Outgoing
from coordinator.snapshots.saver import segment_name
from longleaf.storage.note import ContextNote, encode_note


class Notes:
    """What storage is told, or about to be, of the contexts of a catalog."""

    def __init__(self, kept: Kept) -> None:
        self._service = kept.service_id
        self._numbers = count(kept.next_outgoing)  # each note is outgoing, so that no number comes twice
        self._told = {context.id: _of_note(context) for context in kept.contexts}
        """As they were told last."""

    def of(self, change: Change) -> tuple[Outgoing, ...]:
        """Those of a change that is to be kept. What only tells of uses makes none."""
        dropped = [self._deletion(name) for name in change.dropped_contexts if name in self._told]
        changed = [one for one in change.contexts if self._told.get(one.id) != _of_note(one)]
        return (*dropped, *map(self._note, changed))

    def again(self, contexts: Iterable[ContextRecord]) -> tuple[Outgoing, ...]:
        """Those of contexts of which storage has none."""
        return tuple(map(self._note, contexts))

    def note(self, change: Change) -> None:
        """A change is kept."""
        for name in change.dropped_contexts:
            self._told.pop(name, None)
        self._told |= {one.id: _of_note(one) for one in change.contexts}

    def _deletion(self, context: str) -> Outgoing:
        return _outgoing(
            ContextNote(service=self._service, context=context, number=next(self._numbers), is_deleted=True)
        )

    def _note(self, record: ContextRecord) -> Outgoing:
        return _outgoing(
            ContextNote(
                service=self._service,
                context=record.id,
                number=next(self._numbers),
                segment=segment_name(self._service, record.segment),
                num_tokens=record.num_tokens,
                ends=record.ends,
                capacity=record.capacity,
                created=record.created,
                updated=record.updated,
                display_name=record.display_name,
                is_pinned=record.is_pinned,
                expires=record.expires,
            )
        )


def _outgoing(note: ContextNote) -> Outgoing:
    return Outgoing(note.place.name, encode_note(note))


def _of_note(record: ContextRecord) -> ContextRecord:
    """What of a record notes tell."""
    return replace(record, last_used=0.0, num_hits=0, upload_id="")
