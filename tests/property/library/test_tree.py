"""Every merge on every transport against the float64 fold, with awkward shapes: empty shards, few heads, one rank."""

import importlib
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longleaf.attention import Partial, merge_all
from longleaf.comm.process_group import TransportChoice
from longleaf.kernels.cpu.compiled import NativeBackend
from longleaf.merge import MERGES, PartialCodec, choose_merge, make_merge
from longleaf.merge.autotune import choose, describe
from longleaf.merge.base import join_heads, split_heads
from longleaf.merge.butterfly import NextAction, rounds
from longleaf.rank_protocol.group_messages import MergeTiming
from longleaf.topology import Topology
from tests.support.attention.partials import random_partials
from tests.support.loopback import loopback_groups
from tests.support.on_threads import on_groups
from tests.support.processes import run_ranks

BACKEND = NativeBackend()
SAME_BITS = ("gather", "exchange", "hierarchy", "butterfly")
CLUSTERS = ("a", "aa", "aaa", "aaaa", "aabb", "aaab", "abbb", "aabbb", "abc", "aaabbb", "aabbccd")
"""One letter per rank: the machine it runs on."""


def expected(parts):
    return merge_all(torch.stack([p.out_THD.double() for p in parts]), torch.stack([p.lse_TH.double() for p in parts]))


def assert_close(found, wanted, tolerance=2e-6):
    torch.testing.assert_close(found.out_THD.double(), wanted.out_THD, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(found.lse_TH.double(), wanted.lse_TH, atol=2e-6, rtol=2e-6)


def merged(name, topology, parts, dtype=torch.float32):
    return on_groups(
        topology, lambda rank, groups: make_merge(name, groups, PartialCodec(BACKEND, dtype)).to_all(parts[rank])
    )


@pytest.mark.sampled(40)
@pytest.mark.parametrize("name", MERGES)
@pytest.mark.parametrize("machines", CLUSTERS)
@pytest.mark.parametrize("empty", [(), (0,), "all"])
def test_merges_on_loopback(name, machines, empty):
    topology, world_size = Topology(tuple(machines)), len(machines)
    empty = tuple(range(world_size)) if empty == "all" else empty
    parts = random_partials(world_size, rows=2 * world_size, empty=empty)
    wanted = expected(parts)
    for found in merged(name, topology, parts):
        assert_close(found, wanted)

    def own(rank, groups):
        return make_merge(name, groups, PartialCodec(BACKEND)).to_owner(parts[rank])

    for rank, found in enumerate(on_groups(topology, own)):
        assert_close(found, wanted.rows(2 * rank, 2 * rank + 2))


@pytest.mark.parametrize("name", MERGES)
@settings(max_examples=20, deadline=None)
@given(st.sampled_from(CLUSTERS), st.sampled_from([1e4, -1e4, 0.0]), st.sampled_from([1.0, 1e4]), st.integers(0, 99))
def test_merges_are_exact_however_large_the_logits(name, machines, centre, scale, seed):
    generator, world_size = torch.Generator().manual_seed(seed), len(machines)
    out = torch.randn(world_size, 2, 3, 5, generator=generator)
    lse = centre + scale * torch.randn(world_size, 2, 3, generator=generator)
    parts = [Partial(*pair) for pair in zip(out, lse, strict=True)]
    # each fold rounds its lse to float32, which the next one takes for exact
    tolerance = 2e-6 + world_size * 2**-24 * (lse.abs().max() * out.abs().max()).item()
    for found in merged(name, Topology(tuple(machines)), parts):
        one_fold = name not in ("butterfly", "hierarchy")
        assert_close(found, expected(parts), tolerance=2e-6 if one_fold else tolerance)


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("name", MERGES)
def test_heads_need_not_divide_by_ranks(name, heads):
    parts = random_partials(6, rows=1, heads=heads)
    for found in merged(name, Topology(tuple("aaabbb")), parts):
        assert_close(found, expected(parts))


@pytest.mark.sampled(30)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("machines", CLUSTERS)
@pytest.mark.parametrize("name", SAME_BITS)
def test_every_rank_gets_the_same_bits_every_time(name, machines, dtype):
    topology, parts = Topology(tuple(machines)), random_partials(len(machines), rows=8)
    found = merged(name, topology, parts, dtype) + merged(name, topology, parts, dtype)
    assert all(torch.equal(found[0].out_THD, other.out_THD) for other in found[1:])
    assert all(torch.equal(found[0].lse_TH, other.lse_TH) for other in found[1:])


@pytest.mark.parametrize("name", SAME_BITS)
def test_bfloat16_partials_are_off_by_their_rounding_only(name):
    topology, parts = Topology(tuple("aabbccd")), random_partials(7, rows=8)
    largest = max(part.out_THD.abs().max().item() for part in parts)
    for found in merged(name, topology, parts, torch.bfloat16):
        assert_close(found, expected(parts), tolerance=4 * largest * 2**-8)
    assert not torch.equal(found.out_THD, merged(name, topology, parts)[0].out_THD)


def test_partials_travel_in_two_types_only():
    with pytest.raises(ValueError, match="float16"):
        PartialCodec(BACKEND, torch.float16)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([torch.float32, torch.bfloat16]))
