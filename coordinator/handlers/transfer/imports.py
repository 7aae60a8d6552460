"""Imports: contexts that come in over streams that may break, and go on over others."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

from coordinator.auth.quotas import UNLIMITED, QuotaEnforcer
from coordinator.handlers.fair_share import loser_of
from coordinator.handlers.resumable_generations import CallLater, Timer, call_later
from coordinator.handlers.transfer.importer import ContextImporter
from coordinator.handlers.transfer.ports import TransferEngine
from longleaf.errors import (
    DeadlineExceeded,
    InvalidArgument,
    LongleafError,
    ResourceExhausted,
    Unavailable,
)
from longleaf.formatting import human_seconds
from longleaf.types import ArchiveChunk, ImportHeader, ImportProgress

IDLE_SECONDS = 120.0
"""How long an open stream may send nothing."""
KEEP_SECONDS = 600.0
"""How long an import without a stream is kept."""
TRIM_SECONDS = 30.0
"""How often is looked for what was kept long enough."""
MAX_IMPORTS = 4
"""Those under way and those kept: each holds a piece of some ten megabytes, and all token ids."""
LEAVE_SECONDS = 5.0
"""How long is waited at the end for what is given up; the next start sweeps what is left."""
MAX_BYTES = 1 << 30
"""Memory of all of them."""
REPORT_BYTES = 1 << 20
RETRY_SECONDS = 5.0
Key = tuple[str, str | None, str]
"""The tenant, the name that was asked for, and the upload id."""


class ImportSession:
    """An import. The stream that came last owns it."""

    def __init__(self, header: ImportHeader, arrival: ContextImporter) -> None:
        self.header = header
        self.arrival = arrival
        self.owner: object = None
        self.idle_since: float | None = None
        """When its last stream left; None while there is one."""
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def key(self) -> Key:
        return self.header.tenant, self.header.context, self.header.upload_id

    def check(self, owner: object) -> None:
        """Raises Unavailable when another stream took over."""
        if self.owner is not owner:
            raise Unavailable("another stream goes on with this import")

    async def work(self, owner: object, begin: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Does something with the arrival, behind all that was begun before. If the caller is cancelled, that goes on
        to its end. Raises what it raises, and Unavailable when another stream took over."""
        task = asyncio.create_task(self._in_turn(owner, begin))
        self._tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._note)
        await asyncio.shield(task)
        self.check(owner)

    async def _in_turn(self, owner: object, begin: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async with self._turn:
            self.check(owner)
            await begin()

    def _note(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # it has been told to whoever still waited

    async def drop(self) -> None:
        """Gives it up, behind what is under way."""
        async with self._turn:
            await self.arrival.drop()


class ImportSessions:
    """Takes contexts into a house. `clock` counts seconds, `later` calls after so many, `wall_clock` counts them since
    the epoch.

    What nobody listens to is kept for `keep_seconds`, and gives way to others before: to those of its tenant where that
    has its share, else to all, the oldest first of the tenant that has most.
    """

    def __init__(
        self,
        house: TransferEngine,
        vocabulary_size: int,
        clock: Callable[[], float] = time.monotonic,
        later: CallLater = call_later,
        wall_clock: Callable[[], float] = time.time,
        *,
        ledger: QuotaEnforcer = UNLIMITED,
        idle_seconds: float = IDLE_SECONDS,
        keep_seconds: float = KEEP_SECONDS,
        max_imports: int = MAX_IMPORTS,
        max_bytes: int = MAX_BYTES,
        tenant_share: float = 1.0,
    ) -> None:
        self._tenant_share = tenant_share
        self._house = house
        self._vocabulary_size = vocabulary_size
        self._ledger = ledger
        self._clock, self._later, self._wall_clock = clock, later, wall_clock
        self._idle_seconds, self._keep_seconds, self._max_imports = idle_seconds, keep_seconds, max_imports
        self._max_bytes = max_bytes
        self._all: list[ImportSession] = []
        self._by_key: dict[Key, ImportSession] = {}
        self._drops: set[asyncio.Task[None]] = set()
        self._timer: Timer | None = None

    async def run(self, pieces: AsyncIterator[ImportHeader | ArchiveChunk]) -> AsyncGenerator[ImportProgress, None]:
        """Progress, the last with the context. Closing the iterator gives the import up and leaves nothing behind,
        unless it has an upload id: then it can be resumed.

        Raises what ContextImporter raises, ResourceExhausted, and DeadlineExceeded when nothing comes for too long.
        """
        header = await self._next(pieces)
        if not isinstance(header, ImportHeader):
            raise InvalidArgument("config", "must be in the first request, and only there")
        found = self._find(header) or self._add(header)
        async with self._owned(found) as owner, aclosing(self._take(found, owner, pieces)) as reports:
            async for report in reports:
                yield report

    async def _take(
        self, found: ImportSession, owner: object, pieces: AsyncIterator[ImportHeader | ArchiveChunk]
    ) -> AsyncGenerator[ImportProgress, None]:
        arrival = found.arrival
        await found.work(owner, arrival.settle)
        reported = arrival.num_bytes
        if arrival.made is None:
            yield ImportProgress(received_bytes=reported)
        while arrival.made is None and (piece := await self._next(pieces)) is not None:
            await found.work(owner, partial(_take, found, piece))
            self._check_room(found.header.tenant)
            if arrival.num_bytes - reported >= REPORT_BYTES:
                reported = arrival.num_bytes
                yield ImportProgress(received_bytes=reported)
            del piece
        if arrival.made is None:
            # Only once this has gone out, the end of the pieces was the client's, and not that of a broken stream.
            yield ImportProgress(received_bytes=arrival.num_bytes)
            await found.work(owner, arrival.finish)
        assert arrival.made is not None
        yield arrival.made

    async def _next(self, pieces: AsyncIterator[ImportHeader | ArchiveChunk]) -> ImportHeader | ArchiveChunk | None:
        """None at the end. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(self._idle_seconds):
                return await anext(pieces, None)
        except TimeoutError:
            message = f"the stream of this import sent nothing for {human_seconds(self._idle_seconds)}"
            raise DeadlineExceeded(message) from None

    # --- which imports there are ---

    def _find(self, header: ImportHeader) -> ImportSession | None:
        """The import that is resumed. Raises InvalidArgument when it began in another way."""
        self._trim()
        found = self._by_key.get((header.tenant, header.context, header.upload_id)) if header.upload_id else None
        if found is not None and found.header.total_bytes != header.total_bytes:
            raise InvalidArgument("config.total_size_bytes", "is not what this upload began with")
        made = found.arrival.made if found is not None else None
        if found is None or made is None or made.context is None or self._is_there(made.context.id, header.upload_id):
            return found
        self._forget(found)  # it was deleted since: the name is free, or another's
        return None

    def num_of(self, tenant: str) -> int:
        """Imports of a tenant that are open, or kept to be resumed."""
        self._trim()
        return sum(found.header.tenant == tenant for found in self._all)

    def _is_there(self, context: str, upload_id: str) -> bool:
        try:
            return self._house.made_by(context) == upload_id
        except LongleafError:
            return False

    def _add(self, header: ImportHeader) -> ImportSession:
        """Raises ResourceExhausted when there are too many."""
        self._ledger.check_upload()
        tenant, most = header.tenant, self._max_imports * self._tenant_share
        count = self.num_of(tenant)
        if most < self._max_imports and count >= most and not self._forget_oldest(tenant):
            message = f"{count} of the tenant {tenant} are under way, at most {int(most)} may be"
            raise ResourceExhausted("imports", message, RETRY_SECONDS)
        resident = Counter(other.header.tenant for other in self._all)
        if len(self._all) >= self._max_imports and not self._make_room(resident, tenant):
            message = f"{len(self._all)} are under way, and there may be no more"
            raise ResourceExhausted("imports", message, RETRY_SECONDS)
        found = ImportSession(
            header, ContextImporter(self._house, header, self._vocabulary_size, self._wall_clock, self._ledger)
        )
        self._all.append(found)
        if header.upload_id:
            self._by_key[found.key] = found
        return found

    def _check_room(self, tenant: str) -> None:
        """Raises ResourceExhausted when those of the tenant hold too much, or all of them."""
        most = self._max_bytes * self._tenant_share
        while self._bytes_by_tenant()[tenant] > most:
            if not self._forget_oldest(tenant):
                owner = "all together" if most == self._max_bytes else f"those of the tenant {tenant}"
                message = f"{owner} hold too much, at most {int(most):,} bytes may be held"
                raise ResourceExhausted("imports", message, RETRY_SECONDS)
        while (resident := self._bytes_by_tenant()).total() > self._max_bytes:
            if not self._make_room(resident, tenant):
                message = f"all together hold too much, at most {self._max_bytes:,} bytes may be held"
                raise ResourceExhausted("imports", message, RETRY_SECONDS)

    def _bytes_by_tenant(self) -> Counter[str]:
        resident = Counter[str]()
        for found in self._all:
            resident[found.header.tenant] += found.arrival.num_held_bytes
        return resident

    def _make_room(self, held: Counter[str], tenant: str) -> bool:
        """Drops what nobody listens to, of the tenant that has most by `held`; of others than `tenant` only where they
        have more. Says whether there was something."""
        idle = {found.header.tenant for found in self._all if found.idle_since is not None}
        loser = loser_of(held, idle, tenant)
        return loser is not None and self._forget_oldest(loser)

    def _forget_oldest(self, tenant: str) -> bool:
        idle = [each for each in self._all if each.idle_since is not None and each.header.tenant == tenant]
        if idle:
            self._forget(min(idle, key=_idle_since))
        return bool(idle)

    @asynccontextmanager
    async def _owned(self, found: ImportSession) -> AsyncGenerator[object, None]:
        """A stream, its owner, goes on with an import in here. With it ends what cannot be resumed."""
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
        """Nothing of it can be resumed any more."""
        if found in self._all:
            self._all.remove(found)
        if self._by_key.get(found.key) is found:
            del self._by_key[found.key]
        drop = asyncio.create_task(found.drop())
        self._drops.add(drop)  # the loop itself keeps only weak references
        drop.add_done_callback(self._drops.discard)

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
        """Gives up what was not made. Idempotent."""
        for found in list(self._all):
            self._forget(found)
        if self._timer is not None:
            self._timer.cancel()
        if self._drops:
            await asyncio.wait(self._drops, timeout=LEAVE_SECONDS)


async def _take(found: ImportSession, piece: ImportHeader | ArchiveChunk) -> None:
    """Takes what of a piece has not come before. Raises InvalidArgument, and as the arrival does."""
    if isinstance(piece, ImportHeader):
        raise InvalidArgument("config", "must be in the first request, and only there")
    num_bytes, total = found.arrival.num_bytes, found.header.total_bytes
    if not 0 <= piece.offset <= num_bytes:
        raise InvalidArgument("piece.offset", f"is {piece.offset:,}, and {num_bytes:,} bytes have come")
    if total is not None and piece.offset + len(piece.data) > total:
        raise InvalidArgument("config.total_size_bytes", f"more than {total:,} bytes have come")
    await found.arrival.take(piece.data[num_bytes - piece.offset :])


def _idle_since(found: ImportSession) -> float:
    return found.idle_since or 0.0
