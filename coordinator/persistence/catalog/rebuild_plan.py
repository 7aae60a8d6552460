"""Rebuilds a catalog from the contents of a storage: notes contain the contexts, manifests the tokens. No I/O."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from coordinator.persistence.catalog.records import CatalogContents, snapshot_record
from longleaf.errors import DataLoss, InvalidArgument
from longleaf.formatting import human_count
from longleaf.little_endian import unpack
from longleaf.storage.context_record import ContextRecord, sound_ends
from longleaf.storage.files import ObjectInfo
from longleaf.storage.inventory import NoteListing
from longleaf.storage.manifest import SegmentManifest
from longleaf.storage.names import attempt_of_manifest, place_of_note, segment_name, segment_number, segments_folder
from longleaf.storage.segment_record import SegmentRecord
from longleaf.types import SkippedContext

SERVICE = "--service"


class StorageContents(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a storage, for all services."""

    notes: NoteListing
    manifests: Mapping[str, SegmentManifest]
    """Readable manifests of the checkpoint, by name."""
    damaged: Mapping[str, DataLoss]
    """Unreadable manifests, by name."""
    others: Sequence[str]
    """Names of the manifests of other checkpoints."""
    entries: Mapping[str, ObjectInfo]
    """All objects, by name."""


class Rebuilt(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the new catalog."""

    contents: CatalogContents
    """Its `next_outgoing` is greater than the number of every note."""
    skipped: Sequence[SkippedContext]
    """Contexts that cannot be restored, except deleted ones."""
    num_others: int
    """Manifests of the service that belong to other checkpoints."""


def choose_service(stored: StorageContents, requested: str | None) -> str:
    """Return the requested service, or else the only one that has contexts of the checkpoint.

    Raises InvalidArgument with a list of the services if there are several, or if the requested one is not among them.
    """
    recorded = {service for service, _ in stored.notes.newest} | {_place(error)[0] for error in stored.notes.damaged}
    found = sorted(recorded & {manifest.service for manifest in stored.manifests.values()})
    if requested is None and len(found) == 1:
        return found[0]
    if requested in found:
        return requested
    if not found:
        raise InvalidArgument("--from", "no contexts of this checkpoint and dtype were found")
    message = ", ".join(f"{service} ({_count(stored, service)})" for service in found)
    raise InvalidArgument(SERVICE, f"give the id of a service that stored contexts of this checkpoint: {message}")


def _count(stored: StorageContents, service: str) -> str:
    segments = {manifest.segment for manifest in stored.manifests.values()}
    count = sum(segment_name(service, record.segment) in segments for record in _records(stored, service))
    return human_count(count, "context")


def rebuild(stored: StorageContents, service: str) -> Rebuilt:
    """Return the catalog of a service, with all contexts whose paths are complete."""
    sources = ManifestIndex(stored, service)
    skipped = [
        SkippedContext(_place(error)[1], str(error)) for error in stored.notes.damaged if _place(error)[0] == service
    ]
    contexts, used = list[ContextRecord](), dict[str, SegmentManifest]()
    for record in _records(stored, service):
        try:
            path = sources.path(record)
            contexts.append(_checked(record))
        except DataLoss as error:
            skipped.append(SkippedContext(record.id, error.reason))
        else:
            used |= path
    numbers = {sources.number(manifest.segment): name for name, manifest in used.items()}
    retained = CatalogContents(
        service_id=service,
        contexts=tuple(contexts),
        segments=tuple(_segment(sources, used[numbers[number]]) for number in sorted(numbers)),
        snapshots=tuple(snapshot_record(number, numbers[number], used[numbers[number]]) for number in sorted(numbers)),
        next_segment=1 + max(_numbers(stored, service), default=-1),
        next_outgoing=1 + max(_note_numbers(stored, service), default=-1),
    )
    return Rebuilt(
        contents=retained,
        skipped=sorted(skipped, key=lambda each: each.name),
        num_others=sum(name.startswith(segments_folder(service) + "/") for name in stored.others),
    )


def _records(stored: StorageContents, service: str) -> list[ContextRecord]:
    """The contexts of a service, by name."""
    records = [note.record for (owner, _), note in sorted(stored.notes.newest.items()) if owner == service]
    return [record for record in records if record is not None]


class ManifestIndex:
    """The manifest of each segment of a service."""

    def __init__(self, stored: StorageContents, service: str) -> None:
        self._service = service
        self._found = dict[str, tuple[str, SegmentManifest]]()
        self._faults = dict[str, str]()
        """Reasons for the segments without a usable manifest."""
        for name in stored.others:
            self._explain(name, "it was read by another checkpoint")
        for name, error in stored.damaged.items():
            self._explain(name, str(error))
        for name in sorted(stored.manifests, key=lambda name: (stored.entries[name].modified, name)):
            manifest = stored.manifests[name]
            if manifest.service != service:
                continue
            if (fault := _fault(manifest, stored.entries)) is not None:
                self._faults[manifest.segment] = fault
            else:  # the newest comes last
                self._found[manifest.segment] = name, manifest

    def _explain(self, name: str, fault: str) -> None:
        attempt = attempt_of_manifest(name)
        if attempt is not None and attempt.service == self._service:
            self._faults[attempt.segment] = fault

    def path(self, context: ContextRecord) -> list[tuple[str, SegmentManifest]]:
        """Return the manifests of a context's path with their names, in order. Raises DataLoss if a manifest is
        missing, or if it does not continue its predecessor.
        """
        found: list[tuple[str, SegmentManifest]] = []
        segment, end = segment_name(self._service, context.segment), context.num_tokens
        while segment is not None:
            entry = self._found.get(segment)
            if entry is None:
                raise _lost(context, f"{segment}: {self._faults.get(segment, 'storage has no manifest of it')}")
            if not entry[1].start < end <= entry[1].end or (found and entry[1].rope != found[0][1].rope):
                raise _lost(context, f"{segment} is not the predecessor in its path")
            self.number(segment)
            found.append(entry)
            segment, end = entry[1].parent, entry[1].start
        if not found or end:
            raise _lost(context, "its path does not begin at position 0")
        return found[::-1]

    def number(self, segment: str) -> int:
        """Return the id of the segment in its catalog. Raises DataLoss if the name does not belong to this service."""
        number = segment_number(self._service, segment)
        if number is None:
            raise DataLoss(segment, f"it is not a segment of {self._service}")
        return number


def _lost(context: ContextRecord, reason: str) -> DataLoss:
    return DataLoss(f"contexts/{context.id}", reason)


def _fault(manifest: SegmentManifest, entries: Mapping[str, ObjectInfo]) -> str | None:
    """Describe the first missing or truncated object of a manifest; None if all are complete."""
    for piece in manifest.all_pieces:
        entry = entries.get(piece.name)
        if entry is None:
            return f"{piece.name} is missing"
        if entry.num_bytes != piece.num_bytes:
            return f"{piece.name} has {entry.num_bytes:,} bytes, expected {piece.num_bytes:,}"
    return None


def _place(error: DataLoss) -> tuple[str, str]:
    """Return service and context of a damaged note."""
    place = place_of_note(error.name)
    assert place is not None
    return place.service, place.context


def _numbers(stored: StorageContents, service: str) -> Iterator[int]:
    """Return the ids of all segments that any object refers to."""
    folder = segments_folder(service) + "/"
    named = [name.removeprefix(folder).split("/")[0] for name in stored.entries if name.startswith(folder)]
    named += [segment_name(service, record.segment) for record in _records(stored, service)]
    named += [manifest.parent for manifest in stored.manifests.values() if manifest.parent is not None]
    return (number for name in named if (number := segment_number(service, name)) is not None)


def _note_numbers(stored: StorageContents, service: str) -> Iterator[int]:
    places = map(place_of_note, stored.entries)
    return (place.number for place in places if place is not None and place.service == service)


def _checked(record: ContextRecord) -> ContextRecord:
    """Raises DataLoss if the note of a context was inconsistent."""
    ends = sound_ends(record.ends, record.num_tokens)
    if ends is None or record.capacity < record.num_tokens:
        raise _lost(record, "its note is inconsistent")
    return replace(record, ends=ends)


def _segment(sources: ManifestIndex, manifest: SegmentManifest) -> SegmentRecord:
    token_ids = unpack("I", manifest.token_ids)
    parent = None if manifest.parent is None else sources.number(manifest.parent)
    number = sources.number(manifest.segment)
    return SegmentRecord(id=number, parent=parent, start=manifest.start, rope=manifest.rope, token_ids=token_ids)
