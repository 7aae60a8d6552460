"""How the members of an epoch meet: in which order, and what they say until they have."""

from collections.abc import Sequence

from coordinator.cluster.member_registry import Member
from longleaf.rank_protocol.group_messages import Ready, StoreOpened


class Rendezvous:
    """What members, in rank order, say while they form an epoch."""

    def __init__(self, epoch: int, members: Sequence[int]) -> None:
        self._epoch = epoch
        self._members = members
        self.port: int | None = 0 if len(members) == 1 else None
        """Where rank 0 has opened the store, None before that; 0 where nobody is met."""
        self.readies: dict[int, Ready] = {}

    def take(self, message: StoreOpened | Ready) -> None:
        """Raises ValueError for what belongs to another epoch, or was said before."""
        member = message.member
        if message.epoch != self._epoch or member not in self._members:
            raise ValueError(f"invalid message from member {member}: {type(message).__name__} of another epoch")
        if isinstance(message, Ready) and member not in self.readies:
            self.readies[member] = message
        elif isinstance(message, StoreOpened) and member == self._members[0] and self.port is None:
            self.port = message.port
        else:
            raise ValueError(f"invalid message from member {member}: {type(message).__name__} out of order")

    @property
    def is_complete(self) -> bool:
        return len(self.readies) == len(self._members)


def in_rank_order(members: Sequence[Member], before: Sequence[int]) -> list[Member]:
    """The ranks of the next epoch, node by node; `before` are the numbers of the one before, in rank order.

    Who was in that keeps its order, and comes before those of its node that were not. The lowest rank that is left is
    rank 0.
    """
    ranks = {number: rank for rank, number in enumerate(before)}
    ordered = sorted(members, key=lambda member: (ranks.get(member.number, len(ranks)), member.number))
    nodes = list(dict.fromkeys(member.node for member in ordered))
    return sorted(ordered, key=lambda member: nodes.index(member.node))