def test_joining_heads_undoes_splitting_them(heads, num_parts, dtype):
    part, wire = random_partials(1, rows=3, heads=heads)[0], PartialCodec(BACKEND, dtype)
    found = join_heads(split_heads(part, num_parts, wire), heads, wire)
    assert torch.equal(found.out_THD, part.out_THD.to(dtype).float())
    assert torch.equal(found.lse_TH, part.lse_TH)


@given(st.integers(1, 70))
def test_butterfly_rounds_match_and_join_every_rank_once(world_size):
    plans = [list(rounds(rank, world_size)) for rank in range(world_size)]
    assert len({len(plan) for plan in plans}) == 1
    seen = [[rank] for rank in range(world_size)]
    for step in zip(*plans, strict=True):
        assert all(step[to].source == rank for rank, (to, _, _) in enumerate(step) if to != rank)
        before = [list(ranks) for ranks in seen]
        for rank, (_, source, then) in enumerate(step):
            assert then is NextAction.KEEP_OWN or step[source].to == rank, "a receive has a matching send"
            if then is NextAction.TAKE:
                seen[rank] = before[source]
            elif then is not NextAction.KEEP_OWN:
                seen[rank] = before[rank] + before[source]
    assert all(sorted(ranks) == list(range(world_size)) for ranks in seen)


@pytest.mark.parametrize("machines", ["aa", "aabb", "aaab"])
def test_all_ranks_choose_alike_and_merge_right_with_it(machines):
    topology, world_size = Topology(tuple(machines)), len(machines)
    parts = {rows: random_partials(world_size, rows) for rows in (1, 5, 64, 65)}

    def work(rank, groups):
        chosen = choose_merge(groups, PartialCodec(BACKEND), num_heads=3, dim=5, device="cpu")
        return chosen.timings, {rows: chosen.to_all(part[rank]) for rows, part in parts.items()}

    found = on_groups(topology, work)
    assert all(timings == found[0][0] for timings, _ in found)
    for _, results in found:
        for rows, result in results.items():
            assert_close(result, expected(parts[rows]))
    for timing in found[0][0]:
        assert set(timing.microseconds) == set(MERGES) - ({"hierarchy"} if machines == "aa" else set())
        assert timing.merge in timing.microseconds
        assert describe(timing).startswith(f"{timing.merge}, ")


MEASURED = (
    MergeTiming(1, "hierarchy", {"hierarchy": 10.0, "paper": 40.0, "gather": 30.0, "butterfly": 20.0}),
    MergeTiming(8, "gather", {"hierarchy": 40.0, "gather": 30.0, "butterfly": 20.0}),
)


@pytest.mark.parametrize(("machines", "names"), [("aabb", ("hierarchy", "gather")), ("aaa", ("butterfly", "gather"))])
def test_what_other_groups_measured_is_believed(machines, names, monkeypatch):
    """An earlier choice is not repeated; a merge that is missing here is replaced by the next best of the earlier
    timings.
    """

    def measure(*_):
        raise AssertionError("something is measured")

    monkeypatch.setattr(importlib.import_module("longleaf.merge.autotune"), "_race", measure)
    parts = {rows: random_partials(len(machines), rows) for rows in (1, 5, 9)}

    def work(rank, groups):
        chosen = choose_merge(groups, PartialCodec(BACKEND), 3, 5, "cpu", MEASURED)
        return chosen.timings, {rows: chosen.to_all(part[rank]) for rows, part in parts.items()}

    for timings, results in on_groups(Topology(tuple(machines)), work):
        assert [timing.merge for timing in timings] == [*names]
        assert [timing.microseconds for timing in timings] == [timing.microseconds for timing in MEASURED]
        for rows, result in results.items():
            assert_close(result, expected(parts[rows]))


