"""Records: what the catalog keeps, one struct per kind, and what changes in one transaction."""

from array import array
from functools import cached_property

import msgspec

from longleaf.document_text import DocumentText
from longleaf.errors import DataLoss
from longleaf.positions import OWN_ROPE, Rope


class SegmentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A sealed segment. Its path before is the path of `parent`, cut at `start`."""

    id: int
    """Given by the caller; no other segment of this catalog ever had it."""
    parent: int | None = None
    """The last segment of the path that it continues; None at position 0."""
    start: int = 0
    """The position of its first token."""
    rope: Rope = OWN_ROPE
    token_ids: "array[int]"
    """Of type `I`."""
    text: DocumentText | None = None
    """Which text they are, where that is known."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class ContextRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A context. Times in seconds since the epoch."""

    id: str
    segment: int
    """The last one of its path."""
    num_tokens: int
    """Its path is that of the segment, cut there."""
    ends: tuple[int, ...]
    """Where its last documents ended, and where it was forked."""
    capacity: int
    """Positions that its rope was chosen for."""
    created: float
    updated: float
    display_name: str = ""
    is_pinned: bool = False
    expires: float | None = None
    last_used: float
    num_hits: int = 0
    """How often it was asked."""
    upload_id: str = ""
    """What its client called the ingest that made its last document; empty where it gave no name."""


class SnapshotRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Keys and values of a segment on storage."""

    segment: int
    manifest: str
    """The name of an object on storage, which tells the pieces."""
    form: str
    """How keys and values are written there: what another form needs cannot be brought back from it."""
    num_bytes: int


class UploadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A document on its way, as far as its token ids are settled."""

    context: str
    upload_id: str
    header: bytes
    """What the client said at its beginning, for whoever goes on with it."""
    settled_bytes: int
    """The client goes on at this byte."""
    updated: float
    """In seconds since the epoch."""

    @property
    def key(self) -> "UploadKey":
        return self.context, self.upload_id


UploadKey = tuple[str, str]
"""Context and upload id."""


class OutboxEntry(msgspec.Struct, frozen=True):
    """A small object that is to be written to storage, or deleted there."""

    name: str
    content: bytes | None
    """None: it is to be deleted."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What changes in one transaction. First what is dropped goes, then what is put comes."""

    segments: tuple[SegmentRecord, ...] = ()
    contexts: tuple[ContextRecord, ...] = ()
    """New, or instead of those with the same ids."""
    dropped_contexts: tuple[str, ...] = ()
    """Those that are not there do no harm; the same holds for all that is dropped."""
    snapshots: tuple[SnapshotRecord, ...] = ()
    """New, or instead of those of the same segments."""
    dropped_snapshots: tuple[int, ...] = ()
    """By segment."""
    dropped_uploads: tuple[UploadKey, ...] = ()
    """Those that became contexts, or that nobody will go on with."""
    next_segment: int = 0
    """Ids below are given out, whether or not segments with them are kept."""
    outgoing: tuple[OutboxEntry, ...] = ()
    """Each one instead of an earlier one of the same name that still waits."""

    @property
    def only_drops(self) -> bool:
        """Whether it drops something and makes nothing, but for what is to be written of that."""
        drops = self.dropped_contexts or self.dropped_snapshots or self.dropped_uploads
        return bool(drops) and not (self.segments or self.contexts or self.snapshots or self.next_segment)


class CommitResult(msgspec.Struct, frozen=True):
    """What went with a change."""

    segments: tuple[int, ...] = ()
    """Those that no context's path reaches any more, in ascending order."""
    manifests: tuple[str, ...] = ()
    """Of snapshots that are not kept, sorted: of these segments, those that were dropped or put anew, and those put for
    segments that are not there. That they are to be deleted is outgoing."""


class CatalogContents(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """All that a catalog holds, but for the ids of uploads and what is outgoing. Records are in the order of their
    keys. What is damaged is in none of them."""

    segments: tuple[SegmentRecord, ...] = ()
    contexts: tuple[ContextRecord, ...] = ()
    """The path of one may lead through segments that are damaged: see `path`."""
    snapshots: tuple[SnapshotRecord, ...] = ()
    uploads: tuple[UploadRecord, ...] = ()
    next_segment: int = 0
    """Greater than the id of any segment that was ever kept, or given out to one that came with an archive."""
    next_outgoing: int = 0
    """How much was ever outgoing."""
    epoch: int = 0
    """The last one that was noted."""
    service_id: str
    """32 hexadecimal digits, made once for each database."""
    damaged: dict[int, str] = {}
    """Segments, and what is wrong with them."""
    damaged_contexts: dict[str, str] = {}
    """Contexts by what can be read of their ids, and what is wrong with them."""
    other_damage: tuple[str, ...] = ()
    """What else is damaged, in words."""

    @cached_property
    def _by_id(self) -> dict[int, SegmentRecord]:
        return {segment.id: segment for segment in self.segments}

    def path(self, context: ContextRecord) -> tuple[SegmentRecord, ...]:
        """The segments of a context's path, the first one first. Raises DataLoss where one of them is damaged or
        missing, or does not continue the one before."""
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
