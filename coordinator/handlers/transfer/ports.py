"""What moving house asks of the engine. Nothing of it knows how contexts travel.

Segments and pieces are those of storage: the engine names what there is, reads and writes objects, and takes in what is
complete. All names below are of `longleaf.storage.names`.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from coordinator.persistence.catalog.records import ContextRecord, SegmentRecord, SnapshotRecord
from longleaf.fingerprint import Fingerprint
from longleaf.storage.manifest import PieceRef, SegmentManifest
from longleaf.storage.names import Attempt
from longleaf.types import Context


class ExportHandle(Protocol):
    """A context as it was when it was opened. What it names stays on storage until it is closed, whatever becomes of
    the context meanwhile."""

    @property
    def context(self) -> ContextRecord:
        """Its `segment` is the last of `segments`."""
        ...

    @property
    def segments(self) -> Sequence[SegmentRecord]:
        """Its path, the first one first, each one whole: it is used up to the `start` of the next one, and the last one
        up to `num_tokens` of the context. None of them changes any more."""
        ...

    @property
    def manifests(self) -> Mapping[int, SegmentManifest]:
        """By id of a segment, of those whose keys and values are on storage. A manifest tells the same start, rope and
        token ids as its segment. Opened again while nothing has changed, these are equal, in the same order."""
        ...

    async def read(self, piece: PieceRef) -> bytes:
        """An object that one of `manifests` names, as it was written: its digest is right. Another call may be under
        way. Raises StorageUnavailable, and DataLoss where it is damaged or missing."""
        ...

    async def close(self) -> None:
        """Lets go of it. Idempotent, and raises nothing."""
        ...


class ImportHandle(Protocol):
    """A context on its way into this service. Nobody sees anything of it before it is adopted, and nothing sweeps what
    was put for it before that or `drop`. One call at a time is under way."""

    @property
    def form(self) -> str | None:
        """What `SegmentManifest.form` must be for its pieces to be taken in here; None: none are, since this service
        keeps no snapshots."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens of a block, in that form."""
        ...

    @property
    def fingerprint(self) -> str:
        """What `SegmentManifest.fingerprint` is of what is read here."""
        ...

    def check(self, manifest: SegmentManifest) -> None:
        """Raises InvalidArgument where a manifest of this form names what cannot be taken in. Any thread may call."""
        ...

    def new_segment(self) -> int:
        """An id that no other segment of this service ever had, or will have. They grow from call to call."""
        ...

    def new_attempt(self, segment: int) -> Attempt:
        """Under which names its pieces are put, and then its manifest: `service` is the id of this service, `segment`
        that of the segment's objects, as for segments that were read here. Only where there is a form."""
        ...

    async def put(self, name: str, content: bytes | bytearray) -> None:
        """Has an object on storage when it returns. Each name is put once, and a name that failed is put again. Raises
        StorageUnavailable."""
        ...

    async def adopt(
        self, context: ContextRecord, segments: Sequence[SegmentRecord], snapshots: Sequence[SnapshotRecord]
    ) -> Context:
        """Has the context be there, parked, and kept for good: all of it or nothing. Afterwards this is over.

        `segments` are its path, the first one first, each whole, with ids of `new_segment`, and each with its own
        parent; none is shared with another context. `snapshots` are of those whose manifests have been put; what is in
        none is read again from its ids. Manifests tell the same as the segments.

        Raises InvalidArgument naming `rope` where this service would not rotate contexts of that capacity so,
        AlreadyExists where the name was taken meanwhile, StorageUnavailable where it cannot be kept, and Unavailable
        while the service stops; then nothing has changed, and it may be called again, or dropped.
        """
        ...

    async def drop(self) -> None:
        """Gives it up, and has what was put be deleted, now or when storage is swept. Idempotent, raises nothing, and
        does nothing after `adopt`."""
        ...


class TransferEngine(Protocol):
    """The engine, as contexts that move see it. Faked by coordinator.handlers.transfer.fakes."""

    def get_context(self, context_id: str) -> Context:
        """Raises NotFound, ContextLost or CheckpointChanged."""
        ...

    def made_by(self, context_id: str) -> str:
        """The upload id of a context's last document, or of its import; empty if it had none. Raises NotFound."""
        ...

    async def fingerprint(self) -> Fingerprint:
        """Of the checkpoint that is served. Raises Unavailable where it cannot be told yet."""
        ...

    async def open_export(self, context_id: str, *, with_keys: bool) -> ExportHandle:
        """The context as it is now. With keys, and where snapshots may be written, it is on storage before this
        returns, as far as its keys and values are held; that may take minutes, and it may be cancelled meanwhile.
        Without, there are no manifests.

        Raises NotFound, ContextLost, CheckpointChanged, StorageUnavailable or Unavailable.
        """
        ...

    async def begin_import(self, context: ContextRecord) -> ImportHandle:
        """Room for a context like this. Its `segment` and the dates of its use mean nothing yet.

        Raises AlreadyExists where its name is taken, which is not reserved otherwise; InvalidArgument naming
        `capacity` or `num_tokens` where this service takes no contexts so long; FailedPrecondition where contexts do
        not outlive this service (`--data-dir`); Unavailable while it stops.
        """
        ...
