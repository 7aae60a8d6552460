"""The prefix cache between tenants that share prefixes."""

from array import array

import pytest

from coordinator.kv_cache.block_placer import BlockPlacer
from coordinator.kv_cache.segments import SegmentStore
from coordinator.kv_cache.token_paths import Segment, TokenPath
from longleaf.positions import OWN_ROPE

IDS = array("I", range(12))
OTHER = array("I", range(100, 112))


def imported_segment(segments: SegmentStore, number: int, tenant: str, ids: "array[int]") -> Segment:
    """A segment that was imported."""
    segment = Segment(number, TokenPath(), tenant=tenant)
    segment.extend(ids)
    segments.adopt(segment)
    segments.begin_reload(segments.placements[segment])  # its keys are about to be placed
    segments.end_loss(segments.placements[segment])
    return segment


def read(segments: SegmentStore, before: TokenPath, tenant: str, ids: "array[int]") -> Segment:
    segment = segments.create(before, OWN_ROPE, tenant).segment
    segment.extend(ids)
    segments.seal(segment)
    return segment


@pytest.mark.parametrize("is_shared", [False, True])
def test_imported_segments_are_not_matched_for_other_tenants(is_shared: bool) -> None:
    segments = SegmentStore(BlockPlacer((64,), 4), share_prefixes=is_shared)
    own = read(segments, TokenPath(), "acme", OTHER)
    adopted = imported_segment(segments, 40, "acme", IDS)
    behind = read(segments, adopted.path, "acme", OTHER)
    for tenant in ("acme", "bolt"):
        is_theirs = tenant == "acme"
        assert segments.match(OTHER, tenant=tenant).end == (own.end if is_theirs or is_shared else 0)
        assert segments.match(IDS, tenant=tenant).end == (adopted.end if is_theirs else 0)
        assert segments.match(IDS + OTHER, tenant=tenant).end == (behind.end if is_theirs else 0)
    read(segments, TokenPath(), "bolt", IDS)
    assert segments.match(IDS, tenant="bolt").end == len(IDS)
    assert adopted not in segments.match(IDS, tenant="bolt").segments
    segments._prefixes.audit(placement.segment for placement in segments.placements)
