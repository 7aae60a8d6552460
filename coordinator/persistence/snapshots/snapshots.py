"""Snapshots: the keys and values of a service's contexts on storage."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AnySet
from dataclasses import dataclass

from msgspec.structs import replace

from coordinator.cluster.ports import Ranks
from coordinator.kv_cache.token_paths import Segment
from coordinator.persistence.catalog.catalog import Catalog
from coordinator.persistence.catalog.records import CatalogContents, Change, CommitResult, SnapshotRecord
from coordinator.persistence.snapshots.context_notes import ContextNotes
from coordinator.persistence.snapshots.garbage_collector import SWEEP_SECONDS, GarbageCollector
from coordinator.persistence.snapshots.kv_format import KvFormat
from coordinator.persistence.snapshots.outbox_sender import OutboxSender, delete_attempt
from coordinator.persistence.snapshots.segment_writer import SegmentWriter
from coordinator.persistence.snapshots.segments_on_ranks import PlacedSegment, SegmentsOnRanks
from coordinator.persistence.snapshots.snapshot_index import RetentionPolicy, SnapshotIndex
from coordinator.persistence.snapshots.storage_health import MOST_SECONDS, StorageHealth
from coordinator.persistence.snapshots.store import AsyncStore
from coordinator.task_set import TaskSet
from longleaf.errors import DataLoss, InvalidArgument, LongleafError, NotFound, StorageUnavailable, Unavailable
from longleaf.little_endian import pack
from longleaf.storage.inventory import read_manifest
from longleaf.storage.manifest import SegmentManifest
from longleaf.storage.names import IMPORTED, Attempt, attempt_of_manifest
from longleaf.storage.store import Store
from longleaf.types import Storage

log = logging.getLogger(__name__)


RETRY_SECONDS = 60.0
"""Seconds before segments that did not fit on the disk are retried. A change of the catalog retries them at once."""
MAX_LISTED = 8
"""Maximum number of segments in a log line."""


@dataclass(frozen=True)
class _OnRanks:
    """The parts that save segments, once the ranks are ready."""

    placements: SegmentsOnRanks
    writer: SegmentWriter
    saving: StorageHealth
    sending: StorageHealth


def no_size_check(num_bytes: int) -> None:
    """A check that accepts any size."""
    del num_bytes


def _by_reason(damaged: Mapping[int, str]) -> dict[str, list[int]]:
    found = dict[str, list[int]]()
    for segment_id, reason in damaged.items():
        found.setdefault(reason, []).append(segment_id)
    return found


class Snapshots:
    """The snapshots of a catalog on storage. Not thread-safe: one event loop owns it. No operation delays a step.

    `fingerprint` is that of the checkpoint. `wall_clock` returns seconds since the Unix epoch.
    """

    def __init__(
        self,
        store: Store,
        catalog: Catalog,
        contents: CatalogContents,
        fingerprint: str,
        policy: RetentionPolicy,
        wall_clock: Callable[[], float],
        check_room: Callable[[int], None] = no_size_check,
    ) -> None:
        """`check_room` raises StorageUnavailable if the given number of bytes must not be written."""
        self._check_room = check_room
        self._store = AsyncStore(store)
        self._catalog = catalog
        self._index = contents
        self._fingerprint = fingerprint
        self._policy = policy
        self._records = SnapshotIndex(contents.snapshots, policy)
        self._notes = ContextNotes(contents)
        self._turn = asyncio.Lock()
        """Held while a change with notes is committed: notes are numbered in the order of the commits."""
        self._sender = OutboxSender(self._store, catalog)
        self._collector = GarbageCollector(self._store, contents, self._records, policy, wall_clock)
        self._on_ranks: _OnRanks | None = None
        self._form = KvFormat("", 1)
        self._wanted = dict.fromkeys(segment.id for segment in contents.segments) if policy.mode == "seal" else {}
        """Segments to save, in order."""
        self._too_large = set[int]()
        """Segments that do not fit on the disk."""
        self._retry: asyncio.TimerHandle | None = None
        """The timer that retries the segments that were too large."""
        self._requested: dict[int, list[asyncio.Future[None]]] = {}
        """The callers that wait for a segment to be saved, by segment."""
        self._attempts = set[str]()
        """Folders of running attempts."""
        self._may_save = asyncio.Event()
        self._tasks = TaskSet()

    # --- the start and the end ---

    def begin(self, placements: SegmentsOnRanks, ranks: Ranks, form: KvFormat, on_change: Callable[[], None]) -> None:
        """Start to save segments of ranks with this KV layout. `on_change` is called when the result of `view` may have
        changed.
        """
        self._form = form
        self._on_ranks = _OnRanks(
            placements,
            SegmentWriter(self._store, self._index.service_id, self._fingerprint, form, placements, ranks),
            StorageHealth("writing snapshots", on_change),
            StorageHealth("writing contexts to storage", on_change),
        )
        for work in (
            self._sender.run(self._on_ranks.sending),
            self._save_loop(self._on_ranks),
            self._collect_garbage(self._on_ranks),
        ):
            self._tasks.start(work)

    @property
    def _begun(self) -> _OnRanks:
        assert self._on_ranks is not None
        return self._on_ranks

    async def close(self) -> None:
        """Cancel all operations, without waiting for the storage."""
        self._cancel_retry()
        await self._tasks.cancel()
        for waiting in [future for futures in self._requested.values() for future in futures]:
            if not waiting.done():
                waiting.set_exception(Unavailable("the service is stopping"))

    # --- lookups ---

    @property
    def service_id(self) -> str:
        return self._index.service_id

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the checkpoint, as manifests contain it."""
        return self._fingerprint

    @property
    def may_write(self) -> bool:
        """Whether new snapshots are written."""
        return self._policy.mode != "off" and bool(self._form.text)

    @property
    def form(self) -> str:
        """The KV layout that these ranks write; empty if they cannot write."""
        return self._form.text

    @property
    def block_size(self) -> int:
        """Tokens per block in this layout."""
        return self._form.block_size

    def view(self) -> Storage:
        """Return the state of the storage for clients."""
        outage = (self._on_ranks.saving.reason or self._on_ranks.sending.reason) if self._on_ranks else ""
        return Storage(snapshots=self._policy.mode, url=self._store.store.url, error=outage)

    def is_usable(self, segment_id: int) -> bool:
        """Return whether storage has the segment in the layout of these ranks."""
        record = self._records.get(segment_id)
        return record is not None and record.form == self._form.text

    @property
    def total_bytes(self) -> int:
        """Bytes of all snapshots."""
        return self._records.num_bytes

    def num_bytes(self, segments: Mapping[int, int]) -> int:
        """Return the bytes of these segments, each multiplied by the count given for its id."""
        found = ((self._records.get(segment), count) for segment, count in segments.items())
        return sum(record.num_bytes * count for record, count in found if record is not None)

    async def manifest(self, segment: Segment) -> SegmentManifest:
        """Return the manifest of this segment. Raises NotFound, DataLoss when it belongs to another segment or cannot
        be restored, and StorageUnavailable.
        """
        record = self._records.get(segment.id)
        if record is None:
            raise NotFound(f"the snapshot of segment {segment.id}")
        return await self._store.run(self._read_manifest, record, segment)

    def _read_manifest(self, record: SnapshotRecord, segment: Segment) -> SegmentManifest:
        found = read_manifest(self._store.store, record.manifest)
        identity = (found.fingerprint, found.form, found.start, found.rope, found.token_ids)
        ids = pack(segment.token_ids).tobytes()
        if identity != (self._fingerprint, record.form, segment.start, segment.rope, ids):
            raise DataLoss(record.manifest, f"it does not match segment {segment.id} in the catalog")
        if record.form == self._form.text:  # other layouts are not restored here
            try:
                self.check(found)
            except InvalidArgument as error:
                raise DataLoss(record.manifest, str(error)) from error
        return found

    def check(self, manifest: SegmentManifest) -> None:
        """Raises InvalidArgument if these ranks cannot restore the segment of a manifest that has their layout."""
        self._form.check(manifest)

    async def read(self, name: str, digest: str) -> bytes:
        """Read a piece. Raises NotFound, DataLoss and StorageUnavailable."""
        return await self._store.get(name, digest)

    def pin(self, segment_id: int) -> str:
        """Protect the snapshot of a segment from deletion until the returned name is released."""
        name = self._records[segment_id].manifest
        self._sender.pin(name)
        return name

    def unpin(self, name: str) -> None:
        """Release a name returned by `pin`."""
        self._sender.unpin(name)

    async def write(self, name: str, content: bytes | bytearray) -> None:
        """Write an object of an attempt. Raises StorageUnavailable."""
        await self._store.run(self._check_room, len(content))
        await self._store.put(name, content)

    # --- changes ---

    async def commit(self, change: Change) -> None:
        """Commit a change to the catalog, with its notes for storage. Raises the errors of the catalog."""
        async with self._turn:
            change = replace(change, outgoing=self._notes.notes_for(change))
            self._committed(change, await self._catalog.commit(change))

    async def _rewrite_notes(self, recorded: AnySet[str]) -> None:
        """Write notes of all contexts except those in `recorded`."""
        async with self._turn:
            if outgoing := self._notes.again(recorded):
                change = Change(outgoing=outgoing)
                self._committed(change, await self._catalog.commit(change))

    def _committed(self, change: Change, committed: CommitResult) -> None:
        """Update the state after a commit."""
        self._notes.record_change(change)
        self._records.forget(committed.segments)
        for segment in committed.segments:
            self._wanted.pop(segment, None)
            self._answer(segment, NotFound(f"segment {segment}"))
        for record in change.snapshots:
            self._records.put(record)
        if self._policy.mode == "seal":
            self._wanted |= {one.id: None for one in change.segments if one.id not in self._records}
        if change.outgoing or committed.manifests:
            self._sender.notify()
        self.notify()

    def notify(self) -> None:
        """Resume saving: segments may have become resident."""
        self._may_save.set()

    def imported_with(self, segment_id: int) -> Sequence[int]:
        """Return the segments on storage that were imported from the same archive, including this one; empty for a
        segment written by this service.
        """
        attempt = self._attempt(segment_id)
        if attempt is None or not attempt.is_imported:
            return ()
        found = [record.segment for record in self._records.all]
        return [one for one in found if (other := self._attempt(one)) and other.attempt == attempt.attempt]

    def _attempt(self, segment_id: int) -> Attempt | None:
        record = self._records.get(segment_id)
        return None if record is None else attempt_of_manifest(record.manifest)

    async def forget(self, damaged: Mapping[int, str]) -> None:
        """Remove damaged snapshots, and save the segments again. `damaged` has the reason for each segment id. Raises
        StorageUnavailable.
        """
        for reason, segment_ids in _by_reason(damaged).items():
            what = ("the snapshot of segment", "is") if len(segment_ids) == 1 else ("snapshots of segments", "are")
            message = ", ".join(map(str, segment_ids[:MAX_LISTED])) + (", ..." if segment_ids[MAX_LISTED:] else "")
            log.warning("%s %s %s damaged; recomputing the tokens: %s", what[0], message, what[1], reason)
        await self._lose(list(damaged))

    async def _lose(self, segment_ids: Sequence[int]) -> None:
        """Remove unusable snapshots, and save the segments again."""
        await self._drop(segment_ids)
        if self._policy.mode == "seal":
            self._wanted |= dict.fromkeys(segment_ids)
            self.notify()

    async def _drop(self, segment_ids: Sequence[int]) -> None:
        committed = await self._catalog.commit(Change(dropped_snapshots=tuple(segment_ids)))
        for segment in segment_ids:
            self._records.drop(segment)
        if committed.manifests:
            self._sender.notify()

    # --- saving ---

    async def save(self, segment_ids: Sequence[int]) -> None:
        """Save segments, and return when all are on storage.

        Raises InvalidArgument when snapshots are off, NotFound for a segment that is deleted meanwhile, Unavailable for
        a segment that is not resident, and StorageUnavailable.
        """
        missing = [segment for segment in segment_ids if not self.is_usable(segment)]
        if missing and self._policy.mode == "off":
            raise InvalidArgument("snapshots", "this service writes no snapshots: it was started with --snapshots off")
        waits = list[asyncio.Future[None]]()
        for segment in missing:
            waiting = asyncio.get_running_loop().create_future()
            self._requested.setdefault(segment, []).append(waiting)
            self._wanted.setdefault(segment)
            waits.append(waiting)
        self.notify()
        await asyncio.gather(*waits)

    def _answer(self, segment_id: int, error: LongleafError | None = None) -> None:
        for waiting in self._requested.pop(segment_id, ()):
            if waiting.done():
                continue
            if error is None:
                waiting.set_result(None)
            else:
                waiting.set_exception(error)

    async def _save_loop(self, on_ranks: _OnRanks) -> None:
        health = on_ranks.saving
        while True:
            await self._may_save.wait()
            self._may_save.clear()
            last_uses, segment_id = on_ranks.placements.last_uses(), -1
            try:
                were_too_large = bool(self._too_large)
                self._too_large &= self._wanted.keys()
                for segment_id in list(self._wanted):
                    await self._save_one(segment_id, last_uses, on_ranks)
                self._cancel_retry()
                if self._too_large:
                    self._retry = asyncio.get_running_loop().call_later(RETRY_SECONDS, self.notify)
                elif were_too_large or not self._wanted:
                    health.set_healthy()
            except StorageUnavailable as error:
                if segment_id in self._wanted:  # else it has been deleted meanwhile
                    self._wanted[segment_id] = self._wanted.pop(segment_id)  # moved to the end of the queue
                health.set_failed(str(error))
                for segment_id in list(self._requested):
                    self._answer(segment_id, error)
                await health.wait()
                self._may_save.set()

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()

    async def _save_one(self, segment_id: int, last_uses: Mapping[int, float], on_ranks: _OnRanks) -> None:
        """Save a segment if it is resident. Raises StorageUnavailable; after other failures the segment is retried when
        the set of resident segments changes.
        """
        is_requested, resident = segment_id in self._requested, on_ranks.placements.placed(segment_id)
        if resident is None and not is_requested and segment_id not in self._records:
            return  # the common case, because many segments may be evicted
        if self.is_usable(segment_id) or not (is_requested or self._records.may_be_saved(segment_id, last_uses)):
            self._wanted.pop(segment_id, None)
            self._answer(segment_id)
            return
        try:
            if resident is None:
                raise Unavailable(f"segment {segment_id} is not in memory: ask its context a question and retry")
            if (error := await self._check_segment(resident)) is not None:
                self._too_large.add(segment_id)
                on_ranks.saving.set_failed(str(error))
                self._answer(segment_id, error)
                return
            await self._save(resident, on_ranks)
        except StorageUnavailable:
            raise
        except Unavailable as error:
            self._answer(segment_id, error)
            if on_ranks.placements.placed(segment_id) not in (None, resident):
                self.notify()  # it has already moved, so that no later event would trigger the retry
        except Exception as error:
            log.error("cannot save segment %d", segment_id, exc_info=error)
            self._wanted.pop(segment_id, None)
            self._answer(segment_id, Unavailable(f"segment {segment_id} was not saved: {error!r}"))
        else:
            self._wanted.pop(segment_id, None)
            self._answer(segment_id)

    async def _check_segment(self, segment: PlacedSegment) -> StorageUnavailable | None:
        """Return the error if this segment does not fit on the disk, but smaller ones may. Raises StorageUnavailable if
        no segment fits.
        """
        try:
            await self._store.run(self._check_room, self._form.num_bytes(segment))
        except StorageUnavailable as error:
            await self._store.run(self._check_room, 0)
            return error
        return None

    async def _save(self, segment: PlacedSegment, on_ranks: _OnRanks) -> None:
        attempt = on_ranks.writer.attempt(segment.segment.id)
        folder = attempt.manifest.rpartition("/")[0]
        self._attempts.add(folder)
        try:
            manifest, num_bytes = await on_ranks.writer.save(attempt, segment)
            record = SnapshotRecord(
                segment=segment.segment.id, manifest=attempt.manifest, form=manifest.form, num_bytes=num_bytes
            )
            change = Change(snapshots=(record,))
            committed = await self._catalog.commit(change)
        except Exception:  # not on cancellation: the commit may still succeed, and otherwise the sweep cleans up
            self._tasks.start(self._abandon(attempt))
            raise
        finally:
            self._attempts.discard(folder)
        if record.manifest not in committed.manifests:  # else the segment has been deleted meanwhile
            self._records.put(record)
        self._too_large.discard(segment.segment.id)
        if not self._too_large:
            on_ranks.saving.set_healthy()
        self._sender.notify()
        await self._enforce_limits(on_ranks.placements.last_uses())

    async def _abandon(self, attempt: Attempt) -> None:
        """Delete the objects of a failed attempt. If that fails, the sweep deletes them later."""
        try:
            await delete_attempt(self._store, attempt.manifest)
        except LongleafError as error:
            log.debug("cannot delete the rest of %s; garbage collection will: %s", attempt, error)

    # --- garbage collection ---

    async def _collect_garbage(self, on_ranks: _OnRanks) -> None:
        """Check the storage at the start and every hour."""
        is_compared = False
        while True:
            try:
                if not is_compared:
                    await self._compare()
                    is_compared = True
                await self._enforce_limits(on_ranks.placements.last_uses())
                await self._collector.sweep(self._needed())
            except LongleafError as error:
                log.warning("garbage collection failed: %s", error)
            await asyncio.sleep(SWEEP_SECONDS if is_compared else MOST_SECONDS)

    async def _compare(self) -> None:
        """Write missing notes of contexts, and forget snapshots that are missing from the storage."""
        recorded, missing = await self._collector.recorded_contexts(), await self._collector.find_missing()
        if missing:
            await self._lose(missing)
        await self._rewrite_notes(recorded)

    async def _enforce_limits(self, last_uses: Mapping[int, float]) -> None:
        """Delete snapshots that exceed the quota, and expired ones. Raises StorageUnavailable."""
        if surplus := self._collector.surplus(last_uses):
            await self._drop(surplus)

    def _needed(self) -> set[str]:
        """Return the folders that must be kept although no record names them."""
        return self._attempts | {name.rpartition("/")[0] for name in self._sender.pinned}

    def new_attempt(self, segment_id: int, archive: str) -> Attempt:
        """Return names for a segment of an imported archive. They are not swept until `end_attempt`."""
        attempt = self._begun.writer.attempt(segment_id, IMPORTED + archive)
        self._attempts.add(attempt.manifest.rpartition("/")[0])
        return attempt

    async def end_attempt(self, attempt: Attempt, *, keep: bool) -> None:
        """End an attempt. With `keep`, it was committed to the catalog; otherwise its objects are deleted."""
        self._attempts.discard(attempt.manifest.rpartition("/")[0])
        if not keep:
            await self._abandon(attempt)
