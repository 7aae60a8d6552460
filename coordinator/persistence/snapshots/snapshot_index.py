"""Index of the snapshots on storage, and their retention: expired snapshots are deleted, and the least recently used
ones over the quota."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf

from coordinator.persistence.catalog.records import SnapshotRecord
from longleaf.config import DataConfig, SnapshotsChoice

GRACE_SECONDS = 3600.0


@dataclass(frozen=True)
class RetentionPolicy:
    """See the settings of the same names."""

    mode: SnapshotsChoice = "seal"
    quota: int | None = None
    """Bytes."""
    expiry: float | None = None
    """Seconds without a use."""
    grace: float = GRACE_SECONDS
    """Seconds after which unreferenced objects are deleted: longer than any save takes."""

    @classmethod
    def from_config(cls, config: DataConfig) -> "RetentionPolicy":
        return cls(config.snapshots, config.snapshot_quota, config.snapshot_expiry)


class SnapshotIndex:
    """The snapshots of a catalog, by segment."""

    def __init__(self, records: Iterable[SnapshotRecord], policy: RetentionPolicy) -> None:
        self._policy = policy
        self._by_segment = {record.segment: record for record in records}
        self._dropped: dict[int, float] = {}
        """Segments whose snapshots were dropped, with the last use of each segment before that."""

    def __getitem__(self, segment_id: int) -> SnapshotRecord:
        return self._by_segment[segment_id]

    def get(self, segment_id: int) -> SnapshotRecord | None:
        return self._by_segment.get(segment_id)

    def __contains__(self, segment_id: object) -> bool:
        return segment_id in self._by_segment

    @property
    def all(self) -> list[SnapshotRecord]:
        return list(self._by_segment.values())

    @property
    def num_bytes(self) -> int:
        return sum(record.num_bytes for record in self._by_segment.values())

    def put(self, record: SnapshotRecord) -> None:
        self._by_segment[record.segment] = record
        self._dropped.pop(record.segment, None)

    def drop(self, segment_id: int) -> None:
        self._by_segment.pop(segment_id, None)

    def forget(self, segment_ids: Iterable[int]) -> None:
        """Removes deleted segments."""
        for segment_id in segment_ids:
            self.drop(segment_id)
            self._dropped.pop(segment_id, None)

    def may_be_saved(self, segment_id: int, last_uses: Mapping[int, float]) -> bool:
        """Whether a segment needs a snapshot: it has none, and none was dropped since the last use of the segment."""
        if segment_id in self._by_segment:
            return False
        before = self._dropped.get(segment_id)
        return before is None or last_uses.get(segment_id, -inf) > before

    def surplus(self, last_uses: Mapping[int, float], now: float) -> list[int]:
        """Selects the segments whose snapshots must be deleted, and records these snapshots as dropped. Snapshots of
        the least recently used contexts are selected first, those of pinned contexts last. `last_uses` are those of
        SegmentsOnRanks."""
        order = sorted(self._by_segment, key=lambda segment: (last_uses.get(segment, -inf), segment))
        left, gone = self.num_bytes, list[int]()
        for segment in order:
            used = last_uses.get(segment, -inf)
            is_old = self._policy.expiry is not None and used < now - self._policy.expiry
            is_too_much = self._policy.quota is not None and left > self._policy.quota
            if is_old or is_too_much:
                gone.append(segment)
                left -= self._by_segment[segment].num_bytes
        self._dropped |= {segment: last_uses.get(segment, -inf) for segment in gone}
        return gone
