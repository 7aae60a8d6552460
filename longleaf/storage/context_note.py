"""Notes: the state of a context after a change. The newest note of a context is its current state."""

import msgspec

from longleaf.errors import DataLoss
from longleaf.storage.context_metadata import ContextMetadata, metadata_fields
from longleaf.storage.envelope import unwrap, wrap
from longleaf.storage.names import NotePlace

KIND = b"note"
VERSION = 1


class ContextNote(ContextMetadata, frozen=True):
    """A context after a change."""

    service: str
    """Id of the service that wrote it."""
    context: str
    """Id of the context."""
    number: int
    """Increases with each change of any context of the service."""
    is_deleted: bool = False
    """The metadata is then empty. The note is kept, so that no older one is used."""
    segment: str | None = None
    """The last segment of its path; the manifests contain the earlier ones."""

    @classmethod
    def of_deletion(cls, service: str, context: str, number: int) -> "ContextNote":
        """The note of a deleted context."""
        empty = ContextMetadata(num_tokens=0, ends=(), capacity=0, created=0.0, updated=0.0)
        return cls(service, context, number, is_deleted=True, **metadata_fields(empty))

    @property
    def place(self) -> NotePlace:
        return NotePlace(self.service, self.context, self.number)


def encode_note(note: ContextNote) -> bytes:
    return wrap(KIND, VERSION, msgspec.msgpack.encode(note))


def decode_note(data: bytes, place: NotePlace) -> ContextNote:
    """The note stored at `place`. Raises DataLoss if it is damaged, belongs to another place, or has a later
    version."""
    content = unwrap(data, KIND, VERSION, place.name)
    try:
        note = msgspec.msgpack.decode(content, type=ContextNote)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataLoss(place.name, f"it is invalid: {error}") from error
    if note.place != place:
        raise DataLoss(place.name, f"it was written as {note.place.name}")
    return note
