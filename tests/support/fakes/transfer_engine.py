"""An in-memory TransferEngine: its contexts can be exported, and imported ones are stored."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from coordinator.persistence.catalog.records import SnapshotRecord
from longleaf.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    StorageUnavailable,
)
from longleaf.fingerprint import Fingerprint
from longleaf.storage.context_record import ContextRecord
from longleaf.storage.manifest import PieceRef, SegmentManifest, decode_manifest
from longleaf.storage.names import Attempt
from longleaf.storage.segment_record import SegmentRecord
from longleaf.types import Context

BLOCK_SIZE = 4


class StoredContext(NamedTuple):
    """A context of the engine."""

    context: ContextRecord
    segments: Sequence[SegmentRecord]
    manifests: Mapping[int, SegmentManifest]


class FakeTransferEngine:
    """Contexts of the checkpoint `fingerprint`, and the objects of a storage that accepts keys of one form."""

    def __init__(self, fingerprint: Fingerprint, form: str | None, service: str = "fake") -> None:
        self._fingerprint = fingerprint
        self.form = form
        self.service = service
        self.is_durable = True
        self.max_positions = 1 << 20
        self.contexts: dict[str, StoredContext] = {}
        self.objects: dict[str, bytes] = {}
        self.num_open = 0
        """Contexts that are being exported."""
        self.num_imports = 0
        """Imports that were neither adopted nor dropped."""
        self.failures: list[StorageUnavailable] = []
        """Errors that the next storage calls raise."""
        self.is_answering = asyncio.Event()
        """Storage calls wait until it is set."""
        self.is_answering.set()
        self.is_requested = asyncio.Event()
        """Set by the first storage call."""
        self.num_cancelled = 0
        """Storage calls that were cancelled."""
        self._next_segment = 1000

    def get_context(self, context_id: str) -> Context:
        record = self._get(context_id).context
        return Context(
            id=record.id,
            tokens=record.num_tokens,
            kv_bytes=0,
            created=record.created,
            updated=record.updated,
            display_name=record.display_name,
            expires=record.expires,
            is_pinned=record.is_pinned,
            state="evicted",
        )

    def last_upload_id(self, context_id: str) -> str:
        return self._get(context_id).context.upload_id

    async def fingerprint(self) -> Fingerprint:
        return self._fingerprint

    @property
    def digest(self) -> str:
        return self._fingerprint.digest

    async def open_export(self, context_id: str, *, with_keys: bool) -> "FakeExportHandle":
        stored = self._get(context_id)
        self.num_open += 1
        return FakeExportHandle(self, stored if with_keys else stored._replace(manifests={}))

    async def begin_import(self, context: ContextRecord) -> "FakeImportHandle":
        if not self.is_durable:
            raise FailedPrecondition(f"contexts/{context.id}", "this service keeps nothing: serve with --data-dir")
        if context.id in self.contexts:
            raise AlreadyExists(f"contexts/{context.id}")
        if context.capacity > self.max_positions:
            raise InvalidArgument("capacity", f"{context.capacity:,} is more than {self.max_positions:,}")
        self.num_imports += 1
        return FakeImportHandle(self)

    def _get(self, context_id: str) -> StoredContext:
        if context_id not in self.contexts:
            raise NotFound(f"contexts/{context_id}")
        return self.contexts[context_id]

    async def answer(self) -> None:
        """Completes a storage call. Raises the next StorageUnavailable of `failures`."""
        self.is_requested.set()
        try:
            await self.is_answering.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.failures:
            raise self.failures.pop(0)

    def next_segment(self) -> int:
        self._next_segment += 1
        return self._next_segment


class FakeExportHandle:
    """An export of the fake engine."""

    def __init__(self, engine: FakeTransferEngine, stored: StoredContext) -> None:
        self._engine, self._is_closed = engine, False
        self.context, self.segments, self.manifests = stored

    async def read(self, piece: PieceRef) -> bytes:
        assert not self._is_closed
        await self._engine.answer()
        if piece.name not in self._engine.objects:
            raise DataLoss(piece.name, "it is missing")
        return self._engine.objects[piece.name]

    async def close(self) -> None:
        self._engine.num_open -= not self._is_closed
        self._is_closed = True


class FakeImportHandle:
    """An import of the fake engine."""

    def __init__(self, engine: FakeTransferEngine) -> None:
        self._engine, self._is_over = engine, False
        self._names: set[str] = set()

    @property
    def form(self) -> str | None:
        return self._engine.form

    @property
    def block_size(self) -> int:
        return BLOCK_SIZE

    @property
    def fingerprint(self) -> str:
        return self._engine.digest

    def check(self, manifest: SegmentManifest) -> None:
        manifest.check_blocks(BLOCK_SIZE)

    def new_segment(self) -> int:
        return self._engine.next_segment()

    def new_attempt(self, segment: int) -> Attempt:
        assert self.form is not None
        return Attempt(self._engine.service, f"{self._engine.service}-{segment}", "a")

    async def put(self, name: str, content: bytes | bytearray) -> None:
        assert not self._is_over and name not in self._names, name
        await self._engine.answer()
        self._engine.objects[name] = bytes(content)
        self._names.add(name)

    async def adopt(
        self, context: ContextRecord, segments: Sequence[SegmentRecord], snapshots: Sequence[SnapshotRecord]
    ) -> Context:
        transfers = self._engine
        await transfers.answer()
        if context.id in transfers.contexts:
            raise AlreadyExists(f"contexts/{context.id}")
        objects = {
            snapshot.segment: (snapshot.manifest, transfers.objects[snapshot.manifest]) for snapshot in snapshots
        }
        manifests = {number: decode_manifest(content, name) for number, (name, content) in objects.items()}
        transfers.contexts[context.id] = StoredContext(context, segments, manifests)
        self._end()
        return transfers.get_context(context.id)

    async def drop(self) -> None:
        if not self._is_over:
            for name in self._names:
                del self._engine.objects[name]
            self._end()

    def _end(self) -> None:
        self._is_over = True
        self._engine.num_imports -= 1
