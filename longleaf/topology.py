"""Which rank runs on which machine."""

import msgspec

from longleaf.errors import InvalidArgument


class Topology(msgspec.Struct, frozen=True):
    """Ranks numbered node by node. `nodes[i]` names the machine of rank i; equal names are one machine."""

    nodes: tuple[str, ...]

    def check(self) -> None:
        """Raises InvalidArgument unless the ranks of each node are consecutive."""
        seen: list[str] = []
        for node in self.nodes:
            if not seen or node != seen[-1]:
                if node in seen:
                    raise InvalidArgument("nodes", f"the ranks of node {node} are not consecutive: {self.nodes}")
                seen.append(node)

    @property
    def world_size(self) -> int:
        return len(self.nodes)

    @property
    def node_groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each machine, in rank order."""
        names = dict.fromkeys(self.nodes)
        return tuple(tuple(r for r, node in enumerate(self.nodes) if node == name) for name in names)

    @property
    def rails(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that have the same index on their machines; uneven machines give shorter rails."""
        groups = self.node_groups
        return tuple(tuple(g[i] for g in groups if i < len(g)) for i in range(max(map(len, groups))))


def count_ranks(number: int) -> str:
    """So many ranks, for people."""
    return "1 rank" if number == 1 else f"{number} ranks"
