"""Garbage collection: deletes unreferenced objects of a service."""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AnySet
from itertools import pairwise

import msgspec

from longleaf.errors import InvalidArgument
from longleaf.storage.files import PART, ObjectInfo
from longleaf.storage.names import (
    NotePlace,
    attempt_of_manifest,
    is_id,
    notes_folder,
    place_of_note,
    segments_folder,
)
from longleaf.storage.store import Store


class GcReport(msgspec.Struct, frozen=True):
    """The deleted objects."""

    num_objects: int
    num_bytes: int


def sweep(store: Store, service: str, now: float, grace: float, live: AnySet[str]) -> GcReport:
    """Deletes objects of `service` that were written more than `grace` seconds before `now` and are not in `live`.

    `live` has the names of all valid manifests and of all objects that they reference. The newest note of each context
    is kept; older ones are kept for `grace` seconds, because a concurrent listing may still read them. Objects of other
    services are never deleted.

    `grace` must exceed the duration of any write plus the clock difference between storage and caller. Raises
    StorageUnavailable; objects deleted before the failure stay deleted.
    """
    if not is_id(service):
        raise InvalidArgument("service", f"{service!r} is not the id of a service")
    cutoff = now - grace
    unreferenced = [entry for entry in store.list(segments_folder(service)) if entry.name not in live]
    notes = list(store.list(notes_folder(service)))
    unfinished = [entry for entry in notes if entry.name.endswith(PART)]
    found = [entry for entry in (*unreferenced, *unfinished) if entry.modified < cutoff]
    found += _superseded(notes, cutoff)
    # Manifests first: a piece without manifest is ignored, but a manifest without pieces would be trusted.
    found.sort(key=lambda entry: attempt_of_manifest(entry.name) is None)
    store.delete(entry.name for entry in found)
    return GcReport(len(found), sum(entry.num_bytes for entry in found))


def _superseded(notes: Sequence[ObjectInfo], cutoff: float) -> Iterator[ObjectInfo]:
    """Notes that were superseded before `cutoff` by another one of the same context."""
    found: list[tuple[NotePlace, ObjectInfo]] = []
    for entry in notes:
        place = place_of_note(entry.name)
        if place is not None:
            found.append((place, entry))
    for (place, entry), (after, successor) in pairwise(sorted(found, key=lambda note: note[0])):
        if place.context == after.context and successor.modified < cutoff:
            yield entry
