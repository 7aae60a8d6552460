"""What a member's life is made of, as the life sees it: a computation, and a connection."""

from collections.abc import Callable
from typing import Protocol

from longleaf.rank_protocol.encoding import FromRank, ToRank
from longleaf.rank_protocol.group_messages import Join, KvLayout, Ready
from longleaf.rank_protocol.member_messages import Hello
from longleaf.rank_protocol.snapshots import Order, Outcome
from longleaf.rank_protocol.step import StepPlan
from workers.pending import StepHandle


class RankRuntime(Protocol):
    """The computation of one member."""

    def greet(self) -> Hello:
        """Who the member is. The first one of a machine reads which model it has."""
        ...

    def load(self) -> None:
        """Loads the model and lays out the pool. Raises ModelRefused."""
        ...

    def open_store(self) -> int:
        """Opens the store where the next epoch's ranks meet; its port."""
        ...

    def join(self, join: Join) -> Ready:
        """Joins the process groups of an epoch. Nothing is held there yet."""
        ...

    def take(self, layout: KvLayout) -> None:
        """Takes for held what is told, and nothing else."""
        ...

    def start(self, plan: StepPlan) -> StepHandle:
        """Begins a step. Only rank 0's result is sent."""
        ...

    def carry_out(self, order: Order, answer: Callable[[Outcome], None]) -> None:
        """Begins what is to be done beside the steps, without waiting for it, and raises nothing. `answer` is told once
        what became of a Save or a Fetch, perhaps by another thread. What was not begun of a Save when an epoch ends is
        not done; what was fetched stays."""
        ...

    @property
    def num_exchanges(self) -> int:
        """Exchanges with others that were entered in this epoch. Any thread may look."""
        ...

    def fence(self) -> None:
        """Has the thread raise that waits for others, now or as it joins. Any thread may call it."""
        ...

    def leave(self) -> None:
        """Leaves the epoch, whatever has happened in it, and forgets all that is of it. Model, keys and values stay.
        Takes at most life.CLOSE_SECONDS, or the process ends."""
        ...

    def close(self) -> None:
        """As `leave`; nothing follows."""
        ...


class Transport(Protocol):
    """The connection on which a member receives and answers. One thread uses it."""

    def send(self, message: FromRank) -> None: ...

    def receive(self) -> ToRank:
        """Waits for the next message."""
        ...

    @property
    def has_message(self) -> bool: ...
