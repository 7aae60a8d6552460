"""Snapshots: the keys and values of a service's contexts on storage, from the catalog's first word to the sweep."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from collections.abc import Set as AnySet
from typing import Any

from msgspec.structs import replace

from coordinator.kv_cache.token_paths import Segment
from coordinator.persistence.catalog.records import CatalogContents, Change, CommitResult, SnapshotRecord
from coordinator.persistence.catalog.row_codec import little_endian
from coordinator.persistence.snapshots.context_notes import ContextNotes
from coordinator.persistence.snapshots.garbage_collector import GarbageCollector
from coordinator.persistence.snapshots.outbox_sender import OutboxSender, delete_attempt
from coordinator.persistence.snapshots.ports import (
    ContextUse,
    HeldSegment,
    KvFormat,
    Savers,
    SegmentSource,
    SnapshotCatalog,
)
from coordinator.persistence.snapshots.retention import RetentionPolicy
from coordinator.persistence.snapshots.segment_writer import Saver
from coordinator.persistence.snapshots.snapshot_index import SnapshotIndex
from coordinator.persistence.snapshots.storage_health import StorageHealth
from coordinator.persistence.snapshots.store import AsyncStore
from longleaf.errors import DataLoss, InvalidArgument, LongleafError, NotFound, StorageUnavailable, Unavailable
from longleaf.storage.inventory import read_manifest
from longleaf.storage.manifest import SegmentManifest
from longleaf.storage.names import IMPORTED, Attempt, attempt_of_manifest
from longleaf.storage.store import Store
from longleaf.types import Storage

log = logging.getLogger(__name__)


RETRY_SECONDS = 60.0
"""After which segments that did not fit on the disk are tried again, if no change came before."""
MAX_LISTED = 8
"""Segments in a line of the log."""


def any_room(num_bytes: int) -> None:
    """The storage may be filled."""
    del num_bytes


def _by_reason(damaged: Mapping[int, str]) -> dict[str, list[int]]:
    found = dict[str, list[int]]()
    for segment_id, reason in damaged.items():
        found.setdefault(reason, []).append(segment_id)
    return found


class Snapshots:
    """What a catalog has on storage. One event loop owns it; nothing that it does keeps a step waiting.

    `fingerprint` is that of the checkpoint, and `wall_clock` counts seconds since the epoch.
    """

    def __init__(
        self,
        store: Store,
        catalog: SnapshotCatalog,
        kept: CatalogContents,
        fingerprint: str,
        policy: RetentionPolicy,
        wall_clock: Callable[[], float],
        check_room: Callable[[int], None] = any_room,
    ) -> None:
        """`check_room` raises StorageUnavailable where so many bytes shall not be written."""
        self._check_room = check_room
        self._store = AsyncStore(store)
        self._catalog = catalog
        self._kept = kept
        self._fingerprint = fingerprint
        self._policy = policy
        self._wall_clock = wall_clock
        self._records = SnapshotIndex(kept.snapshots, policy)
        self._notes = ContextNotes(kept)
        self._turn = asyncio.Lock()
        """Of changes that make notes: these are numbered as they are kept."""
        self._sender = OutboxSender(self._store, catalog)
        self._trouble = StorageHealth("writing snapshots")
        self._holdings: SegmentSource | None = None
        self._saver: Saver | None = None
        self._cleaner: GarbageCollector | None = None
        self._form = KvFormat("", 1)
        self._wanted = dict.fromkeys(segment.id for segment in kept.segments) if policy.mode == "seal" else {}
        """Segments that are to be saved, the first one first."""
        self._too_large = set[int]()
        """Segments for which the disk lacks room."""
        self._retry: asyncio.TimerHandle | None = None
        """Tries these again."""
        self._asked: dict[int, list[asyncio.Future[None]]] = {}
        """Those of them that somebody waits for."""
        self._attempts = set[str]()
        """Folders of attempts under way."""
        self._may_save = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # --- the start and the end ---

    def begin(self, holdings: SegmentSource, ranks: Savers, form: KvFormat, on_change: Callable[[], None]) -> None:
        """Ranks of this form are there. `on_change` is called when `view` may answer otherwise than before."""
        for outage in (self._trouble, self._sender.trouble):
            outage.watch(on_change)
        self._holdings, self._form = holdings, form
        self._saver = Saver(self._store, self._kept.service_id, self._fingerprint, form, holdings, ranks)
        self._cleaner = GarbageCollector(
            self._store,
            self._kept,
            self._records,
            self._policy,
            self._needed,
            self._drop,
            self._lose,
            self._tell_again,
            holdings.uses,
            self._wall_clock,
        )
        for work in (self._sender.run(), self._save_for_ever(), self._cleaner.run()):
            self._start(work)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Waits for nothing that a storage may delay."""
        self._cancel_retry()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for waiting in [future for futures in self._asked.values() for future in futures]:
            if not waiting.done():
                waiting.set_exception(Unavailable("the service is stopping"))

    # --- what is known ---

    @property
    def service_id(self) -> str:
        return self._kept.service_id

    @property
    def fingerprint(self) -> str:
        """Of what reads the contexts, as manifests tell it."""
        return self._fingerprint

    @property
    def may_write(self) -> bool:
        """Whether anything new goes to storage."""
        return self._policy.mode != "off" and bool(self._form.text)

    @property
    def form(self) -> str:
        """Of what these ranks write; empty where they cannot."""
        return self._form.text

    @property
    def block_size(self) -> int:
        """Tokens of a block, in that form."""
        return self._form.block_size

    def view(self) -> Storage:
        """The storage, as clients see it."""
        outage = self._trouble.reason or self._sender.trouble.reason
        return Storage(snapshots=self._policy.mode, url=self._store.store.url, trouble=outage)

    def is_usable(self, segment_id: int) -> bool:
        """Whether a segment is there in the form of these ranks."""
        record = self._records.get(segment_id)
        return record is not None and record.form == self._form.text

    @property
    def total_bytes(self) -> int:
        """Bytes of all that is there."""
        return self._records.num_bytes

    def num_bytes(self, segments: Mapping[int, int]) -> int:
        """Bytes of these segments, each as often as is told by its id."""
        found = ((self._records.get(segment), count) for segment, count in segments.items())
        return sum(record.num_bytes * count for record, count in found if record is not None)

    async def manifest(self, segment: Segment) -> SegmentManifest:
        """Of this segment. Raises NotFound, DataLoss where it is of another one or cannot be restored, and
        StorageUnavailable."""
        record = self._records.get(segment.id)
        if record is None:
            raise NotFound(f"the snapshot of segment {segment.id}")
        return await self._store.run(self._read_manifest, record, segment)

    def _read_manifest(self, record: SnapshotRecord, segment: Segment) -> SegmentManifest:
        found = read_manifest(self._store.store, record.manifest)
        reported = (found.fingerprint, found.form, found.start, found.rope, found.token_ids)
        ids = little_endian(segment.token_ids).tobytes()
        if reported != (self._fingerprint, record.form, segment.start, segment.rope, ids):
            raise DataLoss(record.manifest, f"it is not of segment {segment.id} as it is kept")
        if record.form == self._form.text:  # another one is not restored here
            try:
                self.check(found)
            except InvalidArgument as error:
                raise DataLoss(record.manifest, str(error)) from error
        return found

    def check(self, manifest: SegmentManifest) -> None:
        """Raises InvalidArgument where these ranks cannot take in what a manifest of their form names."""
        self._form.check(manifest)

    async def read(self, name: str, digest: str) -> bytes:
        """A piece. Raises NotFound, DataLoss and StorageUnavailable."""
        return await self._store.get(name, digest)

    def hold(self, segment_id: int) -> str:
        """Has the snapshot of a segment stay on storage, whatever becomes of it, until its name is released."""
        name = self._records[segment_id].manifest
        self._sender.hold(name)
        return name

    def release(self, name: str) -> None:
        """Takes a hold back."""
        self._sender.release(name)

    async def write(self, name: str, content: bytes | bytearray) -> None:
        """An object of an attempt. Raises StorageUnavailable."""
        await self._store.run(self._check_room, len(content))
        await self._store.put(name, content)

    # --- changes ---

    async def commit(self, change: Change) -> None:
        """Keeps a change in the catalog, with what storage must be told of it. Raises what the catalog does."""
        async with self._turn:
            change = replace(change, outgoing=self._notes.of(change))
            self._committed(change, await self._catalog.commit(change))

    async def _tell_again(self, recorded: AnySet[str]) -> None:
        """Tells storage of all contexts but those of which it has a note."""
        async with self._turn:
            if outgoing := self._notes.again(recorded):
                change = Change(outgoing=outgoing)
                self._committed(change, await self._catalog.commit(change))

    def _committed(self, change: Change, committed: CommitResult) -> None:
        """A change is kept."""
        self._notes.note(change)
        self._records.forget(committed.segments)
        for segment in committed.segments:
            self._wanted.pop(segment, None)
            self._answer(segment, NotFound(f"segment {segment}"))
        for record in change.snapshots:
            self._records.put(record)
        if self._policy.mode == "seal":
            self._wanted |= {one.id: None for one in change.segments if one.id not in self._records}
        if change.outgoing or committed.manifests:
            self._sender.wake()
        self.wake()

    def wake(self) -> None:
        """Something may be held that was not."""
        self._may_save.set()

    def imported_with(self, segment_id: int) -> Sequence[int]:
        """The segments that came with the same archive and are on storage as they came, itself among them; none for one
        that was written here."""
        attempt = self._attempt(segment_id)
        if attempt is None or not attempt.is_imported:
            return ()
        found = [record.segment for record in self._records.all]
        return [one for one in found if (other := self._attempt(one)) and other.attempt == attempt.attempt]

    def _attempt(self, segment_id: int) -> Attempt | None:
        record = self._records.get(segment_id)
        return None if record is None else attempt_of_manifest(record.manifest)

    async def forget(self, damaged: Mapping[int, str]) -> None:
        """What storage has of segments is damaged, for these reasons: it goes, and is saved anew. Raises
        StorageUnavailable."""
        for reason, segment_ids in _by_reason(damaged).items():
            what = ("the snapshot of segment", "is") if len(segment_ids) == 1 else ("snapshots of segments", "are")
            message = ", ".join(map(str, segment_ids[:MAX_LISTED])) + (", ..." if segment_ids[MAX_LISTED:] else "")
            log.warning("%s %s %s damaged, and its tokens are read again: %s", what[0], message, what[1], reason)
        await self._lose(list(damaged))

    async def _lose(self, segment_ids: Sequence[int]) -> None:
        """Has snapshots go that cannot be used, and be written anew."""
        await self._drop(segment_ids)
        if self._policy.mode == "seal":
            self._wanted |= dict.fromkeys(segment_ids)
            self.wake()

    async def _drop(self, segment_ids: Sequence[int]) -> None:
        committed = await self._catalog.commit(Change(dropped_snapshots=tuple(segment_ids)))
        for segment in segment_ids:
            self._records.drop(segment)
        if committed.manifests:
            self._sender.wake()

    # --- saving ---

    async def save(self, segment_ids: Sequence[int]) -> None:
        """Returns when all of these are on storage. Raises InvalidArgument where nothing is to be written, NotFound for
        what is deleted meanwhile, Unavailable for what nobody holds now, and StorageUnavailable."""
        missing = [segment for segment in segment_ids if not self.is_usable(segment)]
        if missing and self._policy.mode == "off":
            raise InvalidArgument("snapshots", "this service writes none: it was started with --snapshots off")
        waits = list[asyncio.Future[None]]()
        for segment in missing:
            waiting = asyncio.get_running_loop().create_future()
            self._asked.setdefault(segment, []).append(waiting)
            self._wanted.setdefault(segment)
            waits.append(waiting)
        self.wake()
        await asyncio.gather(*waits)

    def _answer(self, segment_id: int, error: LongleafError | None = None) -> None:
        for waiting in self._asked.pop(segment_id, ()):
            if waiting.done():
                continue
            if error is None:
                waiting.set_result(None)
            else:
                waiting.set_exception(error)

    async def _save_for_ever(self) -> None:
        while True:
            await self._may_save.wait()
            self._may_save.clear()
            assert self._holdings is not None
            uses, segment_id = self._holdings.uses(), -1
            try:
                were_too_large = bool(self._too_large)
                self._too_large &= self._wanted.keys()
                for segment_id in list(self._wanted):
                    await self._save_one(segment_id, uses)
                self._cancel_retry()
                if self._too_large:
                    self._retry = asyncio.get_running_loop().call_later(RETRY_SECONDS, self.wake)
                elif were_too_large or not self._wanted:
                    self._trouble.end()
            except StorageUnavailable as error:
                if segment_id in self._wanted:  # else it has been deleted meanwhile
                    self._wanted[segment_id] = self._wanted.pop(segment_id)  # others first
                self._trouble.begin(str(error))
                for segment_id in list(self._asked):
                    self._answer(segment_id, error)
                await self._trouble.wait()
                self._may_save.set()

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()

    async def _save_one(self, segment_id: int, uses: Sequence[ContextUse]) -> None:
        """Raises StorageUnavailable; what cannot be saved for other reasons is tried again when something is held."""
        assert self._holdings is not None
        is_requested, resident = segment_id in self._asked, self._holdings.held(segment_id)
        if resident is None and not is_requested and segment_id not in self._records:
            return  # mostly, for many may be parked
        if self.is_usable(segment_id) or not (is_requested or self._records.may_be_saved(segment_id, uses)):
            self._wanted.pop(segment_id, None)
            self._answer(segment_id)
            return
        try:
            if resident is None:
                raise Unavailable(f"segment {segment_id} is not held now: ask its context, and try again")
            if (error := await self._check_segment(resident)) is not None:
                self._too_large.add(segment_id)
                self._trouble.begin(str(error))
                self._answer(segment_id, error)
                return
            await self._save(resident)
        except StorageUnavailable:
            raise
        except Unavailable as error:
            self._answer(segment_id, error)
            if self._holdings.held(segment_id) not in (None, resident):
                self.wake()  # nobody else will: it lies elsewhere already
        except Exception as error:
            log.error("segment %d is not saved", segment_id, exc_info=error)
            self._wanted.pop(segment_id, None)
            self._answer(segment_id, Unavailable(f"segment {segment_id} was not saved: {error!r}"))
        else:
            self._wanted.pop(segment_id, None)
            self._answer(segment_id)

    async def _check_segment(self, held: HeldSegment) -> StorageUnavailable | None:
        """The error for a segment that does not fit on the disk, where others may. Raises StorageUnavailable where none
        fits."""
        try:
            await self._store.run(self._check_room, self._form.num_bytes(held))
        except StorageUnavailable as error:
            await self._store.run(self._check_room, 0)
            return error
        return None

    async def _save(self, held: HeldSegment) -> None:
        assert self._saver is not None
        assert self._cleaner is not None
        attempt = self._saver.attempt(held.segment.id)
        folder = attempt.manifest.rpartition("/")[0]
        self._attempts.add(folder)
        try:
            manifest, num_bytes = await self._saver.save(attempt, held)
            record = SnapshotRecord(
                segment=held.segment.id, manifest=attempt.manifest, form=manifest.form, num_bytes=num_bytes
            )
            change = Change(snapshots=(record,))
            committed = await self._catalog.commit(change)
        except Exception:  # not at the end of the service: then it may be kept yet, and else is swept
            self._start(self._abandon(attempt))
            raise
        finally:
            self._attempts.discard(folder)
        if record.manifest not in committed.manifests:  # else the segment has been deleted meanwhile
            self._records.put(record)
        self._too_large.discard(held.segment.id)
        if not self._too_large:
            self._trouble.end()
        self._sender.wake()
        await self._cleaner.trim()

    async def _abandon(self, attempt: Attempt) -> None:
        """The sweep does it, too, but later."""
        try:
            await delete_attempt(self._store, attempt.manifest)
        except LongleafError as error:
            log.debug("what is left of %s stays for the sweep: %s", attempt, error)

    def _needed(self) -> set[str]:
        """Folders that stay though no record names them."""
        return self._attempts | {name.rpartition("/")[0] for name in self._sender.held}

    def new_attempt(self, segment_id: int, archive: str) -> Attempt:
        """Names for a segment of an imported archive, which is called so; they are not swept until `end_attempt`."""
        assert self._saver is not None
        attempt = self._saver.attempt(segment_id, IMPORTED + archive)
        self._attempts.add(attempt.manifest.rpartition("/")[0])
        return attempt

    async def end_attempt(self, attempt: Attempt, *, is_kept: bool) -> None:
        """It is kept in the catalog, or given up."""
        self._attempts.discard(attempt.manifest.rpartition("/")[0])
        if not is_kept:
            await self._abandon(attempt)
