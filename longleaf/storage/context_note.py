"""Notes: the state of a context after a change. The newest note of a context is its current state."""

from typing import NamedTuple

import msgspec

from longleaf.errors import DataLoss
from longleaf.storage.context_record import ContextMetadata, ContextRecord, metadata_fields
from longleaf.storage.envelope import unwrap, wrap
from longleaf.storage.names import NotePlace, segment_name, segment_number

KIND = b"note"
VERSION = 1
NO_METADATA = ContextMetadata(num_tokens=0, ends=(), capacity=0, created=0.0, updated=0.0)
"""The metadata in the note of a deletion."""


class ContextNote(NamedTuple):
    """A note and its name. It does not contain the uses of the context and its upload id."""

    place: NotePlace
    record: ContextRecord | None
    """None if the context was deleted. That note is kept, so that no older one is used."""


class _OwnFields(msgspec.Struct, frozen=True):
    """The stored fields before the metadata of the context."""

    service: str
    context: str
    number: int
    is_deleted: bool = False
    segment: str | None = None
    """The last segment of the path; the manifests contain the earlier ones. None in the note of a deletion."""


def encode_note(note: ContextNote) -> bytes:
    record, service = note.record, note.place.service
    own = _OwnFields(*note.place, record is None, record and segment_name(service, record.segment))
    stored = {**msgspec.structs.asdict(own), **metadata_fields(record or NO_METADATA)}
    return wrap(KIND, VERSION, msgspec.msgpack.encode(stored))


def decode_note(data: bytes, place: NotePlace) -> ContextNote:
    """The note stored at `place`; the context was last used when it was updated. Raises DataLoss if the note is
    damaged, belongs to another place, or has a later version."""
    content = unwrap(data, KIND, VERSION, place.name)
    try:
        own = msgspec.msgpack.decode(content, type=_OwnFields)
        metadata = msgspec.msgpack.decode(content, type=ContextMetadata)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataLoss(place.name, f"it is invalid: {error}") from error
    if (written := NotePlace(own.service, own.context, own.number)) != place:
        raise DataLoss(place.name, f"it was written as {written.name}")
    if own.is_deleted:
        return ContextNote(place, None)
    segment = segment_number(own.service, own.segment or "")
    if segment is None:
        raise DataLoss(place.name, f"its segment {own.segment} does not belong to the service")
    record = ContextRecord(id=own.context, segment=segment, last_used=metadata.updated, **metadata_fields(metadata))
    return ContextNote(place, record)
