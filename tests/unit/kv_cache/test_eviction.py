"""Idle contexts and the eviction of their segments."""

from collections.abc import Sequence

import pytest

from coordinator.kv_cache.block_placer import BlockCount, BlockPlacer
from coordinator.kv_cache.contexts import ContextTable
from coordinator.kv_cache.eviction import ContextEvictor
from coordinator.kv_cache.segment_placement import SegmentPlacement
from coordinator.kv_cache.segments import SegmentStore
from coordinator.kv_cache.token_paths import NOWHERE

SIZE = 4


class Pool:
    """Contexts over two pools, without ranks."""

    def __init__(self, num_blocks: int = 20) -> None:
        self.placer = BlockPlacer([num_blocks, num_blocks], SIZE)
        self.segments = SegmentStore(self.placer)
        self.contexts = ContextTable(self.segments)
        self.in_use = set[str | None]()
        self.evictor = ContextEvictor(self.placer, self.segments, self.contexts, lambda: self.in_use)

    def append(self, context: str, count: int) -> None:
        known = self.contexts.find(context)
        holding = self.segments.create(known.path if known else NOWHERE)
        reservation = self.placer.reserve(self.placer.blocks_needed(count, 0))
        assert reservation is not None
        start = holding.segment.end
        holding.extend(range(count), self.placer.place_chunk(start, start + count, 0, reservation))
        self.contexts.append(context, holding.segment, 1.0)
        self.segments.drop(holding.segment)
        self.audit()

    def audit(self) -> None:
        self.segments.audit()
        self.contexts.audit()
        self.placer.audit(run for holding in self.segments.holdings for run in holding.runs)

    def evicted(self, context: str) -> list[int]:
        return [holding.segment.id for holding in self.segments.holdings.evicted(self.contexts.get(context).path)]

    def rest(self, context: str) -> None:
        self.contexts.rest(self.contexts.get(context))
        self.audit()

    def activate(self, context: str) -> Sequence[SegmentPlacement]:
        found = self.contexts.activate(self.contexts.get(context))
        for holding in found:
            self.segments.call(holding)
        self.audit()
        return found


def test_segments_of_other_contexts_are_not_evicted() -> None:
    transfers = Pool()
    transfers.append("a", 8)
    transfers.contexts.fork("a", "b", None, 1.0)
    transfers.append("b", 12)
    transfers.append("a", 4)
    assert transfers.placer.num_free.sharded == 40 - 2 - 3 - 1
    transfers.rest("b")
    assert (transfers.evicted("a"), transfers.evicted("b")) == ([], [1])
    assert transfers.placer.num_free.sharded == 40 - 2 - 1
    transfers.rest("a")
    assert (transfers.evicted("a"), transfers.evicted("b")) == ([0, 2], [0, 1])
    assert transfers.placer.num_free.sharded == 40
    assert transfers.segments.take_forgotten() == (1, 0, 2)
    assert [holding.loss.left for holding in transfers.activate("b") if holding.loss] == [[(0, 8)], [(8, 20)]]
    assert (transfers.evicted("a"), transfers.evicted("b")) == ([2], [])
    transfers.contexts.delete("b")
    transfers.audit()
    assert transfers.evicted("a") == [0, 2], "no context needs the beginning any more"
    transfers.contexts.delete("a")
    transfers.audit()
    assert not list(transfers.segments.holdings)
    assert transfers.segments.take_forgotten() == (), "ranks have forgotten them"


def test_fork_of_an_evicted_context_is_evicted() -> None:
    transfers = Pool()
    transfers.append("a", 8)
    transfers.append("a", 8)
    transfers.rest("a")
    fork = transfers.contexts.fork("a", "b", 3, 2.0)
    transfers.audit()
    assert fork.is_resting
    transfers.contexts.delete("a")
    transfers.audit()
    assert [holding.segment.id for holding in transfers.activate("b")] == [0]


def test_least_recently_used_contexts_are_evicted_first() -> None:
    transfers = Pool(num_blocks=6)
    for name in ("a", "b", "c", "d"):
        transfers.append(name, 8)
    transfers.contexts.use(transfers.contexts.get("a"))
    transfers.contexts.get("b").is_pinned = True
    transfers.in_use = {"c"}
    assert transfers.evictor.num_spare == BlockCount(4)
    assert not transfers.segments.make_room(BlockCount(9))
    assert [transfers.evicted(name) for name in "abcd"] == [[], [], [], []], (
        "nothing is evicted if it does not free enough"
    )
    assert not transfers.segments.make_room(BlockCount(5), may_park=False)
    assert transfers.segments.make_room(BlockCount(5))
    assert [transfers.evicted(name) for name in "abcd"] == [[], [], [], [3]]
    transfers.audit()


@pytest.mark.parametrize("is_activated", [False, True])
def test_prompts_do_not_match_evicted_segments(is_activated: bool) -> None:
    transfers = Pool()
    transfers.append("a", 8)
    transfers.rest("a")
    if is_activated:
        transfers.activate("a")
    assert transfers.segments.match(transfers.contexts.get("a").path.token_ids()).end == 0
