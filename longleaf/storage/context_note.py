"""A note: what one change made of a context. The newest one of a context is what it is."""

from itertools import pairwise

import msgspec

from longleaf.errors import DataLoss
from longleaf.storage.envelope import seal, unseal
from longleaf.storage.names import NotePlace

KIND = b"note"
VERSION = 1


class ContextNote(msgspec.Struct, frozen=True, kw_only=True):
    """A context after a change. Times in seconds since the epoch."""

    service: str
    """Id of the service that keeps it."""
    context: str
    """Id of the context."""
    number: int
    """Grows with each change of any context of the service."""
    is_deleted: bool = False
    """Nothing else is told then. It stays, so that nobody takes an older note for the context."""
    segment: str | None = None
    """The last one of its path; the manifests tell those before."""
    num_tokens: int = 0
    """Of the whole path, whose last segment may hold more."""
    ends: tuple[int, ...] = ()
    """From where it can be continued if every rank holds the windows: the last one is its own end."""
    capacity: int = 0
    """Positions that its rope was chosen for."""
    created: float = 0.0
    updated: float = 0.0
    display_name: str = ""
    is_pinned: bool = False
    expires: float | None = None

    @property
    def place(self) -> NotePlace:
        return NotePlace(self.service, self.context, self.number)


MAX_ENDS = 64
"""Ends that may be named of a context; services name 4."""


def sound_ends(ends: tuple[int, ...], num_tokens: int) -> tuple[int, ...] | None:
    """The ends of a context of so many tokens: where none are named, its own. None unless they rise up to its own, or
    where there are too many."""
    ends = ends[: MAX_ENDS + 1] or (num_tokens,)
    is_rising = all(a < b for a, b in pairwise((0, *ends)))
    return ends if is_rising and ends[-1] == num_tokens and len(ends) <= MAX_ENDS else None


def encode_note(note: ContextNote) -> bytes:
    return seal(KIND, VERSION, msgspec.msgpack.encode(note))


def decode_note(data: bytes, place: NotePlace) -> ContextNote:
    """The note that is kept at `place`. Raises DataLoss where it is damaged, of another place, or a later version."""
    content = unseal(data, KIND, VERSION, place.name)
    try:
        note = msgspec.msgpack.decode(content, type=ContextNote)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataLoss(place.name, f"it makes no sense: {error}") from error
    if note.place != place:
        raise DataLoss(place.name, f"it was written as {note.place.name}")
    return note
