"""Ranks on nodes of equal and unequal size."""

import pytest

from longleaf.errors import InvalidArgument
from longleaf.topology import Topology


def test_nodes_and_rails_of_an_uneven_cluster():
    topology = Topology(("a", "a", "a", "b"))
    topology.check(4)
    assert topology.world_size == 4
    assert topology.node_groups == ((0, 1, 2), (3,))
    assert topology.rails == ((0, 3), (1,), (2,))
    assert topology.full_rails == ((0, 3),)
    assert not topology.is_even


def test_one_machine_has_no_rails_to_others():
    topology = Topology(("a", "a"))
    assert topology.full_rails == ()
    assert topology.is_even


def test_ranks_of_a_node_must_be_consecutive():
    with pytest.raises(InvalidArgument, match="consecutive"):
        Topology(("a", "b", "a")).check(3)


@pytest.mark.parametrize(
    ("machines", "equation"),
    [
        ("aabb", "2 nodes x 2 ranks = 4"),
        ("aaab", "2 nodes: 3 \\+ 1 ranks = 4"),
        ("a", "1 node x 1 rank = 1"),
    ],
)
def test_wrong_number_of_ranks_is_refused(machines, equation):
    with pytest.raises(InvalidArgument, match=f"nodes: {equation}, and the world size is 5"):
        Topology(tuple(machines)).check(5)
