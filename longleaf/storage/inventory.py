"""Listing of all objects on a storage, of all services."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from longleaf.errors import DataLoss, NotFound
from longleaf.storage.context_note import ContextNote, decode_note
from longleaf.storage.manifest import SegmentManifest, decode_manifest
from longleaf.storage.names import SERVICES, NotePlace, attempt_of_manifest, place_of_note
from longleaf.storage.store import Store


class NoteListing(msgspec.Struct, frozen=True):
    """The notes on a storage."""

    newest: Mapping[tuple[str, str], ContextNote]
    """By service and context, including deleted ones."""
    damaged: Sequence[DataLoss]
    """Newest notes that are unreadable. Older ones are not used instead, because they could restore deleted contexts,
    or drop appended documents."""


def read_notes(store: Store) -> NoteListing:
    """Raises StorageUnavailable."""
    last: dict[tuple[str, str], NotePlace] = {}
    for entry in store.list(SERVICES):
        place = place_of_note(entry.name)
        if place is not None:
            key = place.service, place.context
            last[key] = max(last.get(key, place), place)
    newest: dict[tuple[str, str], ContextNote] = {}
    damaged: list[DataLoss] = []
    for key, place in last.items():
        try:
            newest[key] = decode_note(store.get(place.name), place)
        except DataLoss as error:
            damaged.append(error)
        except NotFound:
            damaged.append(DataLoss(place.name, "it was deleted while it was read"))
    return NoteListing(newest, damaged)


def read_manifests(store: Store) -> Iterator[tuple[str, SegmentManifest | DataLoss]]:
    """Yields the names and contents of manifests one by one, because each contains all ids of its segment. Raises
    StorageUnavailable."""
    for entry in store.list(SERVICES):
        attempt = attempt_of_manifest(entry.name)
        if attempt is None:
            continue
        try:
            yield entry.name, read_manifest(store, entry.name)
        except DataLoss as error:
            yield entry.name, error
        except NotFound:  # deleted meanwhile by its service
            continue


def read_manifest(store: Store, name: str) -> SegmentManifest:
    """Raises NotFound, StorageUnavailable, and DataLoss if it is damaged or belongs to another name."""
    manifest = decode_manifest(store.get(name), name)
    attempt = attempt_of_manifest(name)
    if attempt is None or (attempt.service, attempt.segment) != (manifest.service, manifest.segment):
        raise DataLoss(name, f"it was written for segment {manifest.segment} of {manifest.service}")
    return manifest
