"""Snapshots that are deleted, and snapshots that are not created again."""

from math import inf

from coordinator.persistence.catalog.records import SnapshotRecord
from coordinator.persistence.snapshots.snapshot_index import RetentionPolicy, SnapshotIndex


def records(policy: RetentionPolicy, *segments: int) -> SnapshotIndex:
    return SnapshotIndex(
        [SnapshotRecord(segment=s, manifest=f"m{s}", form="f", num_bytes=10) for s in segments], policy
    )


def test_least_recently_used_snapshot_is_deleted_first() -> None:
    found = records(RetentionPolicy(quota=20), 1, 2, 3)
    assert found.surplus({1: 5.0, 2: 3.0, 3: 9.0}, 10.0) == [2]


def test_pinned_contexts_are_deleted_last_and_never_expire() -> None:
    found = records(RetentionPolicy(quota=20, expiry=5.0), 1, 2, 3)
    assert found.surplus({1: inf, 2: 99.0, 3: 98.0}, 100.0) == [3]
    assert records(RetentionPolicy(expiry=5.0), 1).surplus({1: inf}, 1e9) == []


def test_unused_snapshot_expires() -> None:
    assert records(RetentionPolicy(expiry=8.0), 1, 2).surplus({1: 90.0, 2: 94.0}, 100.0) == [1]


def test_deleted_snapshot_is_created_again_after_a_use() -> None:
    found, uses = records(RetentionPolicy(quota=5), 1), {1: 3.0}
    assert not found.may_be_saved(1, uses)
    assert found.surplus(uses, 10.0) == [1]
    found.drop(1)
    assert not found.may_be_saved(1, uses)
    assert found.may_be_saved(1, {1: 4.0})
    found.forget([1])
    assert found.may_be_saved(1, {})
