"""Both rings against the float64 reference, on threads and on gloo: uneven shards, empty ones, grouped queries."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.attention.ring import QueryRing, Ring
from bench.harness.async_comm import AsyncGroupComm
from longleaf.attention.reference import attend
from longleaf.comm.process_group import TransportChoice
from longleaf.kernels.cpu.compiled import NativeBackend
from tests.support.loopback import loopback
from tests.support.on_threads import on_ends
from tests.support.processes import run_ranks

pytestmark = pytest.mark.extended

DIM, SCALE = 16, 0.25
SHARDS = ([9], [5, 12], [7, 0], [40, 1, 3], [0, 0, 2], [33, 2, 0, 18], [0, 6, 0, 0])
BACKEND = NativeBackend()


def inputs(lengths, rows, heads, kv_heads):
    """Queries, and keys with values of all ranks; the keys' scores are below zero, so that a padded key would show."""
    generator = torch.Generator().manual_seed(sum(lengths) + rows)
    q = torch.randn(rows, heads, DIM, generator=generator).abs()
    keys, values = torch.randn(2, kv_heads, sum(lengths), DIM, generator=generator)
    return q, torch.stack([-keys.abs() * 3, values])


def expected(q, kv):
    keys, values = kv.transpose(1, 2)
    return attend(q, keys, values, torch.ones(len(q), len(keys), dtype=torch.bool), SCALE)


def attended(comm, q, shard, lengths):
    """The results of both rings on one rank; of ring attention twice, since its buffers are used again."""
    ring = Ring(comm, BACKEND, lengths, num_kv_heads=shard.shape[1], dim=DIM)
    query_ring = QueryRing(comm, BACKEND)
    return [ring.attend(q, shard, SCALE), ring.attend(q, shard, SCALE), query_ring.attend(q, shard, SCALE)]


def assert_close(found, wanted):
    torch.testing.assert_close(found.out_THD.double(), wanted.out_THD, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.lse_TH.double(), wanted.lse_TH, atol=1e-5, rtol=1e-5)


def on_threads(lengths, q, kv):
    shards = [shard.contiguous() for shard in kv.split(lengths, dim=2)]
    return on_ends(loopback(len(lengths)), lambda comm: attended(comm, q, shards[comm.rank], lengths))


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (6, 3), (3, 1), (2, 2), (16, 2)])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("lengths", SHARDS, ids=str)
def test_rings_on_threads(lengths, rows, heads, kv_heads):
    q, kv = inputs(lengths, rows, heads, kv_heads)
    for results in on_threads(lengths, q, kv):
        for found in results:
            assert_close(found, expected(q, kv))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any), st.integers(1, 4), st.integers(1, 4))
def test_any_shards(lengths, kv_heads, group):
    q, kv = inputs(lengths, 1, kv_heads * group, kv_heads)
    results = on_threads(lengths, q, kv)
    for found in (found for of_rank in results for found in of_rank):
        assert_close(found, expected(q, kv))
    assert all(torch.equal(results[0][2].out_THD, of_rank[2].out_THD) for of_rank in results)


@pytest.mark.parametrize("lengths", [[0], [0, 0, 0]], ids=str)
def test_no_keys_give_the_identity(lengths):
    q, kv = inputs(lengths, 2, 4, 2)
    for found in (found for of_rank in on_threads(lengths, q, kv) for found in of_rank):
        assert torch.equal(found.out_THD, torch.zeros(2, 4, DIM))
        assert torch.equal(found.lse_TH, torch.full((2, 4), float("-inf")))


def test_a_length_for_every_rank():
    with pytest.raises(ValueError, match="lengths: 2 numbers for 1 ranks"):
        Ring(loopback(1)[0], BACKEND, [3, 4], num_kv_heads=1, dim=DIM)


def ring_over_gloo(rank, owner):
    """Groups of the first 1, 2, 3 and 4 ranks, each with the shards of as many ranks."""
    for world_size in range(1, owner.groups.topology.world_size + 1):
        group = torch.distributed.new_group(list(range(world_size)))
        for lengths in (lengths for lengths in SHARDS if rank < len(lengths) == world_size):
            q, kv = inputs(lengths, 3, 8, 2)
            shard = kv.split(lengths, dim=2)[rank].contiguous()
            for found in attended(AsyncGroupComm(group), q, shard, lengths):
                assert_close(found, expected(q, kv))


@pytest.mark.bench
def test_rings_over_gloo_processes():
    run_ranks("aaaa", ring_over_gloo, carrier=TransportChoice("gloo"))
