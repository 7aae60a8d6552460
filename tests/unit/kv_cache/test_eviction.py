"""Contexts that rest, and what is parked of them."""

from collections.abc import Sequence

import pytest

from coordinator.kv_cache.block_placer import BlockCount, BlockPlacer
from coordinator.kv_cache.contexts import ContextTable
from coordinator.kv_cache.eviction import ContextEvictor
from coordinator.kv_cache.segment_placement import SegmentPlacement
from coordinator.kv_cache.segments import SegmentStore
from coordinator.kv_cache.token_paths import NOWHERE

SIZE = 4


class House:
    """Contexts over two pools, without ranks."""

    def __init__(self, num_blocks: int = 20) -> None:
        self.placer = BlockPlacer([num_blocks, num_blocks], SIZE)
        self.segments = SegmentStore(self.placer)
        self.contexts = ContextTable(self.segments)
        self.in_use = set[str | None]()
        self.parking = ContextEvictor(self.placer, self.segments, self.contexts, lambda: self.in_use)

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

    def parked(self, context: str) -> list[int]:
        return [holding.segment.id for holding in self.segments.holdings.parked(self.contexts.get(context).path)]

    def rest(self, context: str) -> None:
        self.contexts.rest(self.contexts.get(context))
        self.audit()

    def wake(self, context: str) -> Sequence[SegmentPlacement]:
        found = self.contexts.wake(self.contexts.get(context))
        for holding in found:
            self.segments.call(holding)
        self.audit()
        return found


def test_what_others_need_is_not_parked() -> None:
    transfers = House()
    transfers.append("a", 8)
    transfers.contexts.fork("a", "b", None, 1.0)
    transfers.append("b", 12)
    transfers.append("a", 4)
    assert transfers.placer.num_free.sharded == 40 - 2 - 3 - 1
    transfers.rest("b")
    assert (transfers.parked("a"), transfers.parked("b")) == ([], [1])
    assert transfers.placer.num_free.sharded == 40 - 2 - 1
    transfers.rest("a")
    assert (transfers.parked("a"), transfers.parked("b")) == ([0, 2], [0, 1])
    assert transfers.placer.num_free.sharded == 40
    assert transfers.segments.take_forgotten() == (1, 0, 2)
    assert [holding.loss.left for holding in transfers.wake("b") if holding.loss] == [[(0, 8)], [(8, 20)]]
    assert (transfers.parked("a"), transfers.parked("b")) == ([2], [])
    transfers.contexts.delete("b")
    transfers.audit()
    assert transfers.parked("a") == [0, 2], "nobody needs the beginning any more"
    transfers.contexts.delete("a")
    transfers.audit()
    assert not list(transfers.segments.holdings)
    assert transfers.segments.take_forgotten() == (), "ranks have forgotten them"


def test_a_fork_of_what_is_parked_rests_too() -> None:
    transfers = House()
    transfers.append("a", 8)
    transfers.append("a", 8)
    transfers.rest("a")
    fork = transfers.contexts.fork("a", "b", 3, 2.0)
    transfers.audit()
    assert fork.is_resting
    transfers.contexts.delete("a")
    transfers.audit()
    assert [holding.segment.id for holding in transfers.wake("b")] == [0]


def test_room_is_made_by_those_that_were_used_least_recently() -> None:
    transfers = House(num_blocks=6)
    for name in ("a", "b", "c", "d"):
        transfers.append(name, 8)
    transfers.contexts.use(transfers.contexts.get("a"))
    transfers.contexts.get("b").is_pinned = True
    transfers.in_use = {"c"}
    assert transfers.parking.num_spare == BlockCount(4)
    assert not transfers.segments.make_room(BlockCount(9))
    assert [transfers.parked(name) for name in "abcd"] == [[], [], [], []], "nothing is parked in vain"
    assert not transfers.segments.make_room(BlockCount(5), may_park=False)
    assert transfers.segments.make_room(BlockCount(5))
    assert [transfers.parked(name) for name in "abcd"] == [[], [], [], [3]]
    transfers.audit()


@pytest.mark.parametrize("is_awake", [False, True])
def test_prompts_do_not_find_what_is_parked(is_awake: bool) -> None:
    transfers = House()
    transfers.append("a", 8)
    transfers.rest("a")
    if is_awake:
        transfers.wake("a")
    assert transfers.segments.match(transfers.contexts.get("a").path.token_ids()).end == 0
