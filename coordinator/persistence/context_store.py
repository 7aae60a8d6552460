"""The persistence of an engine's contexts: their records in the catalog, and their keys on storage."""

import asyncio
import copy
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from msgspec.structs import replace

from coordinator.auth.tenant_usage import Room
from coordinator.cluster.ports import Ranks
from coordinator.kv_cache.contexts import ContextTable, NamedContext
from coordinator.kv_cache.positions import Positions
from coordinator.kv_cache.token_paths import EMPTY_PATH, Segment
from coordinator.kv_cache.totals import Totals
from coordinator.persistence.catalog.records import CatalogContents, Change, SnapshotRecord
from coordinator.persistence.catalog.stale_contexts import StaleContext
from coordinator.persistence.checkpoint_migration import CheckpointMigration, retokenized
from coordinator.persistence.open import PersistentState
from coordinator.persistence.snapshots.kv_format import KvFormat
from coordinator.persistence.snapshots.segments_on_ranks import SegmentsOnRanks
from coordinator.persistence.snapshots.snapshot_fetcher import SnapshotFetcher
from coordinator.recovery.epochs import Epochs
from coordinator.scheduling.jobs import IngestJob
from coordinator.scheduling.scheduler import Scheduler
from coordinator.task_set import TaskSet
from longleaf.errors import AlreadyExists, DataLoss, LongleafError, NotFound, Unavailable
from longleaf.storage.context_record import ContextRecord
from longleaf.storage.segment_record import SegmentRecord
from longleaf.tenants import tenant_of
from longleaf.types import ContextSettings, Storage

NO_OWNER = ""
FLUSH_SECONDS = 30.0
"""The interval in seconds at which the last uses of contexts are committed."""
IDS_AT_ONCE = 256
"""Number of segment ids that are reserved per write to the catalog."""
T = TypeVar("T")
log = logging.getLogger(__name__)


