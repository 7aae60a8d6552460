"""A rank as its member process sees it, without torch: its interface, and the steps that it has begun."""

from collections.abc import Callable, Sequence
from typing import Protocol

from longleaf.rank_protocol.group_messages import Join, KvLayout, Ready
from longleaf.rank_protocol.member_messages import Hello
from longleaf.rank_protocol.snapshots import Order, Outcome
from longleaf.rank_protocol.step import StepPlan, StepResult


class StepHandle:
    """A step that was begun. A device may still be computing it; its result is available later."""

    def __init__(self, is_done: Callable[[], bool], finish: Callable[[], StepResult | None]) -> None:
        """`finish` waits for the device and returns the result."""
        self._is_done = is_done
        self._finish: Callable[[], StepResult | None] | None = finish
        self._result: StepResult | None = None

    @property
    def is_done(self) -> bool:
        """Whether `result` returns without waiting."""
        return self._finish is None or self._is_done()

    def result(self) -> StepResult | None:
        """Waits for the end of the step. Only rank 0 has a result."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish()
        return self._result


def done(result: StepResult | None) -> StepHandle:
    """A step that has finished."""
    return StepHandle(lambda: True, lambda: result)


class RankRuntime(Protocol):
    """The computation of one member."""

    def make_hello(self) -> Hello:
        """The hello message of the member. The first member of a machine adds the fingerprint of the model."""
        ...

    def load(self, parts: Sequence[int] = ()) -> None:
        """Loads the model, or these parts of its weights, and allocates the pool. Raises ModelRefused."""
        ...

    def hold(self, parts: Sequence[int]) -> int:
        """Outside of epochs: uses these parts of the weights from now on, and reads those that are not in memory.
        Returns the bytes that were read.
        """
        ...

    def open_store(self) -> int:
        """Opens the rendezvous store of the next epoch and returns its port."""
        ...

    def join(self, join: Join) -> Ready:
        """Joins the process groups of an epoch. The block table starts empty."""
        ...

    def set_layout(self, layout: KvLayout) -> None:
        """Replaces the block table by the layout."""
        ...

    def start(self, plan: StepPlan) -> StepHandle:
        """Begins a step. Only rank 0's result is sent."""
        ...

    def submit_order(self, order: Order, answer: Callable[[Outcome], None]) -> None:
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
