"""Export and import of contexts. Exported segments are protected from deletion; imported contexts start evicted."""

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.kv_cache.token_paths import Segment
from coordinator.persistence.catalog.records import Change, SnapshotRecord
from coordinator.persistence.context_store import ContextStore
from coordinator.persistence.snapshots.snapshots import Snapshots
from longleaf.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    LongleafError,
    NotFound,
    StorageUnavailable,
    Unavailable,
)
from longleaf.fingerprint import Fingerprint, read_fingerprint
from longleaf.storage.context_record import ContextRecord
from longleaf.storage.manifest import PieceRef, SegmentManifest
from longleaf.storage.names import Attempt
from longleaf.storage.segment_record import SegmentRecord
from longleaf.types import Context

if TYPE_CHECKING:
    from coordinator.engine.engine import Engine

log = logging.getLogger(__name__)


class ContextTransfer:
    """The engine's interface for transfers. If nothing is stored, imports are rejected.

    Segments and pieces are those of snapshot storage, with the names of `longleaf.storage.names`.
    """

    def __init__(self, engine: "Engine", store: ContextStore, model: Path) -> None:
        self._engine = engine
        self._store = store
        self._snapshots = store.snapshots
        self._model = model
        self._fingerprint: Fingerprint | None = None

    def get_context(self, context_id: str) -> Context:
        """Raises NotFound, ContextLost or CheckpointChanged."""
        return self._engine.get_context(context_id)

    def last_upload_id(self, context_id: str) -> str:
        """The upload id of the context's last document, or of its import; empty if there was none. Raises NotFound."""
        return self._engine.last_upload_id(context_id)

    async def fingerprint(self) -> Fingerprint:
        """The fingerprint of the served checkpoint."""
        if self._fingerprint is None:
            self._fingerprint = await asyncio.to_thread(read_fingerprint, self._model)
        return self._fingerprint

    async def open_export(self, context_id: str, *, with_keys: bool) -> "ContextExport":
        """Opens the current state of a context. `with_keys`: if snapshots can be written, the keys and values that
        ranks hold are stored before this returns, which may take minutes and may be cancelled. Otherwise there are no
        manifests.

        Raises NotFound, ContextLost, CheckpointChanged, StorageUnavailable or Unavailable.
        """
        context = self._engine.named(context_id)
        path = context.path
        exporting = ContextExport(context.record, [segment.record for segment in path.segments], self._snapshots)
        if with_keys and self._snapshots is not None:
            try:
                for segment in path.segments:
                    await self._save(self._snapshots, segment.id)
                for segment in path.segments:
                    await exporting.add_snapshot(segment)
            except BaseException:
                await exporting.close()
                raise
        return exporting

    async def _save(self, snapshots: Snapshots, segment_id: int) -> None:
        """Write a segment to storage. A segment that is not in memory, or that must not be written, is exported without
        its keys. Raises StorageUnavailable.
        """
        try:
            await snapshots.save([segment_id])
        except StorageUnavailable:
            raise
        except (Unavailable, InvalidArgument, NotFound) as error:
            log.info("exporting segment %d without its keys: %s", segment_id, error)

    async def begin_import(self, context: ContextRecord) -> "ContextImport":
        """Starts the import of a context. Its `segment` and last-use time are ignored.

        Raises AlreadyExists if the name is taken (the name is not reserved); InvalidArgument naming `capacity` or
        `num_tokens` if this service does not accept contexts of that size; FailedPrecondition if contexts do not
        outlive this service (`--data-dir`); Unavailable while it stops.
        """
        if self._snapshots is None:
            message = "this service stores no contexts: start it with --data-dir"
            raise FailedPrecondition(f"contexts/{context.id}", message)
        self._store.check_free(context.id)
        positions = self._engine.positions
        positions.check_capacity(context.capacity)
        if context.num_tokens > positions.limit:
            message = f"{context.num_tokens:,} exceeds {positions.limit:,} positions, {positions.limit_name}"
            raise InvalidArgument("num_tokens", message)
        return ContextImport(self._engine, self._store, self._snapshots)


