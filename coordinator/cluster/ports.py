"""Protocols between the parts of the coordinator, each small enough to be faked, and what passes through them."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from longleaf.config import EngineConfig
from longleaf.errors import LongleafError
from longleaf.formatting import human_seconds
from longleaf.rank_protocol.group_messages import KvLayout, Ready
from longleaf.rank_protocol.member_messages import Hello
from longleaf.rank_protocol.rank_spec import ConnectInfo
from longleaf.rank_protocol.snapshots import Fetch, Save, Saved
from longleaf.rank_protocol.step import StepPlan, StepResult
from longleaf.types import Loss

OnDeath = Callable[[int, str], None]
"""Is told which member's process ended, and why, from any thread."""
Kill = Callable[[int], Awaitable[None]]
"""Kills the process of a member, as `Fleet.kill`."""
Where = Callable[[int], str]
"""Tells the place of a member, as `Fleet.where`."""


def unheard(member: int, reason: str) -> None:
    """An OnDeath that tells nobody."""
    del member, reason


def nowhere(member: int) -> str:
    """A Where that knows no place."""
    del member
    return ""


class EpochEnd(msgspec.Struct, frozen=True):
    """Why an epoch is over."""

    error: LongleafError
    """RankLost that names a rank, where one is gone; GroupFailed where all live; StartError for what no rank can
    serve."""
    steps: tuple[int, ...] = ()
    """Those in one of which it ended: one where that is known, none where the ranks were in none."""


class Group(Protocol):
    """The ranks of one epoch. Implemented by coordinator.cluster.groups.group; faked by coordinator.cluster.fakes."""

    async def lay_out(self, layout: KvLayout) -> None:
        """Tells the ranks what is held, before the first plan. Raises what ended the epoch."""
        ...

    def step(self, plan: StepPlan) -> Awaitable[StepResult]:
        """Tells the ranks to do a step; what is awaited is its answer. It may be called before earlier steps are
        answered; they run in the order of the calls.

        Awaited, it raises what ended the epoch: a rank raised, died or passed the step's deadline.
        """
        ...

    async def wait_ended(self) -> EpochEnd:
        """Returns, perhaps never, when the epoch is over, also between steps. May be cancelled."""
        ...


@dataclass(frozen=True)
class Formation:
    """Who the ranks of an epoch are."""

    epoch: int
    hellos: tuple[Hello, ...]
    """In rank order."""
    readies: tuple[Ready, ...]
    """In rank order."""
    group: Group

    @property
    def members(self) -> tuple[int, ...]:
        """Their numbers, which they keep in other epochs; in rank order."""
        return tuple(hello.member for hello in self.hellos)


# --- what becomes of the members; as texts, for who runs the service ---


@dataclass(frozen=True)
class MemberLost:
    """A member is gone. Its rank, and the epoch in which it had that; None and 0 where it was in none."""

    member: int
    rank: int | None
    epoch: int
    node: str
    """Empty when it died before it said where it was."""
    reason: str
    is_replaced: bool
    """Whether somebody sees to it that another process is started in its place."""

    def __str__(self) -> str:
        who = f"member {self.member}" + (f" on node {self.node}" if self.node else "")
        had = "" if self.rank is None else f", rank {self.rank} of epoch {self.epoch},"
        return f"{who}{had} was lost: {self.reason}"


@dataclass(frozen=True)
class ReplacementStarted:
    """A process was started for `member`, in the place of the one that was lost."""

    member: int
    lost: int

    def __str__(self) -> str:
        return f"member {self.member} was started in the place of member {self.lost}"


@dataclass(frozen=True)
class ReplacementDelayed:
    """The replacement of `lost` waits."""

    lost: int
    seconds: float
    reason: str

    def __str__(self) -> str:
        return f"the place of member {self.lost} stays empty for {human_seconds(self.seconds)} at least: {self.reason}"


@dataclass(frozen=True)
class ReplacementAbandoned:
    """There will be no replacement of `lost` unless somebody asks for it."""

    lost: int
    reason: str

    def __str__(self) -> str:
        return f"the place of member {self.lost} stays empty: {self.reason}"