def test_a_merge_that_hiccups_once_is_not_given_up(monkeypatch):
    """The first turn of the fastest takes thrice as long as any of another's; a third one is slow in every turn."""
    turns = {"gather": itertools.chain([3e-3], itertools.repeat(2e-4)), "packed": itertools.repeat(1e-3)}
    turns |= {"paper": itertools.repeat(8e-3)}
    (groups,) = loopback_groups(Topology(("a",)))
    merges = {name: make_merge(name, groups, PartialCodec(BACKEND)) for name in turns}
    names, counts = {merge: name for name, merge in merges.items()}, dict.fromkeys(turns, 0)

    def turn(merge, partial):
        counts[names[merge]] += 1
        return next(turns[names[merge]])

    monkeypatch.setattr(importlib.import_module("longleaf.merge.autotune"), "_turn", turn)
    timings = choose(merges, groups, num_heads=2, dim=4, device="cpu").timings
    assert timings[0].merge == "gather"
    assert timings[0].microseconds["gather"] == pytest.approx(200), "the hiccup is not shown as its time either"
    assert counts["paper"] == len(timings), "a hopeless merge is measured once"


def test_a_failed_rank_is_reported_and_blocks_no_other():
    """Whichever of their groups the others wait in."""

    def work(rank, groups):
        if rank == 3:
            raise KeyError("the fourth failed")
        return make_merge("hierarchy", groups, PartialCodec(BACKEND)).to_all(random_partials(4, rows=1)[rank])

    with pytest.raises(KeyError, match="the fourth failed"):
        on_groups(Topology(tuple("aabb")), work)


def merge_over_gloo(rank, owner):
    world_size = owner.groups.world.world_size
    parts = random_partials(world_size, rows=2 * world_size, empty=(1,))
    wanted = expected(parts)
    for name in MERGES:
        merge = make_merge(name, owner.groups, PartialCodec(BACKEND))
        assert_close(merge.to_all(parts[rank]), wanted)
        assert_close(merge.to_owner(parts[rank]), wanted.rows(2 * rank, 2 * rank + 2))
    assert {owner.groups.world.transport, owner.groups.node.transport} == {"gloo"}
    return owner.groups.world.broadcast(torch.tensor([rank + 40])).item(), merged_bits(rank, owner)


def merged_bits(rank, owner):
    """A rank's results of the merges that promise the same bits, in both types of partials."""
    parts = random_partials(owner.groups.world.world_size, rows=3, empty=(1,))
    largest = max(part.out_THD.abs().max().item() for part in parts)
    bits = []
    for name, dtype in itertools.product(SAME_BITS, (torch.float32, torch.bfloat16)):
        found = make_merge(name, owner.groups, PartialCodec(BACKEND, dtype)).to_all(parts[rank])
        assert_close(found, expected(parts), tolerance=2e-6 if dtype == torch.float32 else 4 * largest * 2**-8)
        bits.append(found.out_THD.numpy().tobytes() + found.lse_TH.numpy().tobytes())
    return bits


@pytest.mark.parametrize(
    "machines",
    [pytest.param("aa", marks=pytest.mark.slow), "aaa", pytest.param("aabb", marks=pytest.mark.extended), "aaab"],
)
def test_merges_over_gloo_processes(machines):
    results = run_ranks(machines, merge_over_gloo, carrier=TransportChoice("gloo"))
    assert [first for first, _ in results] == [40] * len(machines)
    assert all(bits == results[0][1] for _, bits in results)


@pytest.mark.parametrize("machines", [pytest.param("aaa", marks=pytest.mark.slow), "aaab"])
def test_ranks_get_the_same_bits_through_shared_memory_as_over_gloo(machines):
    shared, plain = (
        run_ranks(machines, merged_bits, carrier=TransportChoice(way)) for way in ("shared_memory", "gloo")
    )
    assert all(bits == plain[0] for bits in (*shared, *plain))


def merged_in_stages(rank, owner):
    """The result of `merged_bits`, the transports of its tensors, after a merge by each way."""
    groups = owner.groups
    merge_over_gloo(rank, owner)
    return {type(comm).__name__ for comm in (groups.world, groups.node)}, merged_bits(rank, owner)


def test_ranks_get_the_same_bits_through_copies_on_the_host() -> None:
    """As tensors of a GPU travel that ranks share; here they lie on the CPU, under another name."""
    staged = run_ranks("aaab", merged_in_stages, carrier=TransportChoice("gloo", "cpu:0"))
    [plain, *_] = run_ranks("aaab", merged_bits, carrier=TransportChoice("gloo"))
    assert staged == [({"StagedComm"}, plain)] * 4
