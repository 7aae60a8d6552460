"""The order of ranks from one epoch to the next."""

import pytest

from coordinator.cluster.groups.rendezvous import in_rank_order
from coordinator.cluster.member import Member
from longleaf.rank_protocol.member_messages import Hello


@pytest.mark.parametrize(
    ("nodes", "before", "expected"),
    [
        ("aabb", (0, 1, 2, 3), (0, 1, 2, 3)),
        (".abb", (0, 1, 2, 3), (1, 2, 3)),
        ("..bba", (0, 1, 2, 3), (2, 3, 4)),
        ("a.bba", (0, 1, 2, 3), (0, 4, 2, 3)),
        ("a.bbab", (0, 4, 2, 3), (0, 4, 2, 3, 5)),
        ("....bab", (0, 1, 2, 3), (4, 6, 5)),
        ("ab.c.bc", (1, 0, 3), (1, 5, 0, 3, 6)),
    ],
    ids=["all", "rank 0 lost", "a node lost", "replaced", "twice", "all new", "in another order"],
)
def test_ranks_are_numbered_node_by_node(nodes: str, before: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Each letter is a member and names its node; a dot is a lost member."""
    hellos = [Hello(number, node, "127.0.0.1", 1) for number, node in enumerate(nodes) if node != "."]
    members = [Member(hello.member, hello=hello) for hello in hellos]
    assert tuple(member.number for member in in_rank_order(members, before)) == expected
