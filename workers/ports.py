"""The interfaces that a member's lifecycle uses: a computation, and a connection."""

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
        """The hello message of the member. The first member of a machine adds the fingerprint of the model."""
        ...

    def load(self) -> None:
        """Loads the model and allocates the pool. Raises ModelRefused."""
        ...

    def open_store(self) -> int:
        """Opens the rendezvous store of the next epoch and returns its port."""
        ...

    def join(self, join: Join) -> Ready:
        """Joins the process groups of an epoch. The block table starts empty."""
        ...

    def take(self, layout: KvLayout) -> None:
        """Replaces the block table by the layout."""
        ...

    def start(self, plan: StepPlan) -> StepHandle:
        """Begins a step. Only rank 0's result is sent."""
        ...

    def carry_out(self, order: Order, answer: Callable[[Outcome], None]) -> None:
        """Begins an order in the background, without waiting; raises nothing. `answer` receives the outcome of a Save
        or a Fetch once, possibly on another thread. At the end of an epoch, the copies of its saves that were not begun
        are dropped; fetched pieces stay.
        """
        ...

    @property
    def num_exchanges(self) -> int:
        """Exchanges with other ranks that were entered in this epoch. Thread-safe."""
        ...

    def fence(self) -> None:
        """Makes the thread raise that waits for other ranks, now or during a join. Thread-safe."""
        ...

    def leave(self) -> None:
        """Leaves the epoch, however it ended, and discards its state; the model and the pool stay. The process ends if
        this takes longer than member_process.CLOSE_SECONDS.
        """
        ...

    def close(self) -> None:
        """Like `leave`; no call follows."""
        ...


class Transport(Protocol):
    """The connection on which a member receives messages and answers. It must be used by one thread only."""

    def send(self, message: FromRank) -> None: ...

    def receive(self) -> ToRank:
        """Waits for the next message."""
        ...

    @property
    def has_message(self) -> bool: ...
