"""Ranks on machines, even and uneven."""

import pytest

from longleaf.errors import InvalidArgument
from longleaf.topology import Topology


def test_nodes_and_rails_of_an_uneven_cluster():
    topology = Topology(("a", "a", "a", "b"))
    topology.check(4)
    assert topology.world_size == 4
    assert topology.node_groups == ((0, 1, 2), (3,))
    assert topology.rails == ((0, 3), (1,), (2,))


def test_ranks_of_a_node_must_be_consecutive():
    with pytest.raises(InvalidArgument, match="consecutive"):
        Topology(("a", "b", "a")).check(3)
