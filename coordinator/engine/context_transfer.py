"""Export and import of contexts. Exported segments are protected from deletion; imported contexts start evicted."""

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.kv_cache.token_paths import Segment
from coordinator.persistence.catalog.records import Change, ContextRecord, SegmentRecord, SnapshotRecord
from coordinator.persistence.context_store import ContextStore
from coordinator.persistence.record_mapping import context_record, segment_record
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
from longleaf.storage.manifest import PieceRef, SegmentManifest
from longleaf.storage.names import Attempt
from longleaf.types import Context

if TYPE_CHECKING:
    from coordinator.engine.engine import Engine

log = logging.getLogger(__name__)


class ContextTransfer:
    """Implements coordinator.handlers.transfer.ports.TransferEngine. If nothing is stored, imports are rejected."""

    def __init__(self, engine: "Engine", store: ContextStore, model: Path) -> None:
        self._engine = engine
        self._store = store
        self._snapshots = store.snapshots
        self._model = model
        self._fingerprint: Fingerprint | None = None

    def get_context(self, context_id: str) -> Context:
        return self._engine.get_context(context_id)

    def last_upload_id(self, context_id: str) -> str:
        return self._engine.last_upload_id(context_id)

    async def fingerprint(self) -> Fingerprint:
        if self._fingerprint is None:
            self._fingerprint = await asyncio.to_thread(read_fingerprint, self._model)
        return self._fingerprint

    async def open_export(self, context_id: str, *, with_keys: bool) -> "ContextExport":
        context = self._engine.named(context_id)
        record, path = context_record(context), context.path
        exporting = ContextExport(record, list(map(segment_record, path.segments)), self._snapshots)
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
    """Implements coordinator.handlers.transfer.ports.ExportHandle."""

    def __init__(self, context: ContextRecord, segments: Sequence[SegmentRecord], snapshots: Snapshots | None) -> None:
        self.context = context
        self.segments = segments
        self._snapshots = snapshots
        self._found: dict[int, SegmentManifest] = {}
        self._pinned: list[str] = []

    @property
    def manifests(self) -> Mapping[int, SegmentManifest]:
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
        assert self._snapshots is not None
        try:
            return await self._snapshots.read(piece.name, piece.digest)
        except NotFound as error:
            raise DataLoss(piece.name, "it is not there") from error

    async def close(self) -> None:
        for name in self._pinned:
            assert self._snapshots is not None
            self._snapshots.unpin(name)
        self._pinned.clear()


class ContextImport:
    """Implements coordinator.handlers.transfer.ports.ImportHandle."""

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
        return self._snapshots.form if self._snapshots.may_write else None

    @property
    def block_size(self) -> int:
        return self._snapshots.block_size

    @property
    def fingerprint(self) -> str:
        return self._snapshots.fingerprint

    def check(self, manifest: SegmentManifest) -> None:
        self._snapshots.check(manifest)

    def new_segment(self) -> int:
        self._last_segment = self._store.reserve_segment_ids(1)
        return self._last_segment

    def new_attempt(self, segment: int) -> Attempt:
        self._attempts.append(attempt := self._snapshots.new_attempt(segment, self._archive))
        return attempt

    async def put(self, name: str, content: bytes | bytearray) -> None:
        await self._store.persist_reserved_id(self._last_segment)
        await self._snapshots.write(name, content)

    async def adopt(
        self, context: ContextRecord, segments: Sequence[SegmentRecord], snapshots: Sequence[SnapshotRecord]
    ) -> Context:
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
