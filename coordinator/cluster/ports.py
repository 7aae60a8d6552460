"""Protocols between the parts of the coordinator, small enough to be faked, and the types that they exchange."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from longleaf.config import EngineConfig
from longleaf.errors import LongleafError
from longleaf.formatting import human_seconds
from longleaf.rank_protocol.group_messages import Ready
from longleaf.rank_protocol.member_messages import Died, Hello
from longleaf.rank_protocol.rank_spec import ConnectInfo
from longleaf.rank_protocol.snapshots import Fetch, Save, Saved
from longleaf.types import Loss

if TYPE_CHECKING:
    from coordinator.cluster.groups.group import RankGroup

OnDeath = Callable[[int, str], None]
"""Called with the member number and the reason when the process of a member ends, from any thread."""
Kill = Callable[[int], Awaitable[None]]
"""Kills the process of a member, as `Fleet.kill`."""
LocationOf = Callable[[int], str]
"""Returns the location of a member, as `Fleet.location_of`."""


def ignore_event(member: int, reason: str) -> None:
    """An OnDeath that ignores the event."""
    del member, reason


def unknown_node(member: int) -> str:
    """A Where that returns no location."""
    del member
    return ""


class EpochEnd(msgspec.Struct, frozen=True):
    """The reason why an epoch ended."""

    error: LongleafError
    """RankLost, which names the rank, where a rank was lost; GroupFailed where all ranks are alive; StartError for a
    request that no rank can serve.
    """
    steps: tuple[int, ...] = ()
    """Candidates for the step in which the epoch ended: one where it is known, none when no step was running."""


@dataclass(frozen=True)
class Formation:
    """The ranks of an epoch."""

    epoch: int
    hellos: tuple[Hello, ...]
    """In rank order."""
    readies: tuple[Ready, ...]
    """In rank order."""
    group: "RankGroup"

    @property
    def members(self) -> tuple[int, ...]:
        """The member numbers, in rank order. A member keeps its number across epochs."""
        return tuple(hello.member for hello in self.hellos)


# --- events of members; str() gives the text for the operator ---


@dataclass(frozen=True)
class MemberLost:
    """A member was lost, with its rank and the epoch of that rank; None and 0 if the member was in no epoch."""

    member: int
    rank: int | None
    epoch: int
    node: str
    """Empty when the member died before it reported its node."""
    reason: str
    is_replaced: bool
    """Whether a replacement process will be started."""
    report: Died | None = None
    """The member's own report of its end; None if the member sent none."""

    def __str__(self) -> str:
        who = f"member {self.member}" + (f" on node {self.node}" if self.node else "")
        had = "" if self.rank is None else f", rank {self.rank} of epoch {self.epoch}"
        return f"lost {who}{had}: {self.reason}"


@dataclass(frozen=True)
class ReplacementStarted:
    """A process was started for `member`, which replaces the lost one."""

    member: int
    lost: int

    def __str__(self) -> str:
        return f"started member {self.member} to replace member {self.lost}"


@dataclass(frozen=True)
class ReplacementDelayed:
    """The replacement of `lost` is delayed."""

    lost: int
    seconds: float
    reason: str

    def __str__(self) -> str:
        return f"no replacement of member {self.lost} for at least {human_seconds(self.seconds)}: {self.reason}"


@dataclass(frozen=True)
class ReplacementAbandoned:
    """`lost` will not be replaced unless a replacement is requested."""

    lost: int
    reason: str

    def __str__(self) -> str:
        return f"no replacement of member {self.lost}: {self.reason}"


@dataclass(frozen=True)
class MemberJoined:
    """A replacement is a rank from this epoch on."""

    member: int
    rank: int
    node: str
    epoch: int

    def __str__(self) -> str:
        return f"member {self.member} on node {self.node} joined as rank {self.rank} of epoch {self.epoch}"


MemberEvent = MemberLost | ReplacementStarted | ReplacementDelayed | ReplacementAbandoned | MemberJoined


