"""Protocols between the parts of the coordinator, each small enough to be faked."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from longleaf.channel.lives import Hello, Ready
from longleaf.channel.rank_spec import Invitation
from longleaf.channel.step import StepPlan, StepResult
from longleaf.config import EngineConfig
from longleaf.errors import LongleafError

OnDeath = Callable[[int, str], None]
"""Is told which rank ended, and why, from any thread."""


class Ranks(Protocol):
    """The ranks as the engine sees them. Implemented by coordinator.ranks.control; faked by coordinator.ranks.fakes."""

    @property
    def hellos(self) -> tuple[Hello, ...]:
        """Who the ranks are, in rank order; complete once `start` has returned."""
        ...

    async def start(self, epoch: int) -> tuple[Ready, ...]:
        """Waits until all ranks have joined the epoch of this number and are ready; in rank order.

        Raises StartError, ModelRefused or WorkerLost.
        """
        ...

    async def step(self, plan: StepPlan) -> StepResult:
        """Runs one step. It may be called before earlier steps are answered; they run in the order of the calls.

        Raises WorkerLost when a rank raises, dies or passes the step's deadline.
        """
        ...

    async def wait_lost(self) -> LongleafError:
        """Returns, perhaps never, when a rank is lost, also between steps; names the rank. May be cancelled."""
        ...

    async def close(self) -> None:
        """Tells the ranks to leave."""
        ...


class Fleet(Protocol):
    """Places, watches and ends the processes of the ranks. Implemented for Ray and for plain processes."""

    async def reserve(self, config: EngineConfig) -> str:
        """Finds a place for each rank; the address of this machine at which all of them reach the coordinator: that of
        the loopback where all are on this machine.

        Raises StartError when there are fewer slots than ranks.
        """
        ...

    async def launch(self, config: EngineConfig, invitations: Sequence[Invitation], on_death: OnDeath) -> None:
        """Starts one process per rank, which gets its invitation, in the reserved places. Calls `on_death` when one
        ends on its own."""
        ...

    def shutdown(self) -> Awaitable[None]:
        """Ends all processes that were started and waits until they are gone."""
        ...