class ContextStore:
    """Keeps the contexts of a scheduler consistent with the catalog and with the snapshots on storage.

    Scheduler and catalog are changed in the same order. Each change is confirmed to the caller once the catalog has
    committed it, and is undone if it cannot be committed. A started change completes even if its caller is cancelled.
    Without a persistent state nothing is stored.

    `delete` deletes a context of the scheduler, `on_change` is called when the engine has new work, and `wall_clock`
    dates contexts.
    """

    def __init__(
        self,
        state: PersistentState | None,
        ranks: Ranks,
        delete: Callable[[Scheduler, str], None],
        wall_clock: Callable[[], float],
        on_change: Callable[[], None],
    ) -> None:
        self._state = state
        self.snapshots = state.snapshots if state else None
        self._ranks = ranks
        self._delete = delete
        self._wall_clock = wall_clock
        self._on_change = on_change
        self._migration = CheckpointMigration(state.stale, wall_clock) if state else None
        self._loaded: Scheduler | None = None
        self._on_ranks: SegmentsOnRanks | None = None
        self._fetcher: SnapshotFetcher | None = None
        self._last_generation: object = None
        self._tasks = TaskSet()
        self._turn = asyncio.Lock()
        """Held while a change of a whole context is committed, because each change builds on the previous one."""
        self._used: set[str] = set()
        """Contexts whose last use is not committed yet."""
        self._journals_to_clear: set[str] = set()
        """Deleted contexts whose journal entries still exist."""
        self._flush: asyncio.Task[None] | None = None
        self._num_recorded = 0
        """Ids below this one are reserved in the catalog."""

    @property
    def is_durable(self) -> bool:
        return self._state is not None

    @property
    def changed(self) -> Mapping[str, str]:
        """Contexts of earlier checkpoints of the model, by name, and the differences from the served one."""
        return self._state.stale.changed if self._state else {}

    @property
    def last_epoch(self) -> int:
        """The last epoch of earlier service runs; 0 if there was none."""
        return self._state.contents.epoch if self._state else 0

    @property
    def _scheduler(self) -> Scheduler:
        assert self._loaded is not None
        return self._loaded

    @property
    def _contexts(self) -> ContextTable:
        return self._scheduler.contexts

    # --- the start and the end ---

    async def load(self, scheduler: Scheduler, epochs: Epochs, block_size: int) -> None:
        """Start the scheduler with the stored contexts, once the ranks are ready. Raises StorageUnavailable."""
        self._loaded = scheduler
        if self._state is not None:
            await self._state.catalog.note_epoch(epochs.current.number)
            self._load(self._state.contents)
            self._flush = asyncio.create_task(self._flush_periodically())
        if self.snapshots is not None:
            self._on_ranks = on_ranks = SegmentsOnRanks(scheduler, epochs)
            ready, restoring = epochs.current.formation.readies[0], scheduler.recovery.restoring
            form = KvFormat("|".join([ready.form, ready.form_of_windows]) if ready.form else "", block_size)
            self._fetcher = SnapshotFetcher(restoring, self.snapshots, self._ranks, on_ranks.members, self._on_change)
            self.snapshots.begin(on_ranks, self._ranks, form, self._on_change)

    def _load(self, contents: CatalogContents) -> None:
        """Register all stored contexts with the scheduler. No keys are loaded."""
        segments = self._scheduler.segments
        segments.start_ids_at(contents.next_segment)
        found = dict[int, Segment]()
        contexts = sorted(_sound(contents), key=lambda each: each[0].last_used)
        needed = {record.id: record for _, path in contexts for record in path}
        tenants = _tenants(contexts)
        for record in (needed[number] for number in sorted(needed)):
            before = found[record.parent].path if record.parent is not None else EMPTY_PATH
            segment = found[record.id] = Segment.of(record, before, tenants[record.id])
            segments.adopt(segment)
        for record, _ in contexts:
            path = found[record.segment].path.cut(record.num_tokens)
            try:
                self._contexts.adopt(NamedContext.of(record, path))
            except Exception as error:  # it stays in the catalog; a single context must not prevent the start
                log.error("cannot load context %s: unexpected error", record.id, exc_info=error)
        for number in sorted(needed, reverse=True):  # release the segments that only skipped contexts need
            placement = segments.placements.find(number)
            if placement is not None and not placement.num_references:
                segments.retain(placement.segment.path)
                segments.release(placement.segment.path)

    async def note_epoch(self, epoch: int) -> None:
        """Record the number of the next epoch, so that later service runs use larger numbers. A failure is logged."""
        try:
            if self._state is not None:
                await self._state.catalog.note_epoch(epoch)
        except LongleafError as error:
            log.warning("cannot record epoch %d: %s", epoch, error)

    async def close(self) -> None:
        """Stop saving and restoring keys, finish the running changes, and commit the last uses."""
        if self._fetcher is not None:
            await self._fetcher.close()
        if self.snapshots is not None:
            await self.snapshots.close()
        if self._flush is not None:
            self._flush.cancel()
        if self._loaded is not None:
            await self._tasks.wait()
            await self._save_uses()

    async def _flush_periodically(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            await self._save_uses()
            self._clear_journal()

    async def _save_uses(self) -> None:
        async with self._turn:
            used, self._used = self._used, set()
            found = [context for name in used if (context := self._contexts.find(name)) is not None]
            try:
                if found:
                    await self._commit(Change(contexts=tuple(context.record for context in found)))
            except LongleafError as error:
                self._used |= used
                log.warning("cannot record when contexts were last used: %s", error)

    async def _commit(self, change: Change) -> None:
        if self._state is not None:
            await (self.snapshots or self._state.catalog).commit(change)

    def num_bytes(self, context: NamedContext) -> int:
        """Return the stored bytes of a context: those of its segments in the catalog, and those on storage."""
        totals = Totals()
        totals.add(context.id, context.num_tokens, context.path.segments)
        return self.total_bytes(totals)

    def total_bytes(self, totals: Totals) -> int:
        """Return the stored bytes of all contexts of a tenant."""
        if self._state is None:
            return 0
        return totals.stored_bytes + (self.snapshots.num_bytes(totals.segments) if self.snapshots else 0)

    # --- keys on storage ---

    def is_stored(self, segment_id: int) -> bool:
        """Whether the keys of a segment can be restored. See RestorePlanner."""
        return self.snapshots is not None and self.snapshots.is_usable(segment_id)

    def run_pending(self) -> None:
        """Start the fetches and saves that have become possible. Must be called after steps were scheduled or answered,
        or the ranks have changed.
        """
        if self.snapshots is None or self._fetcher is None or self._on_ranks is None:
            return
        self._fetcher.run_pending()
        if (now := self._on_ranks.generation) != self._last_generation:
            self._last_generation = now
            self.snapshots.notify()

    def view(self) -> Storage | None:
        """Return the state of the storage for clients."""
        return self.snapshots.view() if self.snapshots else None

    @property
    def num_snapshot_bytes(self) -> int | None:
        """Bytes of all keys and values on storage; None without storage."""
        return self.snapshots.total_bytes if self.snapshots else None

    # --- changes ---

    def record_use(self, context_id: str | None) -> None:
        """Record a use of the context, if it exists."""
        if (context := self._contexts.find(context_id)) is not None:
            context.record_hit(self._wall_clock())
            self._used.add(context.id)

    def seal(self, job: IngestJob) -> None:
        """Commit the context of a document that has been prefilled, and then acknowledge the ingest."""
        self._tasks.start(self._seal(job))

    async def _seal(self, job: IngestJob) -> None:
        async with self._turn:
            if job.is_running:  # else the ingest has ended meanwhile
                await self._seal_next(job)
        self._on_change()

    async def _seal_next(self, job: IngestJob) -> None:
        now, segment, document = self._wall_clock(), job.tail.segment, job.document
        known = self._contexts.find(job.context)
        after = copy.copy(known) if known else NamedContext.new(job.context, now, job.request.capacity)
        after.append(segment, now, document.settings, document.upload_id)
        try:
            uploads = ((after.id, document.upload_id),) if document.upload_id else ()
            change = Change(segments=(segment.record,), contexts=(after.record,), dropped_uploads=uploads)
            await self._commit(change)
        except LongleafError as error:
            self._scheduler.fail(job.request.id, error)
        except Exception as error:
            log.error("cannot save context %s: unexpected error", after.id, exc_info=error)
            message = f"contexts/{after.id} was not saved; see the log of the service"
            self._scheduler.fail(job.request.id, Unavailable(message))
        else:
            if job.is_running:
                self._scheduler.acknowledge(job, now)
            else:
                await self._restore_dropped(after.id)

    async def _restore_dropped(self, context_id: str) -> None:
        """Restore the stored state of a context that was dropped while its change was being committed."""
        known = self._contexts.find(context_id)
        change = Change(contexts=(known.record,)) if known else Change(dropped_contexts=(context_id,))
        try:
            await self._commit(change)
        except LongleafError as error:
            log.warning("context %s was dropped, but may exist again after the next start: %s", context_id, error)

    async def fork(self, source: str, context_id: str, num_tokens: int | None) -> NamedContext:
        """Fork a context, like `Scheduler.fork_context`. Raises StorageUnavailable if the fork cannot be committed, and
        NotFound if it is deleted meanwhile.
        """
        forked = self._scheduler.fork_context(source, context_id, num_tokens, self._wall_clock())
        await self._end(self._put(forked, lambda: self._undo_fork(forked)))
        return self._contexts.get(context_id)  # it may have been deleted meanwhile

    def _undo_fork(self, forked: NamedContext) -> None:
        if self._contexts.find(forked.id) is forked:
            self._delete(self._scheduler, forked.id)

    def check_free(self, context_id: str) -> None:
        """Raises AlreadyExists if the name is in use."""
        if context_id in self._contexts or self._scheduler.is_ingesting_into(context_id):
            raise AlreadyExists(f"contexts/{context_id}")

    async def adopt(
        self, record: ContextRecord, path: Sequence[SegmentRecord], snapshots: Sequence[SnapshotRecord] = ()
    ) -> NamedContext:
        """Add a context that was stored elsewhere, with the segments of its path in order, and their snapshots.

        Segments get new ids. The context is committed and starts evicted. The change completes even if the caller is
        cancelled.

        Raises AlreadyExists, and StorageUnavailable when the context cannot be committed.
        """
        return await self.adopt_reserved(renumbered(record, path, snapshots, self.reserve_segment_ids(len(path))))

    async def adopt_stale(
        self, context_id: str, positions: Positions, vocabulary_size: int, room: Room
    ) -> NamedContext:
        """Adopt a context of an earlier checkpoint, with its tokens and settings; no keys are loaded. Raises
        AlreadyExists, NotFound, CheckpointChanged if this checkpoint cannot use its tokens, DataLoss,
        StorageUnavailable, and the errors of `room`.
        """
        self.check_free(context_id)
        found = (await self._migration.find({context_id})).get(context_id) if self._migration else None
        if found is None:
            raise NotFound(f"contexts/{context_id}")
        return await self._adopt_stale(found, positions, vocabulary_size, room)

    async def adopt_all_stale(
        self, positions: Positions, vocabulary_size: int, tenant: str, room: Room
    ) -> tuple[list[NamedContext], dict[str, LongleafError]]:
        """Adopt all contexts of a tenant from earlier checkpoints. Returns the adopted contexts in the order of their
        names, and the errors of the refused ones by name.
        """
        adopted, refused = list[NamedContext](), dict[str, LongleafError]()
        if self._migration is None:
            return adopted, refused
        names = set[str]()
        for name in self._migration.names(tenant):
            try:
                self.check_free(name)
                names.add(name)
            except LongleafError as error:
                refused[name] = error
        for name, found in sorted((await self._migration.find(names)).items()):
            try:
                adopted.append(await self._adopt_stale(found, positions, vocabulary_size, room))
            except LongleafError as error:
                refused[name] = error
        return adopted, dict(sorted(refused.items()))

    async def _adopt_stale(
        self, found: StaleContext, positions: Positions, vocabulary_size: int, room: Room
    ) -> NamedContext:
        record, path = retokenized(found, positions, vocabulary_size)
        with room(record.num_tokens):
            return await self.adopt(record, path)

    def reserve_segment_ids(self, count: int) -> int:
        """Reserve `count` consecutive segment ids and return the first."""
        return self._scheduler.segments.reserve_ids(count)

    async def persist_reserved_id(self, segment_id: int) -> None:
        """Ensure that an id from `reserve_segment_ids` is never reused, even if its segment is not stored: names of
        objects on storage may contain the id. Raises StorageUnavailable."""
        if segment_id >= self._num_recorded:
            number = segment_id + IDS_AT_ONCE
            await self._commit(Change(next_segment=number))
            self._num_recorded = max(number, self._num_recorded)

    async def adopt_reserved(self, change: Change) -> NamedContext:
        """Like `adopt`, for a change with one context and its path, whose segments already have reserved ids."""
        return await self._end(self._adopt(change))

    async def _adopt(self, change: Change) -> NamedContext:
        (record,) = change.contexts
        async with self._turn:
            self.check_free(record.id)
            await self._commit(change)
            try:
                self.check_free(record.id)  # steps and calls of clients continue during the commit
            except AlreadyExists:
                await self._restore_dropped(record.id)
                raise
            context = self._register(record, change.segments)
        self._on_change()
        return context

    def _register(self, record: ContextRecord, path: Sequence[SegmentRecord]) -> NamedContext:
        """Register a context and its path with the scheduler. No keys are loaded."""
        before = EMPTY_PATH
        for each in path:
            segment = Segment.of(each, before, tenant_of(record.id))
            self._scheduler.segments.adopt(segment)
            before = segment.path
        context = NamedContext.of(record, before.cut(record.num_tokens))
        self._contexts.adopt(context)
        return context

    async def update(self, context_id: str, settings: ContextSettings) -> NamedContext:
        """Raises NotFound, and StorageUnavailable when the change cannot be committed."""
        contexts, before = self._contexts, self._contexts.get(context_id).settings
        context = contexts.change(context_id, settings, self._wall_clock())
        self._on_change()  # the context may expire earlier than before
        await self._end(self._put(context, lambda: contexts.restore(context, before)))
        return contexts.get(context_id)

    async def _put(self, context: NamedContext, undo: Callable[[], None]) -> None:
        """Commit a new or changed context, or undo the change."""
        try:
            async with self._turn:
                if self._contexts.find(context.id) is context:  # else it has been deleted meanwhile
                    await self._commit(Change(contexts=(context.record,)))
        except LongleafError:
            undo()
            self._on_change()
            raise

    async def delete(self, context_id: str) -> None:
        """Raises NotFound, and StorageUnavailable when the deletion cannot be committed; the context then remains."""
        context = self._contexts.get(context_id)
        self._delete(self._scheduler, context_id)
        await self._end(self._drop_or_restore(context))

    async def _drop_or_restore(self, context: NamedContext) -> None:
        try:
            async with self._turn:
                await self._drop(context.id)
        except LongleafError:
            self._restore(context)
            self._on_change()
            raise

    async def _drop(self, context_id: str) -> None:
        await self._commit(Change(dropped_contexts=(context_id,)))
        self._journals_to_clear.add(context_id)
        self._clear_journal()

    def _clear_journal(self) -> None:
        """Remove the journal entries of deleted contexts. Failures are retried later."""
        for context_id in list(self._journals_to_clear):
            try:
                if self._state is not None and self._contexts.find(context_id) is None:
                    self._state.journal.remove_of_context(context_id)
                self._journals_to_clear.discard(context_id)
            except LongleafError as error:
                log.warning("cannot remove the deleted context %s from the journal: %s", context_id, error)

    def expire(self, context_id: str) -> None:
        """Delete an expired context from the catalog. If that fails, the context expires again at the next start."""
        self._tasks.start(self._expire(context_id))

    async def _expire(self, context_id: str) -> None:
        try:
            async with self._turn:
                await self._drop(context_id)
        except LongleafError as error:
            log.warning("cannot delete the expired context %s: %s", context_id, error)

    def _restore(self, context: NamedContext) -> None:
        if self._contexts.find(context.id) is not None:
            return  # the name has been reused meanwhile
        placements = self._scheduler.segments.placements
        known = {placement.segment for placement in placements}
        for segment in context.path.segments:
            if segment not in known:
                self._scheduler.segments.adopt(segment)
        self._contexts.adopt(NamedContext(context.record, context.path))

    async def _end(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for the result of `work`. With a store, `work` completes even if the caller is cancelled."""
        if self._state is None:
            return await work  # it never suspends
        return await asyncio.shield(self._tasks.start(work))


def renumbered(
    record: ContextRecord, path: Sequence[SegmentRecord], snapshots: Sequence[SnapshotRecord], first_id: int
) -> Change:
    """Stored records of a context from another catalog: its segments get the ids from `first_id` on, in path order."""
    ids = {segment.id: first_id + i for i, segment in enumerate(path)}
    parents = [None, *ids.values()]
    segments = [replace(each, id=ids[each.id], parent=parent) for each, parent in zip(path, parents, strict=False)]
    return Change(
        segments=tuple(segments),
        contexts=(replace(record, segment=segments[-1].id),),
        snapshots=tuple(replace(each, segment=ids[each.segment]) for each in snapshots),
    )


def _sound(contents: CatalogContents) -> Iterator[tuple[ContextRecord, tuple[SegmentRecord, ...]]]:
    """Yield the undamaged contexts and their paths."""
    for record in contents.contexts:
        with suppress(DataLoss):
            yield record, contents.path(record)


def _tenants(contexts: Iterable[tuple[ContextRecord, Sequence[SegmentRecord]]]) -> dict[int, str]:
    """Return the tenant of each segment, by segment id. A segment that an earlier version shared between tenants
    belongs to no tenant, so that it is not shared again.
    """
    found = dict[int, str]()
    for record, path in contexts:
        tenant = tenant_of(record.id)
        for segment in path:
            found[segment.id] = tenant if found.get(segment.id, tenant) == tenant else NO_OWNER
    return found
