"""Ranks with segments that write a fake object for each requested piece."""

import asyncio
from collections.abc import Mapping, Sequence

from coordinator.kv_cache.token_paths import Segment
from coordinator.persistence.snapshots.segments_on_ranks import PlacedSegment
from longleaf.errors import LongleafError
from longleaf.rank_protocol.snapshots import Save, Saved
from longleaf.runs import Run
from longleaf.storage.store import Store


class FakeSnapshotRanks:
    """Stands for SegmentsOnRanks, and has `save` of Ranks. Writes go to `store`."""

    def __init__(self, store: Store, num_ranks: int = 2) -> None:
        self.store = store
        self.members = tuple(range(10, 10 + num_ranks))
        self.epoch = 1
        self.segments: dict[int, PlacedSegment] = {}
        self.uses: dict[int, float] = {}
        self.orders: list[tuple[int, Save]] = []
        """All orders, with the member."""
        self.most_at_once = 0
        self.failures: list[LongleafError] = []
        """Each is raised by one of the next saves."""
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._num_at_once: dict[int, int] = {}

    def hold(self, segment: Segment, runs: Sequence[Run], window_runs: Sequence[Run] = (), version: int = 0) -> None:
        """Adds a held segment."""
        self.segments[segment.id] = PlacedSegment(
            segment, tuple(runs), tuple(window_runs), self.members, self.epoch, version
        )

    def placed(self, segment_id: int) -> PlacedSegment | None:
        return self.segments.get(segment_id)

    def last_uses(self) -> Mapping[int, float]:
        return self.uses

    async def save(self, member: int, order: Save) -> Saved:
        self.orders.append((member, order))
        self._num_at_once[member] = self._num_at_once.get(member, 0) + 1
        self.most_at_once = max(self.most_at_once, self._num_at_once[member])
        await self.may_answer.wait()
        self._num_at_once[member] -= 1
        if self.failures:
            raise self.failures.pop(0)
        written = await asyncio.to_thread(self.store.put, order.name, [f"{order.runs}".encode()])
        return Saved(member, order.ticket, written.num_bytes, written.digest)
