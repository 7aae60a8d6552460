"""Sends the outbox, which consists of notes and deletions, to storage in the order of the commits."""

import asyncio
import logging
from collections import Counter
from contextlib import suppress

from coordinator.persistence.catalog.catalog import Catalog
from coordinator.persistence.catalog.records import OutboxEntry
from coordinator.persistence.snapshots.storage_health import StorageHealth
from coordinator.persistence.snapshots.store import AsyncStore
from longleaf.errors import DataLoss, LongleafError, StorageUnavailable
from longleaf.storage.context_note import decode_note
from longleaf.storage.names import NotePlace, attempt_of_manifest, place_of_note

MAX_BATCH = 256
log = logging.getLogger(__name__)


class OutboxSender:
    """Sends until it is cancelled. Unsent entries remain in the outbox."""

    def __init__(self, store: AsyncStore, outbox: Catalog) -> None:
        self._store = store
        self._outbox = outbox
        self._there_is_more = asyncio.Event()
        self._pinned = Counter[str]()
        """Pinned manifests, with the number of pins."""

    @property
    def pinned(self) -> list[str]:
        """Manifests that must not be deleted yet, even if the outbox contains their deletion."""
        return list(self._pinned)

    def pin(self, manifest: str) -> None:
        """Prevent the deletion of a manifest until it has been unpinned as often as pinned."""
        self._pinned[manifest] += 1

    def unpin(self, manifest: str) -> None:
        self._pinned[manifest] -= 1
        if not self._pinned[manifest]:
            del self._pinned[manifest]
        self.notify()

    def notify(self) -> None:
        """Resume sending: the outbox may have new entries."""
        self._there_is_more.set()

    async def run(self, health: StorageHealth) -> None:
        """Send until cancelled. `health` has the error that suspends it."""
        while True:
            self._there_is_more.clear()
            try:
                if not await self._send_some():
                    health.set_healthy()
                    await self._there_is_more.wait()
            except StorageUnavailable as error:
                health.set_failed(str(error))
                await health.wait()
            except LongleafError as error:  # an error of the catalog, which reports it separately as well
                log.warning("cannot read the outbox: %s", error)
                await self._there_is_more.wait()

    async def _send_some(self) -> bool:
        """Send a batch and return whether any entry was sent. If notes cannot be written, later deletions are sent
        first, because they may free the space that the notes need. Raises StorageUnavailable.
        """
        done, failure = await self._send_first(only_deletions=False)
        if failure is not None and not done:
            done, _ = await self._send_first(only_deletions=True)
        if failure is not None and not done:
            raise failure
        return bool(done)

    async def _send_first(self, *, only_deletions: bool) -> tuple[list[int], StorageUnavailable | None]:
        """Send the oldest entries. Returns the keys of those sent, and the error of the first failed note."""
        limit = MAX_BATCH + len(self._pinned)  # pinned entries must not block others
        found = await self._outbox.outgoing(limit, only_deletions=only_deletions)
        done, failure = list[int](), None
        try:
            for key, outgoing in found:
                is_deletion = outgoing.content is None
                if (outgoing.name in self._pinned) if is_deletion else failure:
                    continue
                try:
                    await self._send(outgoing)
                    done.append(key)
                except StorageUnavailable as error:
                    if is_deletion:
                        raise
                    failure = error
        finally:
            if done:
                await self._outbox.done(done)
        return done, failure

    async def _send(self, outgoing: OutboxEntry) -> None:
        if outgoing.content is not None:
            await self._store.put(outgoing.name, outgoing.content)
            if (deletion := _deletion(outgoing.name, outgoing.content)) is not None:
                await self._delete_notes_before(deletion)
        elif attempt_of_manifest(outgoing.name) is not None:
            await delete_attempt(self._store, outgoing.name)
        else:
            await self._store.delete([outgoing.name])

    async def _delete_notes_before(self, deletion: NotePlace) -> None:
        """Delete older notes of a deleted context, because they contain its display names."""
        folder = deletion.name.rpartition("/")[0]
        places = [place_of_note(entry.name) for entry in await self._store.list(folder)]
        await self._store.delete([place.name for place in places if place and place.number < deletion.number])


def _deletion(name: str, content: bytes) -> NotePlace | None:
    """Return the place of a note that records a deletion; None for other objects."""
    place = place_of_note(name)
    with suppress(DataLoss):
        if place is not None and decode_note(content, place).record is None:
            return place
    return None


async def delete_attempt(store: AsyncStore, manifest: str) -> None:
    """Delete the objects of an attempt, the manifest first: a manifest without its pieces would be taken for complete.
    Raises StorageUnavailable.
    """
    folder = manifest.rpartition("/")[0]
    others = [entry.name for entry in await store.list(folder) if entry.name != manifest]
    await store.delete([manifest, *others])