@dataclass(frozen=True)
class MemberJoined:
    """A replacement is a rank from this epoch on."""

    member: int
    rank: int
    node: str
    epoch: int

    def __str__(self) -> str:
        return f"member {self.member} on node {self.node} is rank {self.rank} of epoch {self.epoch}"


MemberEvent = MemberLost | ReplacementStarted | ReplacementDelayed | ReplacementAbandoned | MemberJoined


class Ranks(Protocol):
    """The ranks as the engine sees them, from epoch to epoch. Implemented by
    coordinator.cluster.rank_manager; faked by coordinator.cluster.fakes."""

    async def start(self, epoch: int) -> Formation:
        """Waits until all members have joined the epoch of this number, the first one.

        Raises StartError, ModelRefused, RankLost or GroupFailed.
        """
        ...

    async def form(self, epoch: int) -> Formation:
        """Ends the epoch before, and waits until all that have loaded the model and live have joined this one: one at
        least. Who is to be killed is gone before; nothing may be under way.

        What is not done in time is tried again under the next number: the formation tells which one it has. Raises
        RankLost when nobody is left, and Unavailable when they do not come together."""
        ...

    async def wait_joinable(self) -> None:
        """Returns, perhaps never, when somebody who is not in the epoch has loaded the model. May be cancelled."""
        ...

    async def wait_settled(self) -> None:
        """Returns, perhaps never, when nobody is to come any more in the place of one that was lost. May be
        cancelled."""
        ...

    async def save(self, member: int, order: Save) -> Saved:
        """Has a member of the epoch write runs that it holds, beside the steps, after all those that were sent before.
        They must stay where they are until it is answered, or the epoch ends. May be cancelled; the ticket must be no
        other order's of this member that is not answered.

        Raises StorageUnavailable, RankLost when the member is lost meanwhile, and Unavailable where nothing was
        written because the epoch has ended, or the ticket was discarded. All may have written it nevertheless.
        """
        ...

    async def fetch(self, member: int, order: Fetch) -> None:
        """Has a member read a piece, for steps that restore it, in whatever epoch; it stays until it is discarded.

        Raises as `save`, and DataLoss for what is damaged, missing, or of a pool of another form.
        """
        ...

    async def discard(self, member: int, tickets: Sequence[int]) -> None:
        """Has a member forget what it fetched under these tickets, and fetch nothing more under them."""
        ...

    @property
    def losses(self) -> tuple[Loss, ...]:
        """The ranks that were lost last, and what became of their places; the latest one last."""
        ...

    async def close(self) -> None:
        """Tells the ranks to leave."""
        ...


class Fleet(Protocol):
    """Places, watches and ends the processes of the ranks. Implemented for Ray and for plain processes."""

    @property
    def num_missing(self) -> int:
        """Slots that `reserve` waits for now."""
        ...

    async def reserve(self, config: EngineConfig, patience: float = 0.0) -> str:
        """Finds a place for each rank; the address of this machine at which all of them reach the coordinator: that of
        the loopback where all are on this machine. Slots that may yet come are waited for, at most `patience` seconds.

        Raises StartError when there are fewer slots than ranks.
        """
        ...

    async def launch(self, config: EngineConfig, invitations: Sequence[ConnectInfo], on_death: OnDeath) -> None:
        """Starts one process per rank, which gets its invitation, in the reserved places: they are the members from 0
        on. Calls `on_death` when one ends on its own."""
        ...

    def where(self, member: int) -> str:
        """What is said behind a reason for which a member was lost: its node and that one's address, unless all
        members are on this machine."""
        ...

    async def kill(self, member: int) -> None:
        """Ends the process of a member at once, whatever state it is in, and waits until that is seen. Nothing to do
        for one that is gone, or was never there."""
        ...

    async def replace(self, lost: int, member: int, invitation: ConnectInfo, config: EngineConfig) -> None:
        """Starts a process for a new member in the slot of a lost one, whose process is killed if it still runs.
        `on_death` is told of it as of the others.

        Raises StartError while there is no such slot, as when its machine is gone: it may come back.
        """
        ...

    def shutdown(self) -> Awaitable[None]:
        """Ends all processes that were started and waits until they are gone."""
        ...
