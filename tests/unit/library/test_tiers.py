"""The merges inside and between nodes that are shown to users."""

import pytest

from longleaf.merge import MERGES, tiers
from longleaf.rank_protocol.group_messages import TierMerge
from longleaf.topology import Topology

CASES = {
    "one node": ("aaa", TierMerge(8, "exchange", ""), TierMerge(8, "packed", "")),
    "two": ("aabb", TierMerge(8, "exchange", "gather"), TierMerge(8, "", "packed")),
    "uneven": ("aab", TierMerge(8, "exchange", "gather"), TierMerge(8, "", "packed")),
    "a rank on each": ("abc", TierMerge(8, "", "gather"), TierMerge(8, "", "packed")),
}


@pytest.mark.parametrize(("nodes", "tiered", "flat"), CASES.values(), ids=CASES)
def test_only_the_hierarchy_merges_inside_nodes_first(nodes: str, tiered: TierMerge, flat: TierMerge) -> None:
    topology = Topology(tuple(nodes))
    assert tiers("hierarchy", topology, 8) == tiered
    assert tiers("packed", topology, 8) == flat


@pytest.mark.parametrize("name", MERGES)
def test_every_merge_has_a_description(name: str) -> None:
    for nodes in ("aa", "ab", "aabb"):
        tier = tiers(name, Topology(tuple(nodes)))
        assert tier.rows == 0
        assert tier.inside or tier.between
