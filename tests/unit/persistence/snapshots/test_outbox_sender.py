"""Outgoing changes reach storage in order, and none is lost."""

import asyncio
import errno
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from coordinator.persistence.catalog.records import Change, OutboxEntry
from coordinator.persistence.snapshots import storage_health
from coordinator.persistence.snapshots.outbox_sender import MAX_BATCH, OutboxSender
from coordinator.persistence.snapshots.storage_health import StorageHealth
from coordinator.persistence.snapshots.store import AsyncStore
from longleaf.errors import DataLoss, StorageUnavailable
from longleaf.storage.context_note import encode_note
from longleaf.storage.names import Attempt, NotePlace
from longleaf.storage.store import Store
from tests.support.catalog import context as context_record
from tests.support.coming import comes
from tests.support.fakes.catalog import FakeCatalog
from tests.support.fakes.storage import FlakyFiles, MemoryFiles
from tests.support.stored_contexts import deletion, note_of

SERVICE = "0123456789abcdef0123456789abcdef"
pytestmark = pytest.mark.timeout(30)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_health, "LEAST_SECONDS", 0.01)
    monkeypatch.setattr(storage_health, "MOST_SECONDS", 0.01)


class RecordingFiles(MemoryFiles):
    """Records the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []
        self.is_full = False
        self.num_refused = 0
        """Deletions that fail from here on."""

    def write(self, name: str, parts: Sequence[memoryview], is_new: bool) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "no space left on device")
        super().write(name, parts, is_new)
        self.done.append(f"+{name}")

    def remove(self, name: str) -> None:
        if self.num_refused:
            self.num_refused -= 1
            raise OSError(errno.EIO, "input/output error")
        super().remove(name)
        self.done.append(f"-{name}")


class SenderBench:
    def __init__(self) -> None:
        self.memory = RecordingFiles()
        self.files = FlakyFiles(self.memory)
        self.catalog = FakeCatalog()
        self.store = AsyncStore(Store(self.files, "memory"))
        self.sender = OutboxSender(self.store, self.catalog)
        self.health = StorageHealth("sending", lambda: None)

    async def put(self, *outgoing: OutboxEntry) -> None:
        await self.catalog.commit(Change(outgoing=outgoing))
        self.sender.notify()

    @property
    def names(self) -> set[str]:
        return {entry.name for entry in self.memory.list("")}

    def keep(self, name: str) -> None:
        self.memory.write(name, [memoryview(b"x")], False)

    async def all_sent(self) -> None:
        await comes(lambda: not self.catalog._outbox)


@asynccontextmanager
async def running_sender() -> AsyncIterator[SenderBench]:
    found = SenderBench()
    task = asyncio.create_task(found.sender.run(found.health))
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def note(number: int, content: bytes | None = b"x") -> OutboxEntry:
    return OutboxEntry(f"services/s/notes/c/{number:020}", content)


def attempt(number: int) -> Attempt:
    return Attempt("s", f"s-{number}", "a")


async def test_entries_are_sent_in_order() -> None:
    async with running_sender() as found:
        await found.catalog.commit(Change(outgoing=tuple(map(note, (5, 3, 9, 1)))))
        await found.put(note(2), note(5, None))
        await found.all_sent()
        last = [f"+{note(number).name}" for number in (3, 9, 1, 2)] + [f"-{note(5).name}"]
        assert found.memory.done[-5:] == last


async def test_more_entries_than_a_batch_are_sent() -> None:
    async with running_sender() as found:
        await found.put(*(note(number) for number in range(2 * MAX_BATCH + 3)))
        await found.all_sent()
        assert len(found.names) == 2 * MAX_BATCH + 3


async def test_deletions_overtake_notes_that_cannot_be_written() -> None:
    """A storage that is full accepts nothing else, and has space for it only afterwards."""
    async with running_sender() as found:
        found.memory.is_full = True
        await found.put(*(note(number) for number in range(2 * MAX_BATCH)), note(5000, None))
        await comes(lambda: f"-{note(5000).name}" in found.memory.done)
        found.memory.is_full = False
        await found.all_sent()
        assert len(found.names) == 2 * MAX_BATCH


async def test_unreachable_storage_loses_nothing_and_is_reported() -> None:
    async with running_sender() as found:
        found.files.fail(3)
        await found.put(note(1), note(2))
        await comes(lambda: found.health.reason)
        assert "input/output" in found.health.reason
        await found.all_sent()
        await comes(lambda: not found.health.reason)
        assert found.memory.done == [f"+{note(1).name}", f"+{note(2).name}"]


async def test_unacknowledged_entries_are_sent_again() -> None:
    async with running_sender() as found:
        await found.catalog.commit(Change(outgoing=(note(1), note(2))))
        found.catalog.failures.append(StorageUnavailable("the disk is full"))
        found.sender.notify()
        await found.all_sent()
        assert found.memory.done == 2 * [f"+{note(1).name}", f"+{note(2).name}"]


async def test_unreadable_catalog_is_read_again_after_the_next_change() -> None:
    class Damaged(FakeCatalog):
        is_damaged = True

        async def outgoing(self, limit: int, *, only_deletions: bool = False) -> list[tuple[int, OutboxEntry]]:
            if self.is_damaged:
                self.is_damaged = False
                raise DataLoss("the catalog", "its pages are torn")
            return await super().outgoing(limit, only_deletions=only_deletions)

    found = SenderBench()
    catalog = Damaged()
    sender = OutboxSender(found.store, catalog)
    task = asyncio.create_task(sender.run(found.health))
    await catalog.commit(Change(outgoing=(note(1),)))
    await comes(lambda: not catalog.is_damaged)
    sender.notify()
    await comes(lambda: not catalog._outbox)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert found.names == {note(1).name}


async def test_deletion_of_an_attempt_starts_with_its_manifest() -> None:
    async with running_sender() as found:
        one, other = attempt(1), attempt(12)
        for each in (one, other):
            for name in (each.piece(0), each.piece(1), each.windows(0), each.manifest):
                found.keep(name)
        found.memory.done.clear()
        await found.put(OutboxEntry(one.manifest, None))
        await found.all_sent()
        assert found.memory.done[0] == f"-{one.manifest}"
        assert found.names == {other.piece(0), other.piece(1), other.windows(0), other.manifest}


async def test_protected_manifest_stays_and_later_entries_are_sent() -> None:
    async with running_sender() as found:
        one, other = attempt(1), attempt(2)
        for each in (one, other):
            found.keep(each.manifest)
        for _ in range(2):
            found.sender.pin(one.manifest)
        await found.put(OutboxEntry(one.manifest, None), note(1), OutboxEntry(other.manifest, None))
        await comes(lambda: len(found.catalog._outbox) == 1)
        assert found.names == {one.manifest, note(1).name}
        found.sender.unpin(one.manifest)
        await found.put(note(2))
        await comes(lambda: note(2).name in found.names)
        assert one.manifest in found.names, "another one holds it yet"
        found.sender.unpin(one.manifest)
        await found.all_sent()
        assert one.manifest not in found.names


async def test_many_protected_manifests_do_not_block_others() -> None:
    async with running_sender() as found:
        many = [attempt(number) for number in range(MAX_BATCH + 1)]
        for each in many:
            found.sender.pin(each.manifest)
        await found.put(*(OutboxEntry(each.manifest, None) for each in many), note(1))
        await comes(lambda: note(1).name in found.names)


async def test_deletion_note_removes_previous_notes() -> None:
    """They contain the display name; a later context of the same name keeps its own records."""

    def note(context: str, number: int, *, is_deleted: bool = False) -> OutboxEntry:
        reported = note_of(context_record(context, 1, display_name="secret"), number, SERVICE)
        if is_deleted:
            reported = deletion(context, number, SERVICE)
        return OutboxEntry(reported.place.name, encode_note(reported))

    async with running_sender() as found:
        for context, number in (("moby", 1), ("moby", 3), ("moby 2", 2)):
            found.keep(note(context, number).name)
        await found.put(note("moby", 7))
        await found.put(note("moby", 8, is_deleted=True))
        await found.put(note("moby", 9))
        await found.all_sent()
        assert found.names == {each.name for each in (note("moby 2", 2), note("moby", 8), note("moby", 9))}


async def test_failed_deletion_of_notes_is_retried() -> None:
    gone = deletion("moby", 4, SERVICE)
    async with running_sender() as found:
        found.keep(NotePlace(SERVICE, "moby", 1).name)
        found.memory.num_refused = 2
        await found.put(OutboxEntry(gone.place.name, encode_note(gone)))
        await found.all_sent()
        assert found.names == {gone.place.name}
