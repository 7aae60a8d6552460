"""Rendezvous of an epoch's members: the order of messages until the group is complete."""

from collections.abc import Sequence

from coordinator.cluster.member_registry import Member
from longleaf.rank_protocol.group_messages import Ready, StoreOpened


class Rendezvous:
    """State of the messages that members, in rank order, send while an epoch forms."""

    def __init__(self, epoch: int, members: Sequence[int]) -> None:
        self._epoch = epoch
        self._members = members
        self.port: int | None = 0 if len(members) == 1 else None
        """Port of rank 0's store; None until it is open, 0 if no rendezvous is needed."""
        self.readies: dict[int, Ready] = {}

    def take(self, message: StoreOpened | Ready) -> None:
        """Raises ValueError for a message of another epoch or a repeated message."""
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
    """The members of the next epoch in rank order, grouped by node; `before` has the members of the previous epoch in
    rank order.

    Members of the previous epoch keep their order and precede new members of their node. The lowest remaining rank
    becomes rank 0.
    """
    ranks = {number: rank for rank, number in enumerate(before)}
    ordered = sorted(members, key=lambda member: (ranks.get(member.number, len(ranks)), member.number))
    nodes = list(dict.fromkeys(member.node for member in ordered))
    return sorted(ordered, key=lambda member: nodes.index(member.node))
