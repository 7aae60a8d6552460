"""Deals the parts of sharded weights to the members of a group. Pure.

Every part has one holder in each epoch, and the numbers of parts of two members differ by at most one, so ranks
compute and hold equal amounts. A deal keeps parts where they are in memory, so survivors of a loss read only parts that
the lost rank held, and read nothing when a member joins. Each slot has a home share, the contiguous one of its first
member, which its members hold if possible: always once the replacement of a lost rank has joined, unless others were
lost as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from longleaf.config import EngineConfig
from longleaf.shares import NUM_PARTS, even_share, most_parts

Parts = frozenset[int]
NO_PARTS: Parts = frozenset()


@dataclass(frozen=True, slots=True)
class Holding:
    """A member of the next group and the parts that it has in memory."""

    member: int
    slot: int
    """Index of its home share."""
    parts: Parts = NO_PARTS
    is_new: bool = False
    """Whether it joins the group. It has read its parts for that purpose, while the group still uses the same parts."""


class WeightDealer:
    """Deals all parts, given the number of ranks at the start and the number of ranks whose loss leaves room."""

    def __init__(self, num_ranks: int, num_spare: int = 0) -> None:
        self._num_ranks = num_ranks
        self.min_ranks = num_ranks - num_spare
        """The least number of members that have room for all parts."""
        self._room = most_parts(num_ranks, num_spare) if num_spare else 0

    @classmethod
    def from_config(cls, config: EngineConfig) -> "WeightDealer | None":
        """None if every rank holds all weights."""
        return cls(config.world_size, config.spare_ranks) if config.has_shares else None

    def home(self, slot: int) -> Parts:
        """The share of the first member of a slot."""
        return frozenset(even_share(slot, self._num_ranks))

    def deal(self, members: Sequence[Holding]) -> dict[int, Parts]:
        """The parts of each member. Fewer than `min_ranks` members do not get all parts, but as many as they have room
        for: others will join.
        """
        targets = self._targets(members)
        new = [one for one in members if one.is_new]
        present, awaited = (
            NO_PARTS.union(*parts) for parts in ([one.parts for one in new], [self.home(one.slot) for one in new])
        )
        free, dealt = set(range(NUM_PARTS)), dict[int, set[int]]()
        for one in sorted(members, key=lambda one: (one.is_new, one.slot)):
            home = self.home(one.slot)

            def order(part: int, home: Parts = home) -> tuple[bool, bool, bool, int]:
                """The first parts stay. Parts that new members have read go first, then parts of their home shares."""
                return part not in home, part in present, part in awaited, part

            retained = sorted(one.parts & free, key=order)
            dealt[one.member] = set(retained[: targets[one.member]])
            free -= dealt[one.member]
        in_order = sorted(members, key=lambda one: one.slot)
        for is_home in (True, False):
            for one in in_order:
                mine, wanted = dealt[one.member], free & self.home(one.slot) if is_home else free
                found = sorted(wanted)[: targets[one.member] - len(mine)]
                mine.update(found)
                free.difference_update(found)
        return {number: frozenset(parts) for number, parts in dealt.items()}

    def _targets(self, members: Sequence[Holding]) -> dict[int, int]:
        """The number of parts of each member."""
        if not members:
            return {}
        least, num_larger = divmod(NUM_PARTS, len(members))

        def rank(one: Holding) -> tuple[bool, int, int]:
            is_first = one.is_new or len(one.parts) > least
            return is_first, len(self.home(one.slot) if is_first else one.parts), -one.slot

        in_order = sorted(members, key=rank, reverse=True)
        return {
            one.member: min(least + (index < num_larger), max(len(self.home(one.slot)), self._room))
            for index, one in enumerate(in_order)
        }
