"""The sweep: what a service kept and nobody needs is deleted."""

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
    """What a sweep deleted."""

    num_objects: int
    num_bytes: int


def sweep(store: Store, service: str, now: float, grace: float, live: AnySet[str]) -> GcReport:
    """Deletes what `service` wrote more than `grace` seconds before `now` and is not in `live`.

    `live` are the names of all its manifests that count, and of all objects that these name. Of each context the newest
    note stays, and those before it until it is older than `grace`: who listed them may read them still. What others
    wrote is never touched.

    Nothing may take longer to be kept than `grace`, less what the clocks of storage and caller are apart. Raises
    StorageUnavailable; what was deleted then stays so.
    """
    if not is_id(service):
        raise InvalidArgument("service", f"{service!r} is not the id of a service")
    before = now - grace
    retained = [entry for entry in store.list(segments_folder(service)) if entry.name not in live]
    notes = list(store.list(notes_folder(service)))
    unfinished = [entry for entry in notes if entry.name.endswith(PART)]
    found = [entry for entry in (*retained, *unfinished) if entry.modified < before]
    found += _superseded(notes, before)
    # without its manifest a piece is nothing, but a manifest without its pieces would be believed
    found.sort(key=lambda entry: attempt_of_manifest(entry.name) is None)
    store.delete(entry.name for entry in found)
    return GcReport(len(found), sum(entry.num_bytes for entry in found))


def _superseded(notes: Sequence[ObjectInfo], before: float) -> Iterator[ObjectInfo]:
    """Notes after which another one of the same context came, before `before`."""
    found: list[tuple[NotePlace, ObjectInfo]] = []
    for entry in notes:
        place = place_of_note(entry.name)
        if place is not None:
            found.append((place, entry))
    for (place, entry), (after, successor) in pairwise(sorted(found, key=lambda note: note[0])):
        if place.context == after.context and successor.modified < before:
            yield entry
