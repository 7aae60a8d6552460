"""A catalog in memory, for tests."""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec.structs import replace

from coordinator.persistence.catalog.catalog import NO_STARTS
from coordinator.persistence.catalog.records import (
    CatalogContents,
    Change,
    CommitResult,
    OutboxEntry,
    UploadKey,
    UploadRecord,
)
from longleaf.errors import DataLoss, LongleafError, NotFound, Unavailable
from longleaf.storage.segment_record import SegmentRecord

T = TypeVar("T")


class FakeCatalog:
    """Has the public methods of Catalog. Tests can make it fail or block; `kept` is the
    state that survives a crash."""

    def __init__(self, contents: CatalogContents | None = None) -> None:
        self.contents = contents or CatalogContents(service_id="0" * 32)
        self.changes: list[Change] = []
        """Committed changes."""
        self.failures: list[LongleafError] = []
        """Each is raised by one of the next writes, in this order."""
        self.is_closed = False
        self._upload_ids: dict[UploadKey, array[int]] = {}
        self._upload_starts: dict[UploadKey, array[int]] = {}
        self._outbox: dict[int, OutboxEntry] = {}
        self._turn = asyncio.Lock()
        self._released = asyncio.Event()
        self._released.set()

    def hold(self) -> None:
        """Blocks later operations until `release`."""
        self._released.clear()

    def release(self) -> None:
        self._released.set()

    async def load(self) -> CatalogContents:
        return self.contents

    async def commit(self, change: Change) -> CommitResult:
        return await self._do(self._commit, change)

    async def note_epoch(self, epoch: int) -> None:
        await self._do(self._note_epoch, epoch)

    async def append_upload(
        self, record: UploadRecord, start: int, new_ids: "array[int]", new_starts: "array[int]" = NO_STARTS
    ) -> None:
        await self._do(self._append_upload, record, start, new_ids, new_starts)

    async def upload_ids(self, key: UploadKey) -> "array[int]":
        return self._upload_ids.get(key, array("I"))[:]

    async def upload_starts(self, key: UploadKey) -> "array[int]":
        return self._upload_starts.get(key, array("Q"))[:]

    async def drop_upload(self, key: UploadKey) -> None:
        await self.commit(Change(dropped_uploads=(key,)))

    async def outgoing(self, limit: int, *, only_deletions: bool = False) -> list[tuple[int, OutboxEntry]]:
        found = sorted(self._outbox.items())
        return [(key, each) for key, each in found if each.content is None or not only_deletions][:limit]

    async def done(self, keys: Sequence[int]) -> None:
        await self._do(self._done, keys)

    async def close(self) -> None:
        async with self._turn:  # after all earlier calls
            self.is_closed = True

    async def _do(self, function: Callable[..., T], *arguments: object) -> T:
        """Runs calls in order, including those of cancelled callers."""
        return await asyncio.shield(asyncio.ensure_future(self._in_turn(function, *arguments)))

    async def _in_turn(self, function: Callable[..., T], *arguments: object) -> T:
        async with self._turn:
            await self._released.wait()
            if self.is_closed:
                raise Unavailable("the service is stopping")
            if self.failures:
                raise self.failures.pop(0)
            return function(*arguments)

    def _commit(self, change: Change) -> CommitResult:
        self.changes.append(change)
        self.contents, committed = changed(self.contents, change)
        left = {each.key for each in self.contents.uploads}
        self._upload_ids = {key: ids for key, ids in self._upload_ids.items() if key in left}
        self._upload_starts = {key: starts for key, starts in self._upload_starts.items() if key in left}
        for outgoing in (*change.outgoing, *(OutboxEntry(name, None) for name in committed.manifests)):
            self._outbox = {key: each for key, each in self._outbox.items() if each.name != outgoing.name}
            self._outbox[self.contents.next_outgoing] = outgoing
            self.contents = replace(self.contents, next_outgoing=self.contents.next_outgoing + 1)
        return committed

    def _note_epoch(self, epoch: int) -> None:
        self.contents = replace(self.contents, epoch=max(self.contents.epoch, epoch))

    def _append_upload(self, record: UploadRecord, start: int, new_ids: "array[int]", new_starts: "array[int]") -> None:
        known = self._upload_ids.get(record.key, array("I"))
        if start and record.key not in self._upload_ids:
            raise NotFound("an upload")
        if len(known) != start:
            raise DataLoss("an upload", f"it has {len(known)} token ids, and the next ones start at {start}")
        self._upload_ids[record.key] = known + new_ids
        self._upload_starts[record.key] = self._upload_starts.get(record.key, array("Q")) + new_starts
        uploads = {**{each.key: each for each in self.contents.uploads}, record.key: record}
        self.contents = replace(self.contents, uploads=tuple(uploads[key] for key in sorted(uploads)))

    def _done(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._outbox.pop(key, None)


def changed(contents: CatalogContents, change: Change) -> tuple[CatalogContents, CommitResult]:
    """The state after a change, and the outbox entries that belong to it."""
    contexts = {each.id: each for each in contents.contexts if each.id not in change.dropped_contexts}
    contexts |= {each.id: each for each in change.contexts}
    segments = {each.id: each for each in (*contents.segments, *change.segments)}
    before = {each.segment: each for each in contents.snapshots}
    snapshots = {key: each for key, each in before.items() if key not in change.dropped_snapshots}
    snapshots |= {each.segment: each for each in change.snapshots}
    gone = segments.keys() - _reached(segments, {each.segment for each in contexts.values()})
    manifests = {each.manifest for each in (*before.values(), *change.snapshots)}
    after = {key: each for key, each in snapshots.items() if key in segments.keys() - gone}
    after_kept = replace(
        contents,
        contexts=tuple(contexts[key] for key in sorted(contexts)),
        segments=tuple(segments[key] for key in sorted(segments.keys() - gone)),
        snapshots=tuple(after[key] for key in sorted(after)),
        uploads=tuple(
            each
            for each in contents.uploads
            if each.key not in change.dropped_uploads and each.context not in change.dropped_contexts
        ),
        next_segment=max([contents.next_segment, change.next_segment, *(each.id + 1 for each in change.segments)]),
    )
    lost = manifests - {each.manifest for each in after.values()}
    return after_kept, CommitResult(tuple(sorted(gone)), tuple(sorted(lost)))


def _reached(segments: dict[int, SegmentRecord], last: set[int]) -> set[int]:
    """The segments of all paths that end in `last`."""
    reached: set[int] = set()
    for segment in last:
        step: int | None = segment
        while step is not None and step not in reached:
            reached.add(step)
            step = segments[step].parent
    return reached
