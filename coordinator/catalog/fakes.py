"""A catalog in memory, for tests of all that tells one something."""

import asyncio

from coordinator.catalog.records import Change, ContextRecord, Kept, SegmentRecord
from longleaf.errors import StorageUnavailable


class MemoryCatalog:
    """Keeps changes in memory; while `is_full` it cannot, and while `gate` is closed it takes its time."""

    def __init__(self) -> None:
        self.segments: dict[int, SegmentRecord] = {}
        self.contexts: dict[str, ContextRecord] = {}
        self.epoch = 0
        self.next_segment = 0
        self.is_full = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.changes: list[Change] = []
        self._order = asyncio.Lock()

    @property
    def kept(self) -> Kept:
        return Kept(
            service_id="memory",
            epoch=self.epoch,
            next_segment=self.next_segment,
            segments=tuple(self.segments[number] for number in sorted(self.segments)),
            contexts=tuple(self.contexts.values()),
        )

    async def commit(self, change: Change) -> None:
        async with self._order:
            await self.gate.wait()
            if self.is_full:
                raise StorageUnavailable("the memory is full")
            self.changes.append(change)
            self.segments |= {segment.id: segment for segment in change.segments}
            self.next_segment = max([self.next_segment, *(segment.id + 1 for segment in change.segments)])
            self.contexts |= {context.id: context for context in change.contexts}
            for context_id in change.dropped:
                self.contexts.pop(context_id, None)
            if not change.segments:
                self._drop_orphans()

    def _drop_orphans(self) -> None:
        reached = {context.segment for context in self.contexts.values()}
        for number in sorted(self.segments, reverse=True):
            parent = self.segments[number].parent
            if number in reached and parent is not None:
                reached.add(parent)
        self.segments = {number: record for number, record in self.segments.items() if number in reached}

    async def note_epoch(self, epoch: int) -> None:
        self.epoch = epoch
