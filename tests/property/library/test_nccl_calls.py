"""The NCCL calls of ranks, on a fake NCCL: the same calls in the same order on every rank of a group, and no send
without its receive, for every merge, layout and step, while epochs are formed and ended.
"""

import threading
from collections import Counter
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longleaf.attention import merge_all
from longleaf.comm import process_group
from longleaf.comm.process_group import ProcessGroups, TransportChoice, epoch_store
from longleaf.errors import CollectiveMismatch, StartError
from longleaf.kernels.dense import DenseBackend
from longleaf.merge import MERGES, PartialCodec, choose_merge, make_merge
from tests.support.attention.dealt import cases, decode, prefill
from tests.support.attention.partials import random_partials
from tests.support.fakes.torch_distributed import CollectiveCall, FakeDistributed
from tests.support.nccl import DEVICE, Fleet

SIZES = range(1, 9)
BACKEND = DenseBackend()


def layouts(least: int = 1):
    """Machines of up to 8 ranks in all, a letter per rank."""
    sizes = st.lists(st.integers(1, 8), min_size=1, max_size=8).map(
        lambda sizes: "".join(letter * size for letter, size in zip("abcdefgh", sizes, strict=False))[:8]
    )
    return sizes.filter(lambda machines: len(machines) >= least)


def merge_both_ways(name: str, parts):
    """Work of a rank that merges for all, and for the owners."""

    def work(rank, groups):
        merge = make_merge(name, groups, PartialCodec(BACKEND))
        return merge.to_all(parts[rank]), merge.to_owner(parts[rank])

    return work


def check_merge(name: str, machines: str) -> FakeDistributed:
    size = len(machines)
    parts = random_partials(size, rows=2 * size, empty=(1,))
    wanted = merge_all(torch.stack([part.out_THD for part in parts]), torch.stack([part.lse_TH for part in parts]))
    fleet = Fleet(machines)
    for rank, (merged, own) in enumerate(fleet.run(merge_both_ways(name, parts))):
        torch.testing.assert_close(merged.out_THD, wanted.out_THD, atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(own.out_THD, wanted.out_THD[2 * rank : 2 * rank + 2], atol=2e-6, rtol=2e-6)
    return fleet.calls


@pytest.mark.sampled(18)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MERGES)
def test_every_merge_on_one_machine(name, size):
    calls = check_merge(name, "a" * size)
    assert [group.members for group in calls.groups] == [tuple(range(size))] * 2, "a world for each epoch"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MERGES)
@settings(max_examples=15, deadline=None)
@given(machines=layouts())
def test_every_merge_on_any_machines(name, machines):
    check_merge(name, machines)


@settings(max_examples=8, deadline=None)
@given(machines=layouts(least=2))
def test_the_fastest_merge_is_measured_alike_on_all_ranks(machines):
    def work(rank, groups):
        wire = PartialCodec(BACKEND)
        wire.agree(groups.world, DEVICE)
        return [timing.merge for timing in choose_merge(groups, wire, 2, 4, DEVICE).timings]

    with patch.multiple("longleaf.merge.autotune", MAX_TURNS=2, CALLS=1, BATCHES=(1, 8)):
        assert len(set(map(tuple, Fleet(machines).run(work, num_epochs=1)))) == 1


@settings(max_examples=30, deadline=None)
@given(case=cases(), way=st.sampled_from(["queries", "keys", "auto"]), merge=st.sampled_from(sorted(MERGES)))
def test_a_chunk_is_read_by_the_same_calls_on_all_ranks(case, way, merge):
    def on_ranks(case, work):
        return Fleet("here"[:1] * case.world_size).run(work, num_epochs=1)

    with patch("tests.support.attention.dealt.on_ranks", on_ranks):
        found, _ = prefill(case, way, merge)
        rows = decode(case, merge)
    for out in (found, *rows):
        torch.testing.assert_close(out.double(), case.expected(), atol=5e-6, rtol=5e-6)


def test_groups_are_formed_in_one_order_before_anybody_uses_them():
    calls = check_merge("hierarchy", "aaabb")
    first = [group for group in calls.groups if group.name.startswith("epoch-1/")]
    world, others = first[0], first[1:]
    assert {group.members for group in others} == {(0, 1, 2), (3, 4), (0, 3), (1, 4)}
    begin = [call.name for call in world.calls[0][:6]]
    assert begin == ["form", "split", "split", "split", "split", "all_reduce RedOpType.SUM"]
    for group in first:
        assert group.is_formed
        assert {pair: len(sent) for pair, sent in group.sent.items()} == dict.fromkeys(ring_pairs(group.members), 1)
    assert Counter(calls.ended) == Counter((rank, how) for rank in range(5) for how in ("destroyed", "aborted"))


def ring_pairs(members):
    """Each rank and the next one."""
    return set(zip(members, (*members[1:], members[0]), strict=True))


# --- detected faults ---


def faulty(fault, machines="aaabb", name="exchange", **options):
    """Ranks that merge, of which rank 2 does something else first, or instead."""
    parts = random_partials(len(machines), rows=len(machines))
    merge = merge_both_ways(name, parts)

    def work(rank, groups):
        return fault(groups) if rank == 2 else merge(rank, groups)

    return Fleet(machines).run(work, **options)


def another_operation(groups):
    groups.world.all_reduce(torch.zeros(1), "sum")


def another_size(groups):
    groups.world.all_to_all(torch.zeros(groups.world.world_size, 1))


def another_type(groups):
    groups.world.broadcast(torch.zeros(1, dtype=torch.float64))


def the_node_first(groups):
    groups.node.all_gather(torch.zeros(1))