class Ranks(Protocol):
    """The ranks as the engine sees them, from epoch to epoch.

    Implemented by coordinator.cluster.rank_manager; faked by tests.support.fakes.ranks.
    """

    async def start(self, epoch: int) -> Formation:
        """Wait until all members have joined the first epoch, which has this number.

        Raises StartError, ModelRefused, RankLost or GroupFailed.
        """
        ...

    async def form(self, epoch: int) -> Formation:
        """End the previous epoch and wait until every live member that has loaded the model, at least one, has joined
        this one. Pending kills are completed first. No step may be running.

        An epoch that does not form in time is retried under the next number; the formation contains the number that
        succeeded. Raises RankLost when no member is left, and Unavailable when every attempt fails.
        """
        ...

    @property
    def missing_weights(self) -> float:
        """The fraction of sharded weights that no member holds: the next epoch forms once members have read it."""
        ...

    async def wait_joinable(self) -> None:
        """Wait until a member outside the epoch has loaded the model. May be cancelled."""
        ...

    async def wait_ready(self) -> None:
        """Wait until no replacement of a lost member is pending. May be cancelled."""
        ...

    async def save(self, member: int, order: Save) -> Saved:
        """Make a member of the epoch write runs that it holds to storage. The write happens outside the steps, after
        all steps that were sent before. The runs must stay in place until the call returns or the epoch ends. May be
        cancelled. The ticket must differ from those of the member's other pending orders.

        Raises StorageUnavailable, RankLost when the member is lost meanwhile, and Unavailable when nothing was written
        because the epoch ended or the ticket was discarded. The data may have been written even if an error is raised.
        """
        ...

    async def fetch(self, member: int, order: Fetch) -> None:
        """Make a member read a piece for restore steps in any epoch; the member keeps the piece until it is discarded.

        Raises as `save`, and DataLoss for a piece that is damaged, missing, or written by a pool of another layout.
        """
        ...

    async def discard(self, member: int, tickets: Sequence[int]) -> None:
        """Make a member drop the pieces fetched under these tickets, and fetch nothing more under them."""
        ...

    @property
    def losses(self) -> tuple[Loss, ...]:
        """The most recent losses of ranks and the states of their replacements; the latest last."""
        ...

    async def close(self) -> None:
        """Order the ranks to exit."""
        ...


class Fleet(Protocol):
    """Places, watches and ends the processes of the ranks. Implemented for Ray and for plain processes."""

    @property
    def num_missing(self) -> int:
        """Slots that `reserve` is currently waiting for."""
        ...

    async def reserve(self, config: EngineConfig, patience: float = 0.0) -> str:
        """Reserve a slot for each rank and return the address of this machine at which all ranks reach the coordinator;
        the loopback address if all ranks are on this machine. Waits at most `patience` seconds for missing slots.

        Raises StartError when there are fewer slots than ranks.
        """
        ...

    async def rank_memory(self) -> int | None:
        """Return the bytes of memory of each rank, the smallest over the reserved slots; None if they are unknown."""
        ...

    async def launch(self, config: EngineConfig, invitations: Sequence[ConnectInfo], on_death: OnDeath) -> None:
        """Start one process per rank in the reserved slots, each with its invitation; the members are numbered from 0.
        Calls `on_death` when a process ends on its own.
        """
        ...

    def location_of(self, member: int) -> str:
        """Return a suffix for the reason of a loss: the node of the member and the address of that node; empty if all
        members are on this machine.
        """
        ...

    async def kill(self, member: int) -> None:
        """Kill the process of a member immediately, whatever its state, and wait for its exit. No effect if the process
        does not exist.
        """
        ...

    async def replace(self, lost: int, member: int, invitation: ConnectInfo, config: EngineConfig) -> None:
        """Start a process for a new member in the slot of a lost one, whose process is killed if it still runs.
        `on_death` is called for it as for the others.

        Raises StartError while the slot is unavailable, for example because its machine is down; it may become
        available again.
        """
        ...

    def shutdown(self) -> Awaitable[None]:
        """Kill all started processes and wait for their exit."""
        ...
