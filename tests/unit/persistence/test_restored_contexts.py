"""Persisted contexts are restored, including inconsistent records of earlier versions."""

from array import array

import pytest
from msgspec.structs import replace

from coordinator.kv_cache.block_placer import BlockPlacer
from coordinator.kv_cache.contexts import LAST_ENDS, ContextTable, NamedContext
from coordinator.kv_cache.segments import SegmentStore
from coordinator.kv_cache.token_paths import EMPTY_PATH, Segment
from longleaf.storage.segment_record import SegmentRecord
from tests.support.catalog import context


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ((), (30,)),
        ((40,), (30,)),
        ((5, 3, 30), (30,)),
        ((30,) * 50, (30,)),
        (tuple(range(1, 31)), (27, 28, 29, 30)),
        ((3, 30), (3, 30)),
    ],
)
def test_restored_context_has_valid_continuation_points(ends: tuple[int, ...], expected: tuple[int, ...]) -> None:
    segments = SegmentStore(BlockPlacer([64], 4))
    contexts = ContextTable(segments)
    record = replace(context("book", 7, 30, capacity=2_000), ends=ends)
    segment = Segment.of(SegmentRecord(id=7, token_ids=array("I", range(30))), EMPTY_PATH, "default")
    segments.adopt(segment)
    contexts.adopt(NamedContext.of(record, segment.path))
    assert contexts.get("book").ends == expected
    assert len(expected) <= LAST_ENDS
    contexts.fork("book", "fork", 20, 1.0)
    contexts.audit()
    contexts.delete("book")
    contexts.audit()
