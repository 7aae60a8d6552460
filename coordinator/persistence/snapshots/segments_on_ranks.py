"""The segments that are on the ranks now, and can be saved."""

from collections.abc import Sequence

from coordinator.persistence.snapshots.ports import ContextUse, PlacedSegment
from coordinator.recovery.epochs import Epochs
from coordinator.scheduling.scheduler import Scheduler


class SegmentsOnRanks:
    """Implements coordinator.persistence.snapshots.ports.SegmentSource."""

    def __init__(self, scheduler: Scheduler, epochs: Epochs) -> None:
        self._scheduler = scheduler
        self._epochs = epochs

    @property
    def generation(self) -> tuple[int, bool, bool]:
        """A value that changes when the ranks may hold more segments."""
        scheduler = self._scheduler
        return self._epochs.current.number, scheduler.segments.placements.is_whole, scheduler.recovery.is_rebalancing

    def members(self) -> Sequence[int]:
        """The member numbers, by rank."""
        return self._epochs.current.formation.members

    def placed(self, segment_id: int) -> PlacedSegment | None:
        epoch, placement = self._epochs.current, self._scheduler.segments.placements.find(segment_id)
        if placement is None or placement.is_evicted or placement.loss is not None or not placement.segment.is_sealed:
            return None
        if self._epochs.is_over or self._scheduler.recovery.is_rebalancing:
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
