"""The interfaces that the lifecycle of a member uses: its computation, and its connection."""

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
        """Begins an order in the background, without waiting. Raises nothing. `answer` receives the outcome of a Save
        or a Fetch once, possibly on another thread. At the end of an epoch, saves that have not begun to copy are
        dropped. Fetched pieces are kept.
        """
        ...

    @property
    def num_exchanges(self) -> int:
        """Number of exchanges with other ranks that were begun in this epoch. Thread-safe."""
        ...

    def fence(self) -> None:
        """Aborts the current or next wait for other ranks, in an exchange or a join: it raises an error.
        Thread-safe."""
        ...

    def leave(self) -> None:
        """Leaves the epoch, however it ended, and discards its state; the model and the pool remain. The process ends
        if this takes longer than member_process.CLOSE_SECONDS.
        """
        ...

    def close(self) -> None:
        """Like `leave`, but must be the last call."""
        ...


class Transport(Protocol):
    """The connection on which a member receives messages and answers. It must be used by one thread only."""

    def send(self, message: FromRank) -> None: ...

    def receive(self) -> ToRank:
        """Waits for the next message."""
        ...

    @property
    def has_message(self) -> bool: ...