class ContextExport:
    """A context as it was when the export was opened. Its objects stay on storage until `close`, even if the context
    changes or is deleted."""

    def __init__(self, context: ContextRecord, segments: Sequence[SegmentRecord], snapshots: Snapshots | None) -> None:
        self.context = context
        """Its `segment` is the last of `segments`."""
        self.segments = segments
        """The path, in order, with complete segments: each is used up to the `start` of the next one, and the last one
        up to the context's `num_tokens`."""
        self._snapshots = snapshots
        self._found: dict[int, SegmentManifest] = {}
        self._pinned: list[str] = []

    @property
    def manifests(self) -> Mapping[int, SegmentManifest]:
        """By segment id, for segments whose keys and values are on storage. A manifest has the start, rope and token
        ids of its segment. Another export of an unchanged context has equal manifests in the same order."""
        return self._found

    async def add_snapshot(self, segment: Segment) -> None:
        """Include the snapshot of a segment, if any, and protect it from deletion. Raises StorageUnavailable."""
        snapshots = self._snapshots
        if snapshots is None or not snapshots.is_usable(segment.id):
            return
        self._pinned.append(snapshots.pin(segment.id))
        try:
            self._found[segment.id] = await snapshots.manifest(segment)
        except (DataLoss, NotFound) as error:
            log.warning("exporting segment %d without its keys: %s", segment.id, error)

    async def read(self, piece: PieceRef) -> bytes:
        """Returns an object that `manifests` names, with its digest verified. Calls may overlap. Raises
        StorageUnavailable, and DataLoss if the object is damaged or missing."""
        assert self._snapshots is not None
        try:
            return await self._snapshots.read(piece.name, piece.digest)
        except NotFound as error:
            raise DataLoss(piece.name, "it is not there") from error

    async def close(self) -> None:
        """Releases the context. Idempotent; raises nothing."""
        for name in self._pinned:
            assert self._snapshots is not None
            self._snapshots.unpin(name)
        self._pinned.clear()


class ContextImport:
    """A context that is being imported. It is not visible before `adopt`, and garbage collection keeps its objects
    until `adopt` or `drop`. Calls must not overlap."""

    def __init__(self, engine: "Engine", store: ContextStore, snapshots: Snapshots) -> None:
        self._engine = engine
        self._store = store
        self._snapshots = snapshots
        self._archive = secrets.token_hex(8)
        """A name that is unique among the archives of this service."""
        self._attempts: list[Attempt] = []
        self._last_segment = -1
        self._is_over = False

    @property
    def form(self) -> str | None:
        """The `SegmentManifest.form` that this service accepts; None if it accepts no pieces, because it keeps no
        snapshots."""
        return self._snapshots.form if self._snapshots.may_write else None

    @property
    def block_size(self) -> int:
        """Tokens of a block, in that form."""
        return self._snapshots.block_size

    @property
    def fingerprint(self) -> str:
        """The `SegmentManifest.fingerprint` of segments prefilled by this service."""
        return self._snapshots.fingerprint

    def check(self, manifest: SegmentManifest) -> None:
        """Raises InvalidArgument if a manifest of this form describes pieces that cannot be imported. Thread-safe."""
        self._snapshots.check(manifest)

    def new_segment(self) -> int:
        """An id that is unique among all segments of this service, past and future. Ids increase from call to call."""
        self._last_segment = self._store.reserve_segment_ids(1)
        return self._last_segment

    def new_attempt(self, segment: int) -> Attempt:
        """The names under which the pieces of a segment, and then its manifest, are stored: `service` is the id of this
        service, `segment` that of the segment's objects, as for segments prefilled here. Requires a form."""
        self._attempts.append(attempt := self._snapshots.new_attempt(segment, self._archive))
        return attempt

    async def put(self, name: str, content: bytes | bytearray) -> None:
        """Stores an object; it is durable when the call returns. Each name is stored once, and again only after a
        failure. Raises StorageUnavailable."""
        await self._store.persist_reserved_id(self._last_segment)
        await self._snapshots.write(name, content)

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
        rope = self._engine.positions.rope(context.capacity)
        if any(segment.rope != rope for segment in segments):
            message = f"this service rotates contexts of {context.capacity:,} positions differently from the exporter"
            raise InvalidArgument("rope", f"{message}: ingest the text again, or serve with the same --allow-long")
        change = Change(segments=tuple(segments), contexts=(context,), snapshots=tuple(snapshots))
        adopted = await self._store.adopt_reserved(change)
        self._is_over = True
        for attempt in self._attempts:
            await self._snapshots.end_attempt(attempt, keep=True)
        return self._engine.on_context_added(adopted)

    async def drop(self) -> None:
        """Ends the import and deletes its objects, now or at the next garbage collection. Idempotent; raises nothing,
        and has no effect after `adopt`."""
        if self._is_over:
            return
        self._is_over = True
        for attempt in self._attempts:
            try:
                await self._snapshots.end_attempt(attempt, keep=False)
            except LongleafError as error:
                log.debug(
                    "cannot delete the uploaded pieces of %s; garbage collection will: %s", attempt.segment, error
                )
