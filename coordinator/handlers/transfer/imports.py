"""Imports of contexts over streams that may break; another stream can resume an import."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from coordinator.auth.quotas import UNLIMITED, QuotaEnforcer
from coordinator.handlers.fair_share import tenant_shares_of
from coordinator.handlers.resumable_sessions import (
    IDLE_SECONDS,
    KEEP_SECONDS,
    MAX_BYTES,
    CallLater,
    Lease,
    ResumableSessions,
    call_later,
    next_message,
)
from coordinator.handlers.transfer.importer import ContextImporter
from coordinator.task_set import TaskSet
from longleaf.errors import (
    DeadlineExceeded,
    InvalidArgument,
    LongleafError,
    ResourceExhausted,
    Unavailable,
)
from longleaf.types import ArchiveChunk, ImportHeader, ImportProgress

if TYPE_CHECKING:
    from coordinator.engine.context_transfer import ContextTransfer

MAX_IMPORTS = 4
"""Most imports, running or waiting to be resumed: each holds a piece of about ten megabytes, and all token ids."""
LEAVE_SECONDS = 5.0
"""Seconds to wait during shutdown for imports to be dropped; the next start removes the rest."""
REPORT_BYTES = 1 << 20
Key = tuple[str, str | None, str]
"""The tenant, the requested name, and the upload id."""


class ImportSession:
    """An import, over any number of streams."""

    is_working = False
    """An import without a stream can be dropped at any time."""

    def __init__(self, header: ImportHeader, arrival: ContextImporter) -> None:
        self.header = header
        self.importer = arrival
        self._work: asyncio.Task[None] | None = None

    @property
    def num_buffered_bytes(self) -> int:
        return self.importer.num_buffered_bytes

    async def run(self, begin: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs work on the importer, after work that an earlier stream started. If the caller is cancelled, running
        work still completes. Raises the errors of the work."""
        await self._wait_idle()
        self._work = asyncio.create_task(begin())
        self._work.add_done_callback(_retrieve_error)
        await asyncio.shield(self._work)

    async def _wait_idle(self) -> None:
        if self._work is not None:
            await asyncio.wait([self._work])

    async def drop(self) -> None:
        """Drops the import after the running work."""
        await self._wait_idle()
        await self.importer.drop()