def nothing(groups):
    pass


FAULTS = (another_operation, another_size, another_type, the_node_first, nothing)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", MERGES)
@pytest.mark.parametrize("num_epochs", [1, 2])
def test_a_rank_that_does_something_else_is_found(fault, name, num_epochs):
    with pytest.raises(CollectiveMismatch, match="rank"):
        faulty(fault, name=name, num_epochs=num_epochs)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", MERGES)
@pytest.mark.parametrize("number", range(4))
def test_a_rank_that_leaves_out_one_call_is_found(name, number):
    """For any omitted call: the rank gets its own tensor as the result, and continues without an error."""
    parts, left_out = random_partials(5, rows=5), []

    class OmittingComm(process_group.ProcessGroupComm):
        turn = 0

        def _start(self, sent, received, to, source):
            self.turn += sent is not None or received is not None
            if self.turn - 1 == number and not left_out:
                left_out.append(number)
                return process_group.Transfer(())
            return super()._start(sent, received, to, source)

    def forget(comm, attribute):
        done = getattr(comm, attribute)

        def call(tensor, *args):
            comm.turn += 1
            if comm.turn - 1 == number and not left_out:
                left_out.append(number)
                return tensor.expand(5, *tensor.shape) if attribute == "all_gather" else tensor
            return done(tensor, *args)

        return call

    def work(rank, groups):
        if rank == 2:
            groups.world.__class__ = OmittingComm
            for attribute in ("all_gather", "all_to_all", "all_reduce"):
                setattr(groups.world, attribute, forget(groups.world, attribute))
        return merge_both_ways(name, parts)(rank, groups)

    fleet = Fleet("aaaaa")
    try:
        fleet.run(work, num_epochs=1)
    except CollectiveMismatch:
        assert left_out
    else:
        assert not left_out, "the merge has fewer calls"


@pytest.mark.parametrize("world_size", [3, 5, 7])
def test_sends_that_not_all_ranks_join_need_a_group_that_is_formed(world_size):
    """The exchange at the start and the bound device of the world ensure this."""

    def work(rank, groups):
        return make_merge("butterfly", groups, PartialCodec(BACKEND)).to_all(random_partials(world_size, rows=1)[rank])

    Fleet("a" * world_size).run(work)
    unbound, init = Fleet("a" * world_size), FakeDistributed.init_process_group

    def lazily(self, *args, device_id, **options):
        init(self, *args, **options)

    with patch.object(FakeDistributed, "init_process_group", lazily):
        Fleet("a" * world_size).run(work)  # the first batch is joined by all
        with patch.object(process_group, "connect"), pytest.raises(CollectiveMismatch, match="first batch"):
            unbound.run(work)


def test_an_abort_does_not_wait_for_lost_ranks():
    class Gone(Exception):
        pass

    def leave(owner_of_end):
        def work(rank):
            carrier = process_group.TransportChoice("nccl", DEVICE)
            owner = process_group.ProcessGroups(
                rank, fleet.topology, fleet.calls.store, epoch=1, timeout=60, carrier=carrier
            )
            if rank == 1:
                raise Gone
            getattr(owner, owner_of_end)()

        return work

    for end, waits in (("abort", False), ("close", True)):
        fleet = Fleet("aab")
        with patch.object(process_group, "dist", fleet.calls), pytest.raises(Gone):
            fleet.calls.run(leave(end))
        assert Counter(fleet.calls.ended) == Counter([] if waits else [(0, "aborted"), (2, "aborted")])


def test_lost_numbers_are_reported():
    def lose(self, tensor, op, group):
        tensor.zero_()

    with patch.object(FakeDistributed, "all_reduce", lose), pytest.raises(StartError, match="GPUs of 3 ranks"):
        Fleet("aaa").run(lambda rank, groups: None)


def test_ranks_that_share_a_gpu_agree():
    """Two of three report the same GPU."""
    fake = FakeDistributed(3)

    def work(rank):
        return process_group.agree_on_carrier(rank, 3, fake.store, f"GPU-{rank // 2}", timeout=60)

    with patch.object(process_group, "place_of", str):
        found = fake.run(work)
    assert found == [process_group.TransportChoice("gloo", f"GPU-{rank // 2}") for rank in range(3)]


def test_differing_calls_are_reported():
    calls = FakeDistributed(2)
    with patch.object(process_group, "dist", calls):
        options = {"store": calls.store, "world_size": 2, "timeout": None}
        calls.run(lambda rank: calls.init_process_group("nccl", rank=rank, **options))
    calls.groups[0].calls[1].append(CollectiveCall("broadcast"))
    with pytest.raises(CollectiveMismatch, match="rank 1 calls"):
        calls.check()


def test_torch_has_what_an_end_asks_for():
    """It has no public name there."""
    assert callable(torch.distributed.distributed_c10d._abort_process_group)


def test_a_fence_aborts_all_groups_of_a_rank_once():
    """From another thread; the rank that is freed finds them left."""
    fleet = Fleet("aab")
    with patch.object(process_group, "dist", fleet.calls):

        def work(rank):
            store = epoch_store(fleet.calls.store, 1)
            owner = ProcessGroups(
                rank, fleet.topology, store, epoch=1, timeout=60, carrier=TransportChoice("nccl", DEVICE)
            )

            def fence():
                fleet.calls._here.rank, fleet.calls._here.world = rank, None
                owner.fence()

            fencing = threading.Thread(target=fence)
            fencing.start()
            fencing.join(60)
            owner.abort()

        fleet.calls.run(work)
    assert Counter(fleet.calls.ended) == Counter((rank, "aborted") for rank in range(3))
