"""The records of the catalog, one struct per kind, and the changes of one transaction."""

from functools import cached_property

import msgspec

from longleaf.errors import DataLoss
from longleaf.storage.context_record import ContextRecord
from longleaf.storage.manifest import SegmentManifest
from longleaf.storage.segment_record import SegmentRecord


class SnapshotRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The snapshot of a segment on storage."""

    segment: int
    manifest: str
    """The name of the object on storage that lists the pieces."""
    form: str
    """The layout of the stored keys and values; ranks with another layout cannot restore them."""
    num_bytes: int


def snapshot_record(segment: int, name: str, manifest: SegmentManifest) -> SnapshotRecord:
    """The record of a snapshot whose manifest is the object `name`."""
    num_bytes = sum(piece.num_bytes for piece in manifest.all_pieces)
    return SnapshotRecord(segment=segment, manifest=name, form=manifest.form, num_bytes=num_bytes)


class UploadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An unfinished upload of a document, as far as its token ids are final."""

    context: str
    upload_id: str
    header: bytes
    """The client's first message, which is needed to resume the upload."""
    settled_bytes: int
    """The byte offset at which the client resumes."""
    updated: float
    """Seconds since the epoch."""

    @property
    def key(self) -> "UploadKey":
        return self.context, self.upload_id


UploadKey = tuple[str, str]
"""Context and upload id."""


class OutboxEntry(msgspec.Struct, frozen=True):
    """A small object to write to storage, or to delete there."""

    name: str
    content: bytes | None
    """None for a deletion."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """The changes of one transaction. Deletions are applied before insertions."""

    segments: tuple[SegmentRecord, ...] = ()
    contexts: tuple[ContextRecord, ...] = ()
    """New contexts, or replacements of those with the same ids."""
    dropped_contexts: tuple[str, ...] = ()
    """Missing records are ignored, as in all fields of deletions."""
    snapshots: tuple[SnapshotRecord, ...] = ()
    """New snapshots, or replacements of those of the same segments."""
    dropped_snapshots: tuple[int, ...] = ()
    """By segment."""
    dropped_uploads: tuple[UploadKey, ...] = ()
    """Uploads that became contexts, or that will not be resumed."""
    next_segment: int = 0
    """All ids below are reserved, whether or not segments with them are stored."""
    outgoing: tuple[OutboxEntry, ...] = ()
    """Each replaces an unsent entry of the same name."""

    @property
    def only_drops(self) -> bool:
        """Whether the change only deletes, except for outbox entries."""
        drops = self.dropped_contexts or self.dropped_snapshots or self.dropped_uploads
        return bool(drops) and not (self.segments or self.contexts or self.snapshots or self.next_segment)


class CommitResult(msgspec.Struct, frozen=True):
    """The records that were removed as a consequence of a change."""

    segments: tuple[int, ...] = ()
    """Segments that no context's path reaches any more, in ascending order."""
    manifests: tuple[str, ...] = ()
    """The manifests of snapshots that are no longer recorded, sorted: those of these segments, those dropped or
    replaced, and those put for segments that do not exist. Their deletion is in the outbox.
    """


class CatalogContents(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The whole content of a catalog, except the token ids of uploads and the outbox. Records are in the order of their
    keys, without damaged ones.
    """

    segments: tuple[SegmentRecord, ...] = ()
    contexts: tuple[ContextRecord, ...] = ()
    """The path of a context may contain damaged segments: see `path`."""
    snapshots: tuple[SnapshotRecord, ...] = ()
    uploads: tuple[UploadRecord, ...] = ()
    next_segment: int = 0
    """Greater than the id of every segment that was ever stored or reserved for an import."""
    next_outgoing: int = 0
    """The number of outbox entries ever added."""
    epoch: int = 0
    """The last recorded epoch."""
    service_id: str
    """32 hexadecimal digits, generated once per database."""
    damaged: dict[int, str] = {}
    """Damaged segments, and the reasons."""
    damaged_contexts: dict[str, str] = {}
    """Damaged contexts by the readable part of their ids, and the reasons."""
    other_damage: tuple[str, ...] = ()
    """Descriptions of other damage."""

    @cached_property
    def _by_id(self) -> dict[int, SegmentRecord]:
        return {segment.id: segment for segment in self.segments}

    def path(self, context: ContextRecord) -> tuple[SegmentRecord, ...]:
        """Return the segments of a context's path in order. Raises DataLoss where a segment is damaged or missing, or
        does not continue the one before.
        """
        found: list[SegmentRecord] = []
        next_id, end = context.segment, context.num_tokens
        while next_id is not None:
            segment = self._by_id.get(next_id)
            if segment is None or not segment.start < end <= segment.end:
                raise _lost(context, self.damaged.get(next_id, f"segment {next_id} is missing, or ends too early"))
            found.append(segment)
            next_id, end = segment.parent, segment.start
        if end:
            raise _lost(context, "its path does not begin at position 0")
        return tuple(reversed(found))


def _lost(context: ContextRecord, reason: str) -> DataLoss:
    return DataLoss(f"contexts/{context.id}", f"{reason}; delete it and ingest the document again")