class ImportSessions:
    """Imports contexts into an engine. `clock` counts seconds, `later` calls a function after a number of seconds,
    `wall_clock` counts seconds since the epoch.

    See ResumableSessions for the retention and the limits, which apply to each tenant.
    """

    def __init__(
        self,
        engine: "ContextTransfer",
        vocabulary_size: int,
        clock: Callable[[], float] = time.monotonic,
        later: CallLater = call_later,
        wall_clock: Callable[[], float] = time.time,
        *,
        quotas: QuotaEnforcer = UNLIMITED,
        idle_seconds: float = IDLE_SECONDS,
        keep_seconds: float = KEEP_SECONDS,
        max_imports: int = MAX_IMPORTS,
        max_bytes: int = MAX_BYTES,
        tenant_share: float = 1.0,
    ) -> None:
        self._engine = engine
        self._vocabulary_size = vocabulary_size
        self._quotas = quotas
        self._wall_clock = wall_clock
        self._idle_seconds = idle_seconds
        self._drops = TaskSet()
        self._sessions = ResumableSessions[ImportSession](
            "import",
            clock,
            later,
            partial(tenant_shares_of, tenant_share=tenant_share),
            keep_seconds=keep_seconds,
            max_sessions=max_imports,
            max_bytes=max_bytes,
            on_remove=lambda found: self._drops.start(found.drop()),
        )

    async def run(self, pieces: AsyncIterator[ImportHeader | ArchiveChunk]) -> AsyncGenerator[ImportProgress, None]:
        """Yields progress; the last report has the context. Closing the iterator drops the import, unless it has an
        upload id: then it can be resumed.

        Raises the errors of ContextImporter, ResourceExhausted, and DeadlineExceeded if the stream is idle for too
        long.
        """
        header = await self._next(pieces)
        if not isinstance(header, ImportHeader):
            raise InvalidArgument("config", "must be in the first request, and only there")
        found = self._find(header) or self._add(header)
        async with self._lease(found) as lease, aclosing(lease.run(self._feed_pieces(found, pieces))) as reports:
            async for report in reports:
                yield report

    async def _feed_pieces(
        self, found: ImportSession, pieces: AsyncIterator[ImportHeader | ArchiveChunk]
    ) -> AsyncGenerator[ImportProgress, None]:
        arrival = found.importer
        await found.run(arrival.commit)
        num_reported = arrival.num_bytes
        if arrival.result is None:
            yield ImportProgress(received_bytes=num_reported)
        while arrival.result is None and (piece := await self._next(pieces)) is not None:
            await found.run(partial(_feed_piece, found, piece))
            self._sessions.update_size(found)
            if arrival.num_bytes - num_reported >= REPORT_BYTES:
                num_reported = arrival.num_bytes
                yield ImportProgress(received_bytes=num_reported)
            del piece
        if arrival.result is None:
            # Once this report is sent, it is certain that the client ended the stream and that the stream did not
            # break.
            yield ImportProgress(received_bytes=arrival.num_bytes)
            await found.run(arrival.finish)
        assert arrival.result is not None
        yield arrival.result

    async def _next(self, pieces: AsyncIterator[ImportHeader | ArchiveChunk]) -> ImportHeader | ArchiveChunk | None:
        return await next_message(pieces, self._idle_seconds, "import")

    def num_of(self, tenant: str) -> int:
        """Imports of a tenant that are open or can be resumed."""
        return self._sessions.num_of(tenant)

    def _find(self, header: ImportHeader) -> ImportSession | None:
        """The import to resume. Raises InvalidArgument if its size differs from the original one."""
        found = self._sessions.find(_key(header))
        if found is not None and found.header.total_bytes != header.total_bytes:
            raise InvalidArgument("config.total_size_bytes", "differs from the start of this upload")
        made = found.importer.result if found is not None else None
        if found is None or made is None or made.context is None or self._is_made_by(made.context.id, header.upload_id):
            return found
        self._sessions.forget(found)  # it was deleted since: the name is free, or belongs to another context
        return None

    def _is_made_by(self, context: str, upload_id: str) -> bool:
        try:
            return self._engine.last_upload_id(context) == upload_id
        except LongleafError:
            return False

    def _add(self, header: ImportHeader) -> ImportSession:
        """Raises ResourceExhausted if there are too many imports."""
        self._quotas.check_upload()
        arrival = ContextImporter(self._engine, header, self._vocabulary_size, self._wall_clock, self._quotas)
        found = ImportSession(header, arrival)
        self._sessions.add(found, (header.tenant, ""), _key(header) if header.upload_id else None)
        return found

    @asynccontextmanager
    async def _lease(self, found: ImportSession) -> AsyncGenerator[Lease, None]:
        """The body owns an import, on behalf of one stream. An import that cannot be resumed ends with the body."""
        lease = self._sessions.acquire(found)
        try:
            yield lease
        except LongleafError as error:
            if lease.is_current and not isinstance(error, Unavailable | ResourceExhausted | DeadlineExceeded):
                self._sessions.forget(found)
            raise
        finally:
            self._sessions.release(found, lease)

    async def close(self) -> None:
        """Drops all unfinished imports. Idempotent."""
        self._sessions.close()
        if self._drops:
            await asyncio.wait(self._drops, timeout=LEAVE_SECONDS)


async def _feed_piece(found: ImportSession, piece: ImportHeader | ArchiveChunk) -> None:
    """Passes the new part of a chunk to the importer. Raises InvalidArgument, and the errors of the importer."""
    if isinstance(piece, ImportHeader):
        raise InvalidArgument("config", "must be in the first request, and only there")
    num_bytes, total = found.importer.num_bytes, found.header.total_bytes
    if not 0 <= piece.offset <= num_bytes:
        raise InvalidArgument("chunk.offset", f"is {piece.offset:,}, but {num_bytes:,} bytes have been received")
    if total is not None and piece.offset + len(piece.data) > total:
        raise InvalidArgument("config.total_size_bytes", f"more than {total:,} bytes have been received")
    await found.importer.feed(piece.data[num_bytes - piece.offset :])


def _retrieve_error(task: asyncio.Task[None]) -> None:
    """Marks the error of a task as retrieved: a caller that still waited got it."""
    if not task.cancelled():
        task.exception()


def _key(header: ImportHeader) -> Key:
    return header.tenant, header.context, header.upload_id
