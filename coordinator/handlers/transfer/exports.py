"""Exports: contexts as archives, sent from any byte offset."""

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING

from coordinator.text.tokenizer_pool import TokenizerPool
from longleaf.context_archive.records import MAX_NAME, ContextHead
from longleaf.context_archive.writer import ArchiveWriter
from longleaf.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from longleaf.fingerprint import Fingerprint
from longleaf.storage.context_record import metadata_fields
from longleaf.storage.manifest import PieceRef
from longleaf.tenants import name_of, tenant_of
from longleaf.types import Cluster, ExportContext, ExportedArchive

if TYPE_CHECKING:
    from coordinator.engine.context_transfer import ContextExport, ContextTransfer

MAX_EXPORTS = 8
"""Maximum number of concurrent exports. Each holds a piece of about ten megabytes."""
CHUNK_BYTES = 1 << 18
RETRY_SECONDS = 5.0


class Exports:
    """Exports the contexts of an engine. `cluster` describes the serving cluster."""

    def __init__(
        self,
        engine: "ContextTransfer",
        threads: TokenizerPool,
        cluster: Callable[[], Cluster],
        max_exports: int = MAX_EXPORTS,
        tenant_share: float = 1.0,
    ) -> None:
        self._engine = engine
        self._threads = threads
        self._cluster = cluster
        self._max_exports = max_exports
        self._tenant_share = tenant_share
        self._num_open = Counter[str]()
        """Running exports by tenant."""

    async def run(self, wanted: ExportContext) -> AsyncGenerator[ExportedArchive | bytes, None]:
        """Yields the size and digest of the archive, then its bytes from the offset on. Closing the iterator releases
        the context.

        Raises NotFound, ContextLost, CheckpointChanged, FailedPrecondition if the archive no longer has the requested
        digest, InvalidArgument, ResourceExhausted, DataLoss, StorageUnavailable or Unavailable.
        """
        with self._counted(tenant_of(wanted.context)):
            exporting = await self._engine.open_export(wanted.context, with_keys=wanted.with_keys)
            try:
                packing = await self._pack(exporting)
                _check(wanted, packing)
                yield ExportedArchive(packing.num_bytes, packing.digest)
                async with aclosing(_bytes_of(exporting, packing, wanted.offset)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            finally:
                await exporting.close()

    @contextmanager
    def _counted(self, tenant: str) -> Generator[None, None, None]:
        own, count = self._num_open[tenant], self._num_open.total()
        if count >= self._max_exports or own >= self._max_exports * self._tenant_share:
            message = f"{own} of tenant {tenant}" if count < self._max_exports else f"{count}"
            raise ResourceExhausted("exports", f"{message} are running, which is the limit", RETRY_SECONDS)
        self._num_open[tenant] += 1
        try:
            yield
        finally:
            self._num_open[tenant] -= 1
            self._num_open += Counter()  # removes tenants with a count of zero

    async def _pack(self, exporting: "ContextExport") -> ArchiveWriter:
        head = _head(exporting, await self._engine.fingerprint(), self._cluster().model.name)
        return await self._threads.run(ArchiveWriter, head, exporting.segments, exporting.manifests)


def _head(exporting: "ContextExport", fingerprint: Fingerprint, model: str) -> ContextHead:
    context = exporting.context
    return ContextHead(fingerprint, model[:MAX_NAME], name_of(context.id), **metadata_fields(context))


def _check(wanted: ExportContext, packing: ArchiveWriter) -> None:
    if wanted.digest and wanted.digest != packing.digest:
        message = "it has changed since the export started; export it again"
        raise FailedPrecondition(f"contexts/{wanted.context}", message)
    if wanted.offset > packing.num_bytes:
        raise InvalidArgument("offset", f"{wanted.offset:,} is past the end at {packing.num_bytes:,}")


async def _bytes_of(exporting: "ContextExport", packing: ArchiveWriter, offset: int) -> AsyncGenerator[bytes, None]:
    """Yields chunks of about CHUNK_BYTES. One piece is in memory at a time."""
    chunk = bytearray()
    for content, passed in packing.stretches(offset):
        data = memoryview(await exporting.read(content)) if isinstance(content, PieceRef) else content
        for start in range(passed, len(data), CHUNK_BYTES):
            chunk += data[start : start + CHUNK_BYTES]
            if len(chunk) >= CHUNK_BYTES:
                yield bytes(chunk)
                chunk.clear()
        del data, content  # it may be large, and the next one may take long to arrive
    if chunk:
        yield bytes(chunk)
