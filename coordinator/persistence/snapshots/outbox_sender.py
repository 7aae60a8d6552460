"""What is outgoing: notes, and deletions, sent to storage in the order in which they were kept."""

import asyncio
import logging
from collections import Counter
from contextlib import suppress

from coordinator.persistence.catalog.ports import Outbox
from coordinator.persistence.catalog.records import OutboxEntry
from coordinator.persistence.snapshots.storage_health import StorageHealth
from coordinator.persistence.snapshots.store import AsyncStore
from longleaf.errors import DataLoss, LongleafError, StorageUnavailable
from longleaf.storage.context_note import decode_note
from longleaf.storage.names import NotePlace, attempt_of_manifest, place_of_note

AT_ONCE = 256
log = logging.getLogger(__name__)


class OutboxSender:
    """Sends until it is cancelled; what it has not sent stays outgoing."""

    def __init__(self, store: AsyncStore, outbox: Outbox) -> None:
        self._store = store
        self._outbox = outbox
        self.trouble = StorageHealth("telling storage of contexts")
        self._there_is_more = asyncio.Event()
        self._held = Counter[str]()
        """Manifests, and how often they are held."""

    @property
    def held(self) -> list[str]:
        """Manifests that are not deleted yet, whatever is outgoing."""
        return list(self._held)

    def hold(self, manifest: str) -> None:
        """It is not deleted before it was released as often."""
        self._held[manifest] += 1

    def release(self, manifest: str) -> None:
        self._held[manifest] -= 1
        if not self._held[manifest]:
            del self._held[manifest]
        self.wake()

    def wake(self) -> None:
        """Something may be outgoing."""
        self._there_is_more.set()

    async def run(self) -> None:
        while True:
            self._there_is_more.clear()
            try:
                if not await self._send_some():
                    self.trouble.end()
                    await self._there_is_more.wait()
            except StorageUnavailable as error:
                self.trouble.begin(str(error))
                await self.trouble.wait()
            except LongleafError as error:  # of the catalog, which says so elsewhere, too
                log.warning("what is outgoing cannot be read: %s", error)
                await self._there_is_more.wait()

    async def _send_some(self) -> bool:
        """Whether there was something. Behind notes that cannot be written deletions are sent all the same: they may
        make the room that these need. Raises StorageUnavailable."""
        done, failure = await self._send_first(only_deletions=False)
        if failure is not None and not done:
            done, _ = await self._send_first(only_deletions=True)
        if failure is not None and not done:
            raise failure
        return bool(done)

    async def _send_first(self, *, only_deletions: bool) -> tuple[list[int], StorageUnavailable | None]:
        """What has been sent of the oldest, and why a note was not, if one was not."""
        limit = AT_ONCE + len(self._held)  # what is held keeps nobody waiting
        found = await self._outbox.outgoing(limit, only_deletions=only_deletions)
        done, failure = list[int](), None
        try:
            for key, outgoing in found:
                is_deletion = outgoing.content is None
                if outgoing.name in self._held if is_deletion else failure:
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
        """Display names of the context are in them, which the deletion must not leave behind."""
        folder = deletion.name.rpartition("/")[0]
        places = [place_of_note(entry.name) for entry in await self._store.list(folder)]
        await self._store.delete([place.name for place in places if place and place.number < deletion.number])


def _deletion(name: str, content: bytes) -> NotePlace | None:
    """The place of a note that its context was deleted; None for all else."""
    place = place_of_note(name)
    with suppress(DataLoss):
        if place is not None and decode_note(content, place).is_deleted:
            return place
    return None


async def delete_attempt(store: AsyncStore, manifest: str) -> None:
    """Deletes what an attempt wrote: the manifest first, for one without its pieces would be believed. Raises
    StorageUnavailable."""
    folder = manifest.rpartition("/")[0]
    others = [entry.name for entry in await store.list(folder) if entry.name != manifest]
    await store.delete([manifest, *others])
