"""Contexts and their tokens, told to a catalog: who changes them hears of it once that is kept."""

import asyncio
import copy
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from coordinator.engine.persistence_ports import Persistence
from coordinator.engine.record_mapping import context_of, context_record, renumbered, segment_of, segment_record
from coordinator.kv_cache.contexts import ContextTable, NamedContext
from coordinator.kv_cache.token_paths import NOWHERE, Segment, TokenPath
from coordinator.kv_cache.totals import Totals
from coordinator.persistence.catalog.records import (
    CatalogContents,
    Change,
    ContextRecord,
    SegmentRecord,
    SnapshotRecord,
)
from coordinator.scheduling.jobs import IngestJob
from coordinator.scheduling.scheduler import Scheduler
from longleaf.errors import AlreadyExists, DataLoss, LongleafError, Unavailable
from longleaf.tenants import tenant_of
from longleaf.types import ContextSettings

NOBODYS = ""
FLUSH_SECONDS = 30.0
"""How often is kept when contexts were used last."""
IDS_AT_ONCE = 256
"""Ids of segments that are noted at a time."""
T = TypeVar("T")
log = logging.getLogger(__name__)


class ContextPersistence:
    """The contexts of a scheduler, and a catalog: both are changed in the same order, and what cannot be kept is
    undone. What was begun is brought to its end, also when who asked for it does not wait. Without `lasting` nothing is
    kept.

    `delete` deletes a context of the scheduler, and `on_change` is called when that has something to tell; `wall_clock`
    dates contexts.
    """

    def __init__(
        self,
        persistence: Persistence | None,
        delete: Callable[[Scheduler, str], None],
        wall_clock: Callable[[], float],
        on_change: Callable[[], None],
    ) -> None:
        self._lasting = persistence
        self._delete = delete
        self._wall_clock = wall_clock
        self._on_change = on_change
        self._begun: Scheduler | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._turn = asyncio.Lock()
        """Of changes that tell of a whole context: each builds on what was kept before."""
        self._used: set[str] = set()
        """Contexts whose last use is not kept."""
        self._gone: set[str] = set()
        """Contexts that are deleted, and whose journal is not."""
        self._flush: asyncio.Task[None] | None = None
        self._num_noted = 0
        """Ids below are noted in the catalog."""

    @property
    def is_durable(self) -> bool:
        return self._lasting is not None

    @property
    def last_epoch(self) -> int:
        """Of the services before; 0: there was none."""
        return self._lasting.kept.epoch if self._lasting else 0

    @property
    def _scheduler(self) -> Scheduler:
        assert self._begun is not None
        return self._begun

    @property
    def _contexts(self) -> ContextTable:
        return self._scheduler.contexts

    # --- the start and the end ---

    async def begin(self, scheduler: Scheduler, epoch: int) -> None:
        """The scheduler begins with what is kept, in an epoch of this number. Raises StorageUnavailable."""
        self._begun = scheduler
        if self._lasting is not None:
            await self._lasting.catalog.note_epoch(epoch)
            self._take_up(self._lasting.kept)
            self._flush = asyncio.create_task(self._flush_for_ever())

    def _take_up(self, kept: CatalogContents) -> None:
        """Has the scheduler know all that is kept. Nothing of it is held."""
        segments = self._scheduler.segments
        segments.begin_ids(kept.next_segment)
        found = dict[int, Segment]()
        contexts = sorted(_sound(kept), key=lambda each: each[0].last_used)
        needed = {record.id: record for _, path in contexts for record in path}
        tenants = _tenants(contexts)
        for record in (needed[number] for number in sorted(needed)):
            before = found[record.parent].path if record.parent is not None else NOWHERE
            segment = found[record.id] = segment_of(record, before, tenants[record.id])
            segments.adopt(segment)
        for record, _ in contexts:
            path = found[record.segment].path.cut(record.num_tokens)
            try:
                self._contexts.adopt(context_of(record, path))
            except Exception as error:  # it stays in the catalog; no context stops a start
                log.error("context %s is left out: an unexpected error", record.id, exc_info=error)
        for number in sorted(needed, reverse=True):  # what only those need that are left out goes with them
            holding = segments.holdings.find(number)
            if holding is not None and not holding.num_references:
                segments.retain(holding.segment.path)
                segments.release(holding.segment.path)

    async def note_epoch(self, epoch: int) -> None:
        """Another epoch is about to begin: those of services to come have larger numbers, if that can be kept."""
        try:
            if self._lasting is not None:
                await self._lasting.catalog.note_epoch(epoch)
        except LongleafError as error:
            log.warning("epoch %d is not kept: %s", epoch, error)

    async def close(self) -> None:
        """Keeps all that is known by now."""
        if self._flush is not None:
            self._flush.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._keep_uses()

    async def _flush_for_ever(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            await self._keep_uses()
            self._clear_journal()

    async def _keep_uses(self) -> None:
        async with self._turn:
            used, self._used = self._used, set()
            found = [context for name in used if (context := self._contexts.find(name)) is not None]
            try:
                if found:
                    await self._commit(Change(contexts=tuple(map(context_record, found))))
            except LongleafError as error:
                self._used |= used
                log.warning("when contexts were used last is not kept: %s", error)

    async def _commit(self, change: Change) -> None:
        if self._lasting is not None:
            await (self._lasting.snapshots or self._lasting.catalog).commit(change)

    def num_bytes(self, context: NamedContext) -> int:
        """Bytes kept of a context: of its segments, and on storage."""
        totals = Totals()
        totals.add(context.id, context.num_tokens, context.path.segments)
        return self.total_bytes(totals)

    def total_bytes(self, totals: Totals) -> int:
        """The same of all contexts of a tenant."""
        if self._lasting is None:
            return 0
        snapshots = self._lasting.snapshots
        return totals.kept_bytes + (snapshots.num_bytes(totals.segments) if snapshots else 0)

    # --- changes ---

    def use(self, context_id: str | None) -> None:
        """A context is asked, if one is."""
        if (context := self._contexts.find(context_id)) is not None:
            context.used = self._wall_clock()
            context.num_hits += 1
            self._used.add(context.id)

    def seal(self, request_id: int) -> None:
        """A document has been read: it is acknowledged once it is kept."""
        self._start(self._seal(request_id))

    async def _seal(self, request_id: int) -> None:
        async with self._turn:
            await self._seal_next(request_id)
        self._on_change()

    async def _seal_next(self, request_id: int) -> None:
        job, now = self._scheduler.sealed(request_id), self._wall_clock()
        if job is None:
            return
        after = self._grown(job, now)
        segment = segment_record(job.tail.segment)
        try:
            uploads = ((after.id, after.upload_id),) if after.upload_id else ()
            change = Change(segments=(segment,), contexts=(context_record(after),), dropped_uploads=uploads)
            await self._commit(change)
        except LongleafError as error:
            self._scheduler.fail(request_id, error)
        except Exception as error:
            log.error("context %s is not kept: an unexpected error", after.id, exc_info=error)
            self._scheduler.fail(
                request_id, Unavailable(f"contexts/{after.id} was not kept; the service's log has why")
            )
        else:
            if not self._scheduler.acknowledge(request_id, now):
                await self._take_back(after.id)

    def _grown(self, job: IngestJob, now: float) -> NamedContext:
        """The context as it is once a document is a part of it."""
        known = self._contexts.find(job.context)
        after = copy.copy(known) if known else NamedContext(job.context, now, TokenPath(), job.request.capacity)
        after.grow(job.tail.segment, now, job.document.upload_id)
        after.change(job.document.settings, now)
        return after

    async def _take_back(self, context_id: str) -> None:
        """A context was given up while it was being kept: what is kept is what is known again."""
        known = self._contexts.find(context_id)
        change = Change(contexts=(context_record(known),)) if known else Change(dropped_contexts=(context_id,))
        try:
            await self._commit(change)
        except LongleafError as error:
            log.warning("context %s was given up, and may be there after the next start: %s", context_id, error)

    async def fork(self, source: str, context_id: str, num_tokens: int | None) -> NamedContext:
        """As the scheduler does. Raises StorageUnavailable when that cannot be kept, and NotFound if it is deleted
        meanwhile."""
        forked = self._scheduler.fork_context(source, context_id, num_tokens, self._wall_clock())
        await self._end(self._put(forked, lambda: self._undo_fork(forked)))
        return self._contexts.get(context_id)  # it may be gone by now

    def _undo_fork(self, forked: NamedContext) -> None:
        if self._contexts.find(forked.id) is forked:
            self._delete(self._scheduler, forked.id)

    def check_free(self, context_id: str) -> None:
        """Raises AlreadyExists."""
        if context_id in self._contexts or self._scheduler.is_read_into(context_id):
            raise AlreadyExists(f"contexts/{context_id}")

    async def adopt(
        self, record: ContextRecord, path: Sequence[SegmentRecord], snapshots: Sequence[SnapshotRecord] = ()
    ) -> NamedContext:
        """A context that was kept elsewhere, with the segments of its path, the first one first, and snapshots of
        these. Segments get new ids. It is kept, and then rests; also when who asked for it does not wait.

        Raises AlreadyExists, and StorageUnavailable when it cannot be kept.
        """
        return await self.adopt_as(renumbered(record, path, snapshots, self.take_ids(len(path))))

    def take_ids(self, count: int) -> int:
        """The first of so many ids of segments, which nobody else gets."""
        return self._scheduler.segments.take_ids(count)

    async def note_ids(self, segment_id: int) -> None:
        """Has an id that was taken never be given out again, also where nothing else is kept of its segment: objects on
        storage may be named after it. Raises StorageUnavailable."""
        if segment_id >= self._num_noted:
            number = segment_id + IDS_AT_ONCE
            await self._commit(Change(next_segment=number))
            self._num_noted = max(number, self._num_noted)

    async def adopt_as(self, change: Change) -> NamedContext:
        """As `adopt`, of one context and its path, whose segments have ids that were taken for them."""
        return await self._end(self._adopt(change))

    async def _adopt(self, change: Change) -> NamedContext:
        (record,) = change.contexts
        async with self._turn:
            self.check_free(record.id)
            await self._commit(change)
            try:
                self.check_free(record.id)  # steps go on meanwhile, and calls of clients
            except AlreadyExists:
                await self._take_back(record.id)
                raise
            context = self._enter(record, change.segments)
        self._on_change()
        return context

    def _enter(self, record: ContextRecord, path: Sequence[SegmentRecord]) -> NamedContext:
        """Has the scheduler know a context and its path. Nothing of it is held."""
        before = NOWHERE
        for each in path:
            segment = segment_of(each, before, tenant_of(record.id))
            self._scheduler.segments.adopt(segment)
            before = segment.path
        context = context_of(record, before.cut(record.num_tokens))
        self._contexts.adopt(context)
        return context

    async def update(self, context_id: str, settings: ContextSettings) -> NamedContext:
        """Raises NotFound, and StorageUnavailable when that cannot be kept."""
        contexts, before = self._contexts, self._contexts.get(context_id).settings
        context = contexts.change(context_id, settings, self._wall_clock())
        self._on_change()  # it may expire sooner
        await self._end(self._put(context, lambda: contexts.restore(context, before)))
        return contexts.get(context_id)

    async def _put(self, context: NamedContext, undo: Callable[[], None]) -> None:
        """A context has been made or changed; what cannot be kept is undone."""
        try:
            async with self._turn:
                if self._contexts.find(context.id) is context:  # else it has been deleted meanwhile
                    await self._commit(Change(contexts=(context_record(context),)))
        except LongleafError:
            undo()
            self._on_change()
            raise

    async def delete(self, context_id: str) -> None:
        """Raises NotFound, and StorageUnavailable when that cannot be kept: then the context is there again."""
        context = self._contexts.get(context_id)
        self._delete(self._scheduler, context_id)
        await self._end(self._drop_or_bring_back(context))

    async def _drop_or_bring_back(self, context: NamedContext) -> None:
        try:
            async with self._turn:
                await self._drop(context.id)
        except LongleafError:
            self._bring_back(context)
            self._on_change()
            raise

    async def _drop(self, context_id: str) -> None:
        await self._commit(Change(dropped_contexts=(context_id,)))
        self._gone.add(context_id)
        self._clear_journal()

    def _clear_journal(self) -> None:
        """Of contexts that are gone for good: what fails is tried again."""
        for context_id in list(self._gone):
            try:
                if self._lasting is not None and self._contexts.find(context_id) is None:
                    self._lasting.journal.remove_of_context(context_id)
                self._gone.discard(context_id)
            except LongleafError as error:
                log.warning(
                    "what the journal has of context %s, which is deleted, is still there: %s", context_id, error
                )

    def expire(self, context_id: str) -> None:
        """A context has expired. If that cannot be kept, it expires again when the service starts."""
        self._start(self._expire(context_id))

    async def _expire(self, context_id: str) -> None:
        try:
            async with self._turn:
                await self._drop(context_id)
        except LongleafError as error:
            log.warning("context %s has expired, and is still kept: %s", context_id, error)

    def _bring_back(self, context: NamedContext) -> None:
        if self._contexts.find(context.id) is not None:
            return  # another one has the name by now
        holdings = self._scheduler.segments.holdings
        known = {holding.segment for holding in holdings}
        for segment in context.path.segments:
            if segment not in known:
                self._scheduler.segments.adopt(segment)
        again = context_of(context_record(context), context.path)
        self._contexts.adopt(again)

    async def _end(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for the end of something; it comes to that also when the waiting is cancelled."""
        return await (asyncio.shield(self._start(work)) if self._lasting else work)  # else it is done at once

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._tasks.discard)
        return task


def _sound(kept: CatalogContents) -> Iterator[tuple[ContextRecord, tuple[SegmentRecord, ...]]]:
    """The contexts that are not damaged, and their paths."""
    for record in kept.contexts:
        with suppress(DataLoss):
            yield record, kept.path(record)


def _tenants(contexts: Iterable[tuple[ContextRecord, Sequence[SegmentRecord]]]) -> dict[int, str]:
    """Whose segments are, by id. What several tenants came to share, while they might, nobody finds any more."""
    found = dict[int, str]()
    for record, path in contexts:
        tenant = tenant_of(record.id)
        for segment in path:
            found[segment.id] = tenant if found.get(segment.id, tenant) == tenant else NOBODYS
    return found
