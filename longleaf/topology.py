"""Placement of ranks on machines."""

import msgspec

from longleaf.errors import InvalidArgument, StartError


class Topology(msgspec.Struct, frozen=True):
    """Ranks numbered node by node. `nodes[i]` names the machine of rank i; equal names are one machine."""

    nodes: tuple[str, ...]

    def check(self, world_size: int) -> None:
        """Raises InvalidArgument unless the ranks of each node are consecutive and make up the world size."""
        if self.world_size != world_size:
            raise InvalidArgument("nodes", f"{self}, and the world size is {world_size}")
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

    @property
    def full_rails(self) -> tuple[tuple[int, ...], ...]:
        """The rails that reach every machine; none when there is only one machine."""
        num_nodes = len(self.node_groups)
        return tuple(rail for rail in self.rails if len(rail) == num_nodes) if num_nodes > 1 else ()

    @property
    def is_even(self) -> bool:
        """Whether all machines have equally many ranks."""
        return len({len(group) for group in self.node_groups}) == 1

    def __str__(self) -> str:
        """The number of ranks per node: `2 nodes x 4 ranks = 8`; for uneven nodes `2 nodes: 3 + 1 ranks = 4`."""
        sizes = [len(group) for group in self.node_groups]
        nodes = "1 node" if len(sizes) == 1 else f"{len(sizes)} nodes"
        if self.is_even:
            return f"{nodes} x {count_ranks(sizes[0])} = {self.world_size}"
        return f"{nodes}: {' + '.join(map(str, sizes))} ranks = {self.world_size}"


def count_ranks(number: int) -> str:
    """Formats a number of ranks: `1 rank`, `2 ranks`."""
    return "1 rank" if number == 1 else f"{number} ranks"


def describe_lost(number: int) -> str:
    """Formats a number of lost ranks, for whose weights the others have room."""
    return "a lost rank" if number == 1 else f"{number:,} lost ranks"


def too_few_gpus(num_ranks: int, where: str, num_gpus: int) -> StartError:
    """Why ranks do not start with fewer GPUs than ranks: NCCL rejects ranks that share a GPU. Shared GPUs, and ranks on
    CPUs, are so slow that they must be requested explicitly."""
    gpus = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
    sharing = "with --launcher local --device cuda, which lets ranks share GPUs"
    ways = f"start with --world-size {num_gpus} at most, or {sharing}, or with --device cpu"
    return StartError(f"device: {count_ranks(num_ranks)}, and {where} has {gpus}: each rank needs its own; {ways}")
