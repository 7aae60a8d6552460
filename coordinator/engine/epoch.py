"""The life of one process group."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from coordinator.placement.blocks import Placer
from longleaf.channel.lives import Hello, Ready


@dataclass(frozen=True)
class Epoch:
    """Who the ranks are, from when they are ready until one of them is lost, and the blocks that they have."""

    number: int
    hellos: tuple[Hello, ...]
    """In rank order."""
    readies: tuple[Ready, ...]
    """In rank order."""
    placer: Placer

    @classmethod
    def of(cls, number: int, hellos: Sequence[Hello], readies: Sequence[Ready], block_size: int) -> Self:
        """An epoch that begins: nothing is held yet."""
        placer = Placer([ready.num_blocks for ready in readies], block_size, readies[0].windows)
        return cls(number, tuple(hellos), tuple(readies), placer)

    @property
    def num_tokens(self) -> int:
        """What the pools of all ranks can hold."""
        return self.placer.num_blocks.sharded * self.placer.block_size
