"""Who the ranks of an epoch are. Integers only."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankMapping:
    """The ranks of an epoch that follows another."""

    epoch: int
    before: tuple[int | None, ...]
    """By rank, the rank that it was in the epoch before; None: it comes new, and holds nothing."""
    num_blocks: tuple[int, ...]
    """By rank, the blocks of its pool."""

    def __post_init__(self) -> None:
        old = [rank for rank in self.before if rank is not None]
        assert len(set(old)) == len(old), "one rank is two"
        assert len(self.before) == len(self.num_blocks) > 0

    @property
    def after(self) -> dict[int, int]:
        """The ranks of those that were there before, by what they were."""
        return {old: new for new, old in enumerate(self.before) if old is not None}

    @property
    def newcomers(self) -> tuple[int, ...]:
        """Ranks that hold nothing."""
        return tuple(rank for rank, old in enumerate(self.before) if old is None)
