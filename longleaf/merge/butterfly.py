"""Merge by recursive doubling: in round i each rank exchanges with the one whose number differs in bit i."""

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

import torch

from longleaf.attention import Partial
from longleaf.comm import Groups
from longleaf.merge.all_gather import send_to_owners
from longleaf.merge.base import PartialCodec


class NextAction(Enum):
    """Handling of the received partial."""

    KEEP_OWN = 0
    JOIN_BEFORE = 1
    """Received from a lower rank, so that partial comes first."""
    JOIN_AFTER = 2
    TAKE = 3
    """Received the result."""


class ButterflyRound(NamedTuple):
    """One permutation, from the view of one rank."""

    to: int
    source: int
    then: NextAction


def rounds(rank: int, world_size: int) -> Iterator[ButterflyRound]:
    """The rounds of a rank: the same number on every rank.

    If the world size is not a power of two, the ranks beyond the largest power first send their partial to a lower rank
    and receive the result at the end.
    """
    core = 1 << (world_size.bit_length() - 1)
    extra, is_extra, idle = world_size - core, rank >= core, ButterflyRound(rank, rank, NextAction.KEEP_OWN)
    has_guest = rank < extra
    if extra:
        yield (
            ButterflyRound(rank - core, rank, NextAction.KEEP_OWN)
            if is_extra
            else (ButterflyRound(rank, rank + core, NextAction.JOIN_AFTER) if has_guest else idle)
        )
    for bit in range(core.bit_length() - 1):
        peer = rank ^ (1 << bit)
        yield (
            idle
            if is_extra
            else ButterflyRound(peer, peer, NextAction.JOIN_BEFORE if peer < rank else NextAction.JOIN_AFTER)
        )
    if extra:
        yield (
            ButterflyRound(rank, rank - core, NextAction.TAKE)
            if is_extra
            else (ButterflyRound(rank + core, rank, NextAction.KEEP_OWN) if has_guest else idle)
        )


class Butterfly:
    """log2(N) rounds of one message each; the tree in the title of the Tree Attention paper.

    The partial of the lower ranks always comes first, so all ranks get the same bits.
    """

    def __init__(self, groups: Groups, wire: PartialCodec) -> None:
        self._comm = groups.world
        self._wire = wire
        self._rounds = tuple(rounds(groups.world.rank, groups.world.world_size))

    def to_all(self, partial: Partial) -> Partial:
        for to, source, then in self._rounds:
            packed = self._wire.pack(partial)
            theirs = self._comm.permute(packed, to, source)
            match then:  # the own partial is rounded as the peer receives it: both sides must use the same numbers
                case NextAction.KEEP_OWN:
                    partial = self._wire.unpack(packed)
                case NextAction.JOIN_BEFORE:
                    partial = self._wire.fold(torch.stack((theirs, packed)))
                case NextAction.JOIN_AFTER:
                    partial = self._wire.fold(torch.stack((packed, theirs)))
                case NextAction.TAKE:
                    partial = self._wire.unpack(theirs.clone())
        return partial

    def to_owner(self, partial: Partial) -> Partial:
        return send_to_owners(partial, self._comm, self._wire)
