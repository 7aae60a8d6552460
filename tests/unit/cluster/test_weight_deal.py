"""Every part has one holder, members hold equal amounts, and few parts are read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.cluster.weight_deal import Holding, Parts, WeightDealer
from longleaf.config import EngineConfig
from longleaf.shares import NUM_PARTS, even_share, most_parts


def first(num_ranks: int, num_spare: int = 0) -> tuple[WeightDealer, dict[int, Parts]]:
    dealer = WeightDealer(num_ranks, num_spare)
    return dealer, dealer.deal([Holding(slot, slot, is_new=True) for slot in range(num_ranks)])


def check_complete(dealt: dict[int, Parts]) -> None:
    assert sorted(part for parts in dealt.values() for part in parts) == list(range(NUM_PARTS))
    sizes = [len(parts) for parts in dealt.values()]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(2, NUM_PARTS), st.data())
def test_a_loss_and_its_replacement(num_ranks: int, data: st.DataObject) -> None:
    dealer, shares = first(num_ranks, 1)
    check_complete(shares)
    assert all(shares[slot] == set(even_share(slot, num_ranks)) for slot in range(num_ranks))
    lost = data.draw(st.integers(0, num_ranks - 1))
    left = dealer.deal([Holding(slot, slot, shares[slot]) for slot in range(num_ranks) if slot != lost])
    check_complete(left)
    assert all(shares[slot] <= parts for slot, parts in left.items())
    most_read = max(len(parts - shares[slot]) for slot, parts in left.items())
    assert most_read <= NUM_PARTS / (num_ranks * (num_ranks - 1)) + 1
    assert max(map(len, left.values())) <= most_parts(num_ranks, 1)
    survivors = [Holding(slot, slot, parts) for slot, parts in left.items()]
    planned = dealer.deal([*survivors, Holding(num_ranks, lost, is_new=True)])
    assert planned[num_ranks] == dealer.home(lost)
    joined = dealer.deal([*survivors, Holding(num_ranks, lost, planned[num_ranks], is_new=True)])
    assert joined == {slot: shares[slot] for slot in left} | {num_ranks: shares[lost]}


@given(st.integers(2, 32), st.data())
def test_members_without_room_hold_only_their_home_shares(num_ranks: int, data: st.DataObject) -> None:
    dealer, shares = first(num_ranks)
    lost = data.draw(st.sets(st.integers(0, num_ranks - 1), min_size=1, max_size=num_ranks - 1))
    members = [Holding(slot, slot, shares[slot], is_new=slot in lost) for slot in range(num_ranks)]
    assert dealer.deal([one for one in members if not one.is_new]) == {
        slot: shares[slot] for slot in range(num_ranks) if slot not in lost
    }
    assert dealer.deal(members) == shares
    assert dealer.min_ranks == num_ranks


@given(st.integers(2, 16), st.data())
def test_too_few_members_hold_as_much_as_they_have_room_for(num_ranks: int, data: st.DataObject) -> None:
    num_spare = data.draw(st.integers(0, num_ranks - 1))
    num_left = data.draw(st.integers(1, num_ranks))
    dealer, shares = first(num_ranks, num_spare)
    dealt = dealer.deal([Holding(slot, slot, shares[slot]) for slot in range(num_left)])
    assert all(shares[slot] <= parts for slot, parts in dealt.items())
    room = most_parts(num_ranks, num_spare)
    assert all(len(parts) <= room for parts in dealt.values())
    total = sum(map(len, dealt.values()))
    assert (total == NUM_PARTS) == (num_left >= dealer.min_ranks) or total == room * num_left
    assert len(frozenset().union(*dealt.values())) == total


def test_nothing_is_read_when_members_join_in_another_order_than_planned() -> None:
    dealer, shares = first(4, 2)
    left = dealer.deal([Holding(slot, slot, shares[slot]) for slot in (0, 3)])
    survivors = [Holding(slot, slot, parts) for slot, parts in left.items()]
    early = Holding(4, 1, dealer.deal([*survivors, Holding(4, 1, is_new=True)])[4], is_new=True)
    late = Holding(5, 2, dealer.deal([*survivors, early, Holding(5, 2, is_new=True)])[5], is_new=True)
    joined = dealer.deal([*survivors, late])
    check_complete(joined)
    assert all(joined[slot] <= left[slot] for slot in left)
    dealt = dealer.deal([*(Holding(one, slot, joined[one]) for one, slot in ((0, 0), (3, 3), (5, 2))), early])
    check_complete(dealt)
    assert all(dealt[one] <= joined[one] for one in joined)


@pytest.mark.parametrize(("settings", "is_dealt"), [({}, False), ({"weights": "sharded"}, True)])
def test_only_sharded_weights_are_dealt(settings: dict[str, str], is_dealt: bool) -> None:
    config = EngineConfig(world_size=2, **settings)  # type: ignore[arg-type]
    assert (WeightDealer.from_config(config) is not None) == is_dealt
