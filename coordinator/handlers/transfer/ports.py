"""The engine's interface for transfers. The engine does not depend on how contexts are transferred.

Segments and pieces are those of snapshot storage: the engine names them, reads and writes objects, and adopts complete
contexts. All names below are defined in `longleaf.storage.names`.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from coordinator.persistence.catalog.records import ContextRecord, SegmentRecord, SnapshotRecord
from longleaf.fingerprint import Fingerprint
from longleaf.storage.manifest import PieceRef, SegmentManifest
from longleaf.storage.names import Attempt
from longleaf.types import Context


class ExportHandle(Protocol):
    """A context as it was when the export was opened. Its objects stay on storage until `close`, even if the context
    changes or is deleted."""

    @property
    def context(self) -> ContextRecord:
        """Its `segment` is the last of `segments`."""
        ...

    @property
    def segments(self) -> Sequence[SegmentRecord]:
        """The path, in order, with complete segments: each is used up to the `start` of the next one, and the last one
        up to the context's `num_tokens`. Immutable."""
        ...

    @property
    def manifests(self) -> Mapping[int, SegmentManifest]:
        """By segment id, for segments whose keys and values are on storage. A manifest has the start, rope and token
        ids of its segment. Another export of an unchanged context has equal manifests in the same order."""
        ...

    async def read(self, piece: PieceRef) -> bytes:
        """Returns an object that `manifests` names, with its digest verified. Calls may overlap. Raises
        StorageUnavailable, and DataLoss if the object is damaged or missing."""
        ...

    async def close(self) -> None:
        """Releases the context. Idempotent; raises nothing."""
        ...


class ImportHandle(Protocol):
    """A context that is being imported. It is not visible before `adopt`, and garbage collection keeps its objects
    until `adopt` or `drop`. Calls must not overlap."""

    @property
    def form(self) -> str | None:
        """The `SegmentManifest.form` that this service accepts; None if it accepts no pieces, because it keeps no
        snapshots."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens of a block, in that form."""
        ...

    @property
    def fingerprint(self) -> str:
        """The `SegmentManifest.fingerprint` of segments prefilled by this service."""
        ...

    def check(self, manifest: SegmentManifest) -> None:
        """Raises InvalidArgument if a manifest of this form describes pieces that cannot be imported. Thread-safe."""
        ...

    def new_segment(self) -> int:
        """An id that is unique among all segments of this service, past and future. Ids increase from call to call."""
        ...

    def new_attempt(self, segment: int) -> Attempt:
        """The names under which the pieces of a segment, and then its manifest, are stored: `service` is the id of this
        service, `segment` that of the segment's objects, as for segments prefilled here. Requires a form."""
        ...

    async def put(self, name: str, content: bytes | bytearray) -> None:
        """Stores an object; it is durable when the call returns. Each name is stored once, and again only after a
        failure. Raises StorageUnavailable."""
        ...

    async def adopt(
        self, context: ContextRecord, segments: Sequence[SegmentRecord], snapshots: Sequence[SnapshotRecord]
    ) -> Context:
        """Creates the context, evicted and durable, atomically. Ends the import.

        `segments` is the path, in order, with complete segments, ids from `new_segment`, and each segment's parent;
        none is shared with another context. `snapshots` has those whose manifests have been stored; segments without
        one are recomputed from their ids. Manifests agree with their segments.

        Raises InvalidArgument naming `rope` if this service would use another rotation for contexts of that capacity,
        AlreadyExists if the name is taken by now, StorageUnavailable if the context cannot be persisted, and
        Unavailable while the service stops. After an error nothing has changed, and the caller may retry or drop.
        """
        ...

    async def drop(self) -> None:
        """Ends the import and deletes its objects, now or at the next garbage collection. Idempotent; raises nothing,
        and has no effect after `adopt`."""
        ...


class TransferEngine(Protocol):
    """The engine's interface for transfers. Faked by tests.support.fakes.transfer_engine."""

    def get_context(self, context_id: str) -> Context:
        """Raises NotFound, ContextLost or CheckpointChanged."""
        ...

    def last_upload_id(self, context_id: str) -> str:
        """The upload id of the context's last document, or of its import; empty if there was none. Raises NotFound."""
        ...

    async def fingerprint(self) -> Fingerprint:
        """The fingerprint of the served checkpoint. Raises Unavailable if it is not known yet."""
        ...

    async def open_export(self, context_id: str, *, with_keys: bool) -> ExportHandle:
        """Opens the current state of a context. `with_keys`: if snapshots can be written, the keys and values that
        ranks hold are stored before this returns, which may take minutes and may be cancelled. Otherwise there are no
        manifests.

        Raises NotFound, ContextLost, CheckpointChanged, StorageUnavailable or Unavailable.
        """
        ...

    async def begin_import(self, context: ContextRecord) -> ImportHandle:
        """Starts the import of a context. Its `segment` and last-use time are ignored.

        Raises AlreadyExists if the name is taken (the name is not reserved); InvalidArgument naming `capacity` or
        `num_tokens` if this service does not accept contexts of that size; FailedPrecondition if contexts do not
        outlive this service (`--data-dir`); Unavailable while it stops.
        """
        ...
