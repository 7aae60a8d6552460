"""Garbage collection on storage: finds snapshots that are missing, over the quota or expired, and deletes unreferenced
objects."""

import logging
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AnySet

from coordinator.persistence.catalog.records import CatalogContents
from coordinator.persistence.snapshots.snapshot_index import RetentionPolicy, SnapshotIndex
from coordinator.persistence.snapshots.store import AsyncStore
from longleaf.storage.gc import sweep
from longleaf.storage.names import notes_folder, place_of_note, segments_folder

SWEEP_SECONDS = 3600.0
log = logging.getLogger(__name__)


class GarbageCollector:
    """Compares the catalog of one service with its storage. `contents` are those of the catalog at the start."""

    def __init__(
        self,
        store: AsyncStore,
        contents: CatalogContents,
        records: SnapshotIndex,
        policy: RetentionPolicy,
        wall_clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._retained = contents
        self._records = records
        self._policy = policy
        self._wall_clock = wall_clock

    def surplus(self, last_uses: Mapping[int, float]) -> list[int]:
        """Select the segments whose snapshots exceed the quota or have expired. The caller must delete them."""
        surplus = self._records.surplus(last_uses, self._wall_clock())
        if surplus:
            log.info("deleting snapshots of %d segments: over the quota, or unused", len(surplus))
        return surplus

    async def find_missing(self) -> list[int]:
        """Return the segments whose snapshots are missing from the storage, since it may have been replaced. Raises
        StorageUnavailable.
        """
        names = {entry.name for entry in await self._store.list(segments_folder(self._retained.service_id))}
        retained = {record.segment: record.manifest for record in self._retained.snapshots}
        lost = [segment for segment, manifest in retained.items() if manifest not in names and segment in self._records]
        if lost:
            log.warning("%d snapshots are missing from %s", len(lost), self._store.store.url)
        return lost

    async def recorded_contexts(self) -> set[str]:
        """Return the contexts with a note on storage. Raises StorageUnavailable."""
        entries = await self._store.list(notes_folder(self._retained.service_id))
        return {place.context for entry in entries if (place := place_of_note(entry.name)) is not None}

    async def sweep(self, needed: AnySet[str]) -> None:
        """Delete unreferenced objects. `needed` are folders that must be kept although no record refers to them. Raises
        StorageUnavailable.
        """
        live = _Live({record.manifest.rpartition("/")[0] for record in self._records.all} | needed)
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
