"""The segments that are on the ranks now, and can be saved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from coordinator.kv_cache.token_paths import Segment
from coordinator.recovery.epochs import Epochs
from coordinator.scheduling.scheduler import Scheduler
from longleaf.runs import Run


@dataclass(frozen=True)
class PlacedSegment:
    """A sealed segment that is completely on the ranks. Two equal objects mean that it stayed there in between."""

    segment: Segment
    runs: tuple[Run, ...]
    """In order of position."""
    window_runs: tuple[Run, ...]
    """Runs of EVERY_RANK, if every rank holds windows."""
    members: tuple[int, ...]
    """Member numbers, by rank."""
    epoch: int
    version: int
    """Changes whenever the segment is evicted."""


class SegmentsOnRanks:
    """The segments of a scheduler."""

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
        """None if the segment is evicted, partly lost or moving, or unused."""
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

    def last_uses(self) -> Mapping[int, float]:
        """The last use of each segment by id, in seconds since the Unix epoch. Segments of pinned contexts count as
        always in use."""
        found = dict[int, float]()
        for context in self._scheduler.contexts.list():
            used = inf if context.record.is_pinned else context.record.last_used
            for segment_id in context.path.ids:
                found[segment_id] = max(used, found.get(segment_id, -inf))
        return found
