"""Imports of contexts over streams that may break; another stream can resume an import."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from coordinator.auth.quotas import UNLIMITED, QuotaEnforcer
from coordinator.handlers.fair_share import eviction_victim
from coordinator.handlers.resumable_generations import CallLater, call_later
from coordinator.handlers.transfer.importer import ContextImporter
from coordinator.task_set import TaskSet
from longleaf.errors import (
    DeadlineExceeded,
    InvalidArgument,
    LongleafError,
    ResourceExhausted,
    Unavailable,
)
from longleaf.formatting import human_seconds
from longleaf.types import ArchiveChunk, ImportHeader, ImportProgress

if TYPE_CHECKING:
    from coordinator.engine.context_transfer import ContextTransfer

IDLE_SECONDS = 120.0
"""Seconds for which an open stream may send nothing."""
KEEP_SECONDS = 600.0
"""Seconds for which an import without a stream is kept."""
TRIM_SECONDS = 30.0
"""Seconds between two searches for expired imports."""
MAX_IMPORTS = 4
"""Most imports, running or waiting to be resumed: each holds a piece of about ten megabytes, and all token ids."""
LEAVE_SECONDS = 5.0
"""Seconds to wait during shutdown for imports to be dropped; the next start removes the rest."""
MAX_BYTES = 1 << 30
"""Bytes of memory that all imports may hold together."""
REPORT_BYTES = 1 << 20
RETRY_SECONDS = 5.0
Key = tuple[str, str | None, str]
"""The tenant, the requested name, and the upload id."""


class ImportSession:
    """An import. The latest stream owns it."""

    def __init__(self, header: ImportHeader, arrival: ContextImporter) -> None:
        self.header = header
        self.importer = arrival
        self.owner: object = None
        self.idle_since: float | None = None
        """When the last stream disconnected; None while a stream is open."""
        self._turn = asyncio.Lock()
        self._tasks = TaskSet()

    @property
    def key(self) -> Key:
        return self.header.tenant, self.header.context, self.header.upload_id

    def check(self, owner: object) -> None:
        """Raises Unavailable if another stream took over."""
        if self.owner is not owner:
            raise Unavailable("another stream continued this import")

    async def run_in_turn(self, owner: object, begin: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs work on the importer, after all earlier work. If the caller is cancelled, the work still completes.
        Raises the errors of the work, and Unavailable if another stream took over."""
        task = self._tasks.start(self._in_turn(owner, begin))
        task.add_done_callback(_retrieve_error)
        await asyncio.shield(task)
        self.check(owner)

    async def _in_turn(self, owner: object, begin: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async with self._turn:
            self.check(owner)
            await begin()

    async def drop(self) -> None:
        """Drops the import after the running work."""
        async with self._turn:
            await self.importer.drop()


class ImportSessions:
    """Imports contexts into an engine. `clock` counts seconds, `later` calls a function after a number of seconds,
    `wall_clock` counts seconds since the epoch.

    An import without a stream is kept for `keep_seconds`. It is dropped earlier when its tenant exceeds its share, or
    when a global limit is reached: then the oldest idle import of the tenant that holds most is dropped.
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
        self._tenant_share = tenant_share
        self._engine = engine
        self._vocabulary_size = vocabulary_size
        self._quotas = quotas
        self._clock, self._later, self._wall_clock = clock, later, wall_clock
        self._idle_seconds, self._keep_seconds, self._max_imports = idle_seconds, keep_seconds, max_imports
        self._max_bytes = max_bytes
        self._all: list[ImportSession] = []
        self._by_key: dict[Key, ImportSession] = {}
        self._drops = TaskSet()
        self._timer: asyncio.TimerHandle | None = None

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
        async with self._lease(found) as owner, aclosing(self._feed_pieces(found, owner, pieces)) as reports:
            async for report in reports:
                yield report

    async def _feed_pieces(
        self, found: ImportSession, owner: object, pieces: AsyncIterator[ImportHeader | ArchiveChunk]
    ) -> AsyncGenerator[ImportProgress, None]:
        arrival = found.importer
        await found.run_in_turn(owner, arrival.commit)
        num_reported = arrival.num_bytes
        if arrival.result is None:
            yield ImportProgress(received_bytes=num_reported)
        while arrival.result is None and (piece := await self._next(pieces)) is not None:
            await found.run_in_turn(owner, partial(_feed_piece, found, piece))
            self._check_room(found.header.tenant)
            if arrival.num_bytes - num_reported >= REPORT_BYTES:
                num_reported = arrival.num_bytes
                yield ImportProgress(received_bytes=num_reported)
            del piece
        if arrival.result is None:
            # Once this report is sent, it is certain that the client ended the stream and that the stream did not
            # break.
            yield ImportProgress(received_bytes=arrival.num_bytes)
            await found.run_in_turn(owner, arrival.finish)
        assert arrival.result is not None
        yield arrival.result

    async def _next(self, pieces: AsyncIterator[ImportHeader | ArchiveChunk]) -> ImportHeader | ArchiveChunk | None:
        """The next message; None at the end. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(self._idle_seconds):
                return await anext(pieces, None)
        except TimeoutError:
            message = f"the stream of this import sent nothing for {human_seconds(self._idle_seconds)}"
            raise DeadlineExceeded(message) from None

    # --- registry of imports ---

    def _find(self, header: ImportHeader) -> ImportSession | None:
        """The import to resume. Raises InvalidArgument if its size differs from the original one."""
        self._trim()
        found = self._by_key.get((header.tenant, header.context, header.upload_id)) if header.upload_id else None
        if found is not None and found.header.total_bytes != header.total_bytes:
            raise InvalidArgument("config.total_size_bytes", "differs from the start of this upload")
        made = found.importer.result if found is not None else None
        if found is None or made is None or made.context is None or self._is_made_by(made.context.id, header.upload_id):
            return found
        self._forget(found)  # it was deleted since: the name is free, or belongs to another context
        return None

    def num_of(self, tenant: str) -> int:
        """Imports of a tenant that are open or can be resumed."""
        self._trim()
        return sum(found.header.tenant == tenant for found in self._all)

    def _is_made_by(self, context: str, upload_id: str) -> bool:
        try:
            return self._engine.last_upload_id(context) == upload_id
        except LongleafError:
            return False

    def _add(self, header: ImportHeader) -> ImportSession:
        """Raises ResourceExhausted if there are too many imports."""
        self._quotas.check_upload()
        tenant, most = header.tenant, self._max_imports * self._tenant_share
        count = self.num_of(tenant)
        if most < self._max_imports and count >= most and not self._forget_oldest(tenant):
            message = f"{count} of tenant {tenant} are running; the limit is {int(most)}"
            raise ResourceExhausted("imports", message, RETRY_SECONDS)
        resident = Counter(other.header.tenant for other in self._all)
        if len(self._all) >= self._max_imports and not self._make_room(resident, tenant):
            message = f"{len(self._all)} are running, which is the limit"
            raise ResourceExhausted("imports", message, RETRY_SECONDS)
        found = ImportSession(
            header, ContextImporter(self._engine, header, self._vocabulary_size, self._wall_clock, self._quotas)
        )
        self._all.append(found)
        if header.upload_id:
            self._by_key[found.key] = found
        return found

    def _check_room(self, tenant: str) -> None:
        """Raises ResourceExhausted if the imports of the tenant, or all imports, hold too much memory."""
        most = self._max_bytes * self._tenant_share
        while self._bytes_by_tenant()[tenant] > most:
            if not self._forget_oldest(tenant):
                owner = "all imports" if most == self._max_bytes else f"those of tenant {tenant}"
                message = f"{owner} use too much memory; the limit is {int(most):,} bytes"
                raise ResourceExhausted("imports", message, RETRY_SECONDS)
        while (resident := self._bytes_by_tenant()).total() > self._max_bytes:
            if not self._make_room(resident, tenant):
                message = f"all imports use too much memory; the limit is {self._max_bytes:,} bytes"
                raise ResourceExhausted("imports", message, RETRY_SECONDS)

    def _bytes_by_tenant(self) -> Counter[str]:
        resident = Counter[str]()
        for found in self._all:
            resident[found.header.tenant] += found.importer.num_buffered_bytes
        return resident

    def _make_room(self, usage: Counter[str], tenant: str) -> bool:
        """Drops the oldest idle import of the tenant with the largest `usage`; another tenant than `tenant`
        must hold more than it. Returns whether an import was dropped."""
        idle = {found.header.tenant for found in self._all if found.idle_since is not None}
        victim = eviction_victim(usage, idle, tenant)
        return victim is not None and self._forget_oldest(victim)

    def _forget_oldest(self, tenant: str) -> bool:
        idle = [each for each in self._all if each.idle_since is not None and each.header.tenant == tenant]
        if idle:
            self._forget(min(idle, key=_idle_since))
        return bool(idle)

    @asynccontextmanager
    async def _lease(self, found: ImportSession) -> AsyncGenerator[object, None]:
        """The body owns an import, on behalf of one stream. An import that cannot be resumed ends with the body."""
        owner = found.owner = object()
        found.idle_since = None
        can_go_on = bool(found.header.upload_id)
        try:
            yield owner
        except LongleafError as error:
            can_go_on = can_go_on and isinstance(error, Unavailable | ResourceExhausted | DeadlineExceeded)
            raise
        finally:
            if found.owner is owner:
                found.owner, found.idle_since = None, self._clock()
                if not can_go_on:
                    self._forget(found)
                self._trim()

    def _forget(self, found: ImportSession) -> None:
        """Makes the import impossible to resume, and drops it."""
        if found in self._all:
            self._all.remove(found)
        if self._by_key.get(found.key) is found:
            del self._by_key[found.key]
        self._drops.start(found.drop())

    def _trim(self) -> None:
        now = self._clock()
        for found in list(self._all):
            if found.idle_since is not None and now - found.idle_since > self._keep_seconds:
                self._forget(found)
        if self._timer is None and any(found.idle_since is not None for found in self._all):
            self._timer = self._later(TRIM_SECONDS, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._trim()

    async def close(self) -> None:
        """Drops all unfinished imports. Idempotent."""
        for found in list(self._all):
            self._forget(found)
        if self._timer is not None:
            self._timer.cancel()
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


def _idle_since(found: ImportSession) -> float:
    return found.idle_since or 0.0
