"""Garbage collection on storage: deletes snapshots over the quota, expired snapshots, and unreferenced objects."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from collections.abc import Set as AnySet

from coordinator.persistence.catalog.records import CatalogContents
from coordinator.persistence.snapshots.ports import ContextUse
from coordinator.persistence.snapshots.retention import RetentionPolicy
from coordinator.persistence.snapshots.snapshot_index import SnapshotIndex
from coordinator.persistence.snapshots.storage_health import MOST_SECONDS
from coordinator.persistence.snapshots.store import AsyncStore
from longleaf.errors import LongleafError
from longleaf.storage.gc import sweep
from longleaf.storage.names import notes_folder, place_of_note, segments_folder

SWEEP_SECONDS = 3600.0
log = logging.getLogger(__name__)


class GarbageCollector:
    """Checks the storage of one service at the start and every hour.

    `drop` deletes snapshots of segments, and `lose` records missing ones. `uses` returns the last uses of contexts.
    `needed` returns folders that must be kept although no record refers to them. `rewrite_notes` writes the notes
    of all contexts except the given ones.
    """

    def __init__(
        self,
        store: AsyncStore,
        contents: CatalogContents,
        records: SnapshotIndex,
        policy: RetentionPolicy,
        needed: Callable[[], AnySet[str]],
        drop: Callable[[Sequence[int]], Awaitable[None]],
        lose: Callable[[Sequence[int]], Awaitable[None]],
        rewrite_notes: Callable[[AnySet[str]], Awaitable[None]],
        uses: Callable[[], Sequence[ContextUse]],
        wall_clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._retained = contents
        self._records = records
        self._policy = policy
        self._needed = needed
        self._drop = drop
        self._lose = lose
        self._rewrite_notes = rewrite_notes
        self._uses = uses
        self._wall_clock = wall_clock

    async def run(self) -> None:
        """Runs until it is cancelled."""
        is_first = True
        while True:
            try:
                if is_first:
                    await self._compare()
                    is_first = False
                await self.enforce_limits()
                await self._sweep()
            except LongleafError as error:
                log.warning("garbage collection failed: %s", error)
            await asyncio.sleep(MOST_SECONDS if is_first else SWEEP_SECONDS)

    async def enforce_limits(self) -> None:
        """Deletes snapshots that exceed the quota, and expired ones. Raises StorageUnavailable."""
        surplus = self._records.surplus(self._uses(), self._wall_clock())
        if surplus:
            log.info("deleting snapshots of %d segments: over the quota, or unused", len(surplus))
            await self._drop(surplus)

    async def _compare(self) -> None:
        """Writes missing notes of contexts, and forgets snapshots that are missing from the storage, since it may have
        been replaced."""
        service = self._retained.service_id
        entries = await self._store.list(notes_folder(service))
        recorded = {place.context for entry in entries if (place := place_of_note(entry.name)) is not None}
        names = {entry.name for entry in await self._store.list(segments_folder(service))}
        retained = {record.segment: record.manifest for record in self._retained.snapshots}
        lost = [segment for segment, manifest in retained.items() if manifest not in names and segment in self._records]
        if lost:
            log.warning("%d snapshots are missing from %s", len(lost), self._store.store.url)
            await self._lose(lost)
        await self._rewrite_notes(recorded)

    async def _sweep(self) -> None:
        live = _Live({record.manifest.rpartition("/")[0] for record in self._records.all} | self._needed())
        service, now = self._retained.service_id, self._wall_clock()
        swept = await self._store.run(sweep, self._store.store, service, now, self._policy.grace, live)
        if swept.num_objects:
            log.info("deleted %d unused objects from storage", swept.num_objects)


class _Live(AnySet[str]):
    """The set of all names in some folders."""

    def __init__(self, folders: AnySet[str]) -> None:
        self._folders = folders

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.rpartition("/")[0] in self._folders

    def __iter__(self) -> Iterator[str]:
        return iter(self._folders)

    def __len__(self) -> int:
        return len(self._folders)
