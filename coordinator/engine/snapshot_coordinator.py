"""Connects the engine to storage: saves keys and values of the ranks, and restores lost ones."""

from collections.abc import Callable, Sequence

from coordinator.cluster.ports import Ranks
from coordinator.persistence.snapshots.ports import ContextUse, KvFormat, PlacedSegment
from coordinator.persistence.snapshots.snapshot_fetcher import SnapshotFetcher
from coordinator.persistence.snapshots.snapshots import Snapshots
from coordinator.recovery.epochs import Epochs
from coordinator.scheduling.scheduler import Scheduler
from longleaf.types import Storage


class SnapshotCoordinator:
    """Implements coordinator.persistence.snapshots.ports.SegmentSource. `on_change` is called when the engine has new
    work."""

    def __init__(self, snapshots: Snapshots, ranks: Ranks, epochs: Epochs, on_change: Callable[[], None]) -> None:
        self._snapshots = snapshots
        self._ranks = ranks
        self._epochs = epochs
        self._on_change = on_change
        self._fetching: SnapshotFetcher | None = None
        self._begun: Scheduler | None = None
        self._last = (0, True, False)

    def _members(self) -> Sequence[int]:
        return self._epochs.current.formation.members

    @property
    def _scheduler(self) -> Scheduler:
        assert self._begun is not None
        return self._begun

    def is_stored(self, segment_id: int) -> bool:
        """Whether a segment can be restored. Implements `is_stored` of RestorePlanner."""
        return self._snapshots.is_usable(segment_id)

    def begin(self, scheduler: Scheduler, block_size: int) -> None:
        """Starts to save and restore. Must be called once the ranks are ready."""
        self._begun = scheduler
        ready = self._epochs.current.formation.readies[0]
        text = "|".join([ready.form, ready.form_of_windows]) if ready.form else ""
        restoring = scheduler.recovery.restoring
        self._fetching = SnapshotFetcher(restoring, self._snapshots, self._ranks, self._members, self._on_change)
        self._snapshots.begin(self, self._ranks, KvFormat(text, block_size), self._on_change)

    def run_pending(self) -> None:
        """Must be called after steps were scheduled or answered, or the ranks have changed."""
        assert self._fetching is not None
        self._fetching.run_pending()
        scheduler = self._scheduler
        now = self._epochs.current.number, scheduler.segments.placements.is_whole, scheduler.recovery.is_rebalancing
        if now != self._last:  # the ranks may hold more segments
            self._last = now
            self._snapshots.notify()

    def placed(self, segment_id: int) -> PlacedSegment | None:
        scheduler, epoch = self._scheduler, self._epochs.current
        placement = scheduler.segments.placements.find(segment_id)
        if placement is None or placement.is_evicted or placement.loss is not None or not placement.segment.is_sealed:
            return None
        if self._epochs.is_over or scheduler.recovery.is_rebalancing:
            return None
        return PlacedSegment(
            segment=placement.segment,
            runs=tuple(placement.runs),
            window_runs=placement.window_runs,
            members=epoch.formation.members,
            epoch=epoch.number,
            version=placement.version,
        )

    def uses(self) -> Sequence[ContextUse]:
        contexts = self._scheduler.contexts.list()
        return [ContextUse(one.id, one.used, one.is_pinned, tuple(one.path.ids)) for one in contexts]

    def view(self) -> Storage:
        """State of the storage for clients."""
        return self._snapshots.view()

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values on storage."""
        return self._snapshots.total_bytes

    async def close(self) -> None:
        if self._fetching is not None:
            await self._fetching.close()
        await self._snapshots.close()
