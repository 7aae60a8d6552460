"""The life of one process group."""

from dataclasses import dataclass
from typing import Self

from coordinator.cluster.ports import Formation
from coordinator.kv_cache.block_placer import BlockPlacer
from coordinator.kv_cache.rank_mapping import RankMapping

MOVED_BYTES = 64 << 20
"""Of keys that one step moves from rank to rank at most: streams wait for it."""


@dataclass(frozen=True)
class Epoch:
    """Who the ranks are, from when they are ready until one of them is lost or others join, and where blocks are."""

    formation: Formation
    placer: BlockPlacer
    """The same in all epochs."""

    @classmethod
    def first(cls, formation: Formation, block_size: int) -> Self:
        """The one in which nothing is held yet."""
        readies = formation.readies
        return cls(formation, BlockPlacer([ready.num_blocks for ready in readies], block_size, readies[0].windows))

    @property
    def number(self) -> int:
        return self.formation.epoch

    @property
    def num_tokens(self) -> int:
        """What the pools of all ranks can hold."""
        return self.placer.num_blocks.sharded * self.placer.block_size

    @property
    def max_moved_blocks(self) -> int:
        """Blocks that one step moves at most."""
        block_bytes = self.placer.block_size * self.formation.readies[0].bytes_per_token
        return max(1, MOVED_BYTES // max(1, block_bytes))

    def ranking(self, formation: Formation) -> RankMapping:
        """What becomes of these ranks in the next epoch."""
        old = {member: rank for rank, member in enumerate(self.formation.members)}
        before = tuple(old.get(member) for member in formation.members)
        return RankMapping(formation.epoch, before, tuple(ready.num_blocks for ready in formation.readies))
