"""State of one process group."""

from dataclasses import dataclass
from typing import Self

from coordinator.cluster.ports import Formation
from coordinator.kv_cache.block_placer import BlockPlacer
from coordinator.kv_cache.rank_mapping import RankMapping

MOVED_BYTES = 64 << 20
"""Maximum bytes of keys that one step moves from a rank to another: streams wait for it."""


@dataclass(frozen=True)
class Epoch:
    """The ranks and the block layout, from the time when the ranks are ready until one is lost or others join."""

    formation: Formation
    placer: BlockPlacer
    """Identical in all epochs."""

    @classmethod
    def first(cls, formation: Formation, block_size: int) -> Self:
        """The layout without any held keys."""
        readies = formation.readies
        return cls(formation, BlockPlacer([ready.num_blocks for ready in readies], block_size, readies[0].windows))

    @property
    def number(self) -> int:
        return self.formation.epoch

    @property
    def num_tokens(self) -> int:
        """Capacity of the pools of all ranks."""
        return self.placer.num_blocks.sharded * self.placer.block_size

    @property
    def max_moved_blocks(self) -> int:
        """Maximum blocks that one step moves."""
        block_bytes = self.placer.block_size * self.formation.readies[0].bytes_per_token
        return max(1, MOVED_BYTES // max(1, block_bytes))

    def rank_mapping(self, formation: Formation) -> RankMapping:
        """The ranks of `formation`, with their numbers in this epoch."""
        old = {member: rank for rank, member in enumerate(self.formation.members)}
        before = tuple(old.get(member) for member in formation.members)
        return RankMapping(formation.epoch, before, tuple(ready.num_blocks for ready in formation.readies))
