"""Measurements on a Ray cluster that runs already: ranks as actors, in the order of a service's."""

import pytest
import torch

from bench.harness.ray_ranks import carry_measurements, run_on_ray
from longleaf.errors import StartError

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


def test_ranks_meet_and_their_slots_are_free_again(ray_cluster: int) -> None:
    import ray  # late, because its environment is set by the cluster

    def meet(rank, factor):  # travels with what it needs: ranks do not have this file
        told = rank.world.all_gather(torch.tensor([factor * rank.rank])).flatten().tolist()
        return told, rank.count_bytes(rank.barrier, 1).keys() >= {"lo"}, sorted(rank.groups)

    carry_measurements()
    for _ in range(2):
        placement, found = run_on_ray(meet, ray_cluster, "cpu", 7)
        expected = [7 * rank for rank in range(ray_cluster)]
        assert found == [(expected, True, ["gloo", "shared_memory"])] * ray_cluster
        here = ray.get_runtime_context().get_node_id()
        assert all(here.startswith(node) for node in placement.nodes)
        assert (placement.num_nodes, len(placement.nodes)) == (1, ray_cluster)


def test_a_rank_that_fails_ends_the_others(ray_cluster: int) -> None:
    def fail(rank):
        """Rank 1 raises while rank 0 waits for it."""
        if rank.rank == 1:
            raise RuntimeError("the second rank gave up")
        rank.barrier()

    carry_measurements()
    with pytest.raises(RuntimeError, match="the second rank gave up"):
        run_on_ray(fail, 2, "cpu")


def test_more_ranks_than_slots_are_refused(ray_cluster: int) -> None:
    with pytest.raises(StartError, match="needs 100 slots"):
        run_on_ray(print, 100, "cpu")
