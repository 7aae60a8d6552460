"""The mapping of ranks between two epochs. Integers only."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankMapping:
    """The ranks of an epoch, and their rank numbers in the previous epoch."""

    epoch: int
    before: tuple[int | None, ...]
    """By rank, its rank in the previous epoch; None for a new rank, which holds no keys."""
    num_blocks: tuple[int, ...]
    """By rank, the number of blocks in its pool."""

    def __post_init__(self) -> None:
        old = [rank for rank in self.before if rank is not None]
        assert len(set(old)) == len(old), "one rank is two"
        assert len(self.before) == len(self.num_blocks) > 0

    @property
    def after(self) -> dict[int, int]:
        """The new rank by old rank, for the ranks that remain."""
        return {old: new for new, old in enumerate(self.before) if old is not None}

    @property
    def newcomers(self) -> tuple[int, ...]:
        """New ranks, which hold no keys."""
        return tuple(rank for rank, old in enumerate(self.before) if old is None)
