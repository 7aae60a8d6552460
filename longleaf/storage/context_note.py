"""Notes: the state of a context after a change. The newest note of a context is its current state."""

from itertools import pairwise

import msgspec

from longleaf.errors import DataLoss
from longleaf.storage.envelope import unwrap, wrap
from longleaf.storage.names import NotePlace

KIND = b"note"
VERSION = 1


class ContextNote(msgspec.Struct, frozen=True, kw_only=True):
    """A context after a change. Times in seconds since the Unix epoch."""

    service: str
    """Id of the service that wrote it."""
    context: str
    """Id of the context."""
    number: int
    """Increases with each change of any context of the service."""
    is_deleted: bool = False
    """The other fields are then unset. The note is kept, so that no older one is used."""
    segment: str | None = None
    """The last segment of its path; the manifests contain the earlier ones."""
    num_tokens: int = 0
    """Tokens of the whole path; its last segment may have more."""
    ends: tuple[int, ...] = ()
    """Positions at which it can be continued if windows are replicated; the last one is the end of the context."""
    capacity: int = 0
    """Number of positions for which its rope was chosen."""
    created: float = 0.0
    updated: float = 0.0
    display_name: str = ""
    is_pinned: bool = False
    expires: float | None = None

    @property
    def place(self) -> NotePlace:
        return NotePlace(self.service, self.context, self.number)


MAX_ENDS = 64
"""Maximum number of ends per context; services write 4."""


def sound_ends(ends: tuple[int, ...], num_tokens: int) -> tuple[int, ...] | None:
    """The ends of a context of this length; by default its own end. None unless they increase up to its own end, or if
    there are too many."""
    ends = ends[: MAX_ENDS + 1] or (num_tokens,)
    is_rising = all(a < b for a, b in pairwise((0, *ends)))
    return ends if is_rising and ends[-1] == num_tokens and len(ends) <= MAX_ENDS else None


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
