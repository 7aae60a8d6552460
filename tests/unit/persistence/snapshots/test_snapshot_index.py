"""Snapshots that are deleted, and snapshots that are not created again."""

from coordinator.persistence.catalog.records import SnapshotRecord
from coordinator.persistence.snapshots.ports import ContextUse
from coordinator.persistence.snapshots.snapshot_index import RetentionPolicy, SnapshotIndex


def records(policy: RetentionPolicy, *segments: int) -> SnapshotIndex:
    return SnapshotIndex(
        [SnapshotRecord(segment=s, manifest=f"m{s}", form="f", num_bytes=10) for s in segments], policy
    )


def use(name: str, last_used: float, *segments: int, is_pinned: bool = False) -> ContextUse:
    return ContextUse(name, last_used, is_pinned, segments)


def test_least_recently_used_snapshot_is_deleted_first() -> None:
    found = records(RetentionPolicy(quota=20), 1, 2, 3)
    uses = [use("a", 5.0, 1), use("b", 3.0, 2), use("c", 9.0, 3)]
    assert found.surplus(uses, 10.0) == [2]


def test_shared_segment_has_the_latest_use_of_its_contexts() -> None:
    found = records(RetentionPolicy(quota=10), 1, 2)
    uses = [use("a", 1.0, 1), use("fork", 9.0, 1), use("b", 5.0, 2)]
    assert found.surplus(uses, 10.0) == [2]


def test_pinned_contexts_are_deleted_last_and_never_expire() -> None:
    found = records(RetentionPolicy(quota=20, expiry=5.0), 1, 2, 3)
    uses = [use("a", 0.0, 1, is_pinned=True), use("b", 99.0, 2), use("c", 98.0, 3)]
    assert found.surplus(uses, 100.0) == [3]
    assert records(RetentionPolicy(expiry=5.0), 1).surplus(uses[:1], 1e9) == []


def test_unused_snapshot_expires() -> None:
    uses = [use("a", 90.0, 1), use("b", 94.0, 2)]
    assert records(RetentionPolicy(expiry=8.0), 1, 2).surplus(uses, 100.0) == [1]


def test_deleted_snapshot_is_created_again_after_a_use() -> None:
    found = records(RetentionPolicy(quota=5), 1)
    uses = [use("a", 3.0, 1)]
    assert not found.may_be_saved(1, uses)
    assert found.surplus(uses, 10.0) == [1]
    found.drop(1)
    assert not found.may_be_saved(1, uses)
    assert found.may_be_saved(1, [use("a", 4.0, 1)])
    found.forget([1])
    assert found.may_be_saved(1, [])
