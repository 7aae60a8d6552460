"""Idle contexts and the eviction of their segments."""

from collections.abc import Sequence

import pytest

from coordinator.kv_cache.block_placer import BlockCount, BlockPlacer
from coordinator.kv_cache.contexts import ContextTable
from coordinator.kv_cache.eviction import ContextEvictor
from coordinator.kv_cache.segment_placement import SegmentPlacement
from coordinator.kv_cache.segments import SegmentStore
from coordinator.kv_cache.token_paths import EMPTY_PATH
from longleaf.positions import OWN_ROPE
from longleaf.tenants import DEFAULT_TENANT
from longleaf.types import ContextSettings

SIZE = 4


class Pool:
    """Contexts over two pools, without ranks."""

    def __init__(self, num_blocks: int = 20) -> None:
        self.placer = BlockPlacer([num_blocks, num_blocks], SIZE)
        self.segments = SegmentStore(self.placer, evict=lambda lacking: self.evictor.free_blocks(lacking))
        self.contexts = ContextTable(self.segments)
        self.in_use = set[str | None]()
        self.evictor = ContextEvictor(self.placer, self.segments, self.contexts, lambda: self.in_use)

    def append(self, context: str, count: int) -> None:
        known = self.contexts.find(context)
        placement = self.segments.create(known.path if known else EMPTY_PATH, OWN_ROPE, DEFAULT_TENANT)
        reservation = self.placer.reserve(self.placer.blocks_needed(count, 0))
        assert reservation is not None
        start = placement.segment.end
        placement.extend(range(count), self.placer.place_chunk(start, start + count, 0, reservation))
        self.contexts.append(context, placement.segment, 1.0)
        self.segments.drop(placement.segment)
        self.audit()

    def audit(self) -> None:
        self.segments.audit()
        self.contexts.audit()
        self.placer.audit(run for placement in self.segments.placements for run in placement.runs)

    def evicted(self, context: str) -> list[int]:
        return [placement.segment.id for placement in self.segments.placements.evicted(self.contexts.get(context).path)]

    def rest(self, context: str) -> None:
        self.contexts.evict(self.contexts.get(context))
        self.audit()

    def activate(self, context: str) -> Sequence[SegmentPlacement]:
        found = self.contexts.activate(self.contexts.get(context))
        for placement in found:
            self.segments.begin_reload(placement)
        self.audit()
        return found


def test_segments_of_other_contexts_are_not_evicted() -> None:
    pool = Pool()
    pool.append("a", 8)
    pool.contexts.fork("a", "b", None, 1.0)
    pool.append("b", 12)
    pool.append("a", 4)
    assert pool.placer.num_free.sharded == 40 - 2 - 3 - 1
    pool.rest("b")
    assert (pool.evicted("a"), pool.evicted("b")) == ([], [1])
    assert pool.placer.num_free.sharded == 40 - 2 - 1
    pool.rest("a")
    assert (pool.evicted("a"), pool.evicted("b")) == ([0, 2], [0, 1])
    assert pool.placer.num_free.sharded == 40
    assert pool.segments.pop_forgotten() == (1, 0, 2)
    assert [placement.loss.left for placement in pool.activate("b") if placement.loss] == [[(0, 8)], [(8, 20)]]
    assert (pool.evicted("a"), pool.evicted("b")) == ([2], [])
    pool.contexts.delete("b")
    pool.audit()
    assert pool.evicted("a") == [0, 2], "no context needs the beginning any more"
    pool.contexts.delete("a")
    pool.audit()
    assert not list(pool.segments.placements)
    assert pool.segments.pop_forgotten() == (), "ranks have forgotten them"


def test_fork_of_an_evicted_context_is_evicted() -> None:
    pool = Pool()
    pool.append("a", 8)
    pool.append("a", 8)
    pool.rest("a")
    fork = pool.contexts.fork("a", "b", 3, 2.0)
    pool.audit()
    assert fork.is_evicted
    pool.contexts.delete("a")
    pool.audit()
    assert [placement.segment.id for placement in pool.activate("b")] == [0]


def test_least_recently_used_contexts_are_evicted_first() -> None:
    pool = Pool(num_blocks=6)
    for name in ("a", "b", "c", "d"):
        pool.append(name, 8)
    pool.contexts.mark_used(pool.contexts.get("a"))
    pool.contexts.change("b", ContextSettings(is_pinned=True), 1.0)
    pool.in_use = {"c"}
    assert pool.segments.num_freed(pool.evictor.spare_references()) == BlockCount(4)
    assert not pool.segments.make_room(BlockCount(9))
    assert [pool.evicted(name) for name in "abcd"] == [[], [], [], []], "nothing is evicted if it does not free enough"
    assert not pool.segments.make_room(BlockCount(5), may_evict=False)
    assert pool.segments.make_room(BlockCount(5))
    assert [pool.evicted(name) for name in "abcd"] == [[], [], [], [3]]
    pool.audit()


@pytest.mark.parametrize("is_activated", [False, True])
def test_prompts_do_not_match_evicted_segments(is_activated: bool) -> None:
    pool = Pool()
    pool.append("a", 8)
    pool.rest("a")
    if is_activated:
        pool.activate("a")
    assert pool.segments.match(pool.contexts.get("a").path.token_ids()).end == 0


def test_context_with_several_cached_prompts_is_evicted() -> None:
    pool = Pool()
    pool.append("a", 8)
    path = pool.contexts.get("a").path
    for first in (100, 200):
        holding = pool.segments.create(path, OWN_ROPE, DEFAULT_TENANT)
        reservation = pool.placer.reserve(pool.placer.blocks_needed(8, 0))
        assert reservation is not None
        holding.extend(range(first, first + 8), pool.placer.place_chunk(8, 16, 0, reservation))
        pool.segments.retain(path)
        pool.segments.cache(holding.segment)
        pool.segments.drop(holding.segment)
        pool.segments.release(path)
    assert len(list(pool.segments.cached)) == 2
    pool.rest("a")
    assert not list(pool.segments.cached)
    assert pool.placer.num_free == pool.placer.num_blocks
