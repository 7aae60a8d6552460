"""Lifecycle of a group member: load the model, then join one epoch after another."""

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import msgspec

from longleaf.errors import ExchangeAborted, RankLost, StartError
from longleaf.rank_protocol.encoding import FromRank, ToRank
from longleaf.rank_protocol.group_messages import GroupFailure, Join, KvLayout, OpenStore, StoreOpened
from longleaf.rank_protocol.member_messages import Hold, Load, Loaded, MemberProgress, Stop, WeightsReady
from longleaf.rank_protocol.rank_spec import RankSpec
from longleaf.rank_protocol.snapshots import Discard, Fetch, Outcome, Save
from longleaf.rank_protocol.step import StepPlan
from workers.logs import LogCapture, capturing_logs
from workers.rank_runtime import RankRuntime, StepHandle

CLOSE_SECONDS = 5.0
"""Seconds a member may take to leave an epoch before its process is ended. Longer than the time after which a fleet
kills processes.
"""
LOOK_SECONDS = 5e-5
"""Seconds between checks for a finished device or the next step."""
MAX_REASON_CHARACTERS = 8192
"""Limit on the characters of a reported exception: the coordinator rejects messages longer than ranks should send."""
log = logging.getLogger(__name__)


class Transport(Protocol):
    """The connection on which a member receives messages and answers. It must be used by one thread only."""

    def send(self, message: FromRank) -> None: ...

    def receive(self) -> ToRank:
        """Waits for the next message."""
        ...

    @property
    def has_message(self) -> bool: ...


class MemberStatus:
    """The position of a member, shared with its heartbeat thread, which reports the progress of the main thread and
    aborts its exchanges.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rank: RankRuntime | None = None
        self._now = MemberProgress()
        """`num_exchanges` counts the exchanges that were entered before the step."""
        self.fenced = 0
        """The last epoch that has ended for the whole group."""

    @property
    def progress(self) -> MemberProgress:
        rank, now = self._rank, self._now
        return MemberProgress(now.epoch, now.step, rank.num_exchanges - now.num_exchanges if rank else 0)

    def enter_epoch(self, epoch: int, rank: RankRuntime) -> None:
        """Records that the member joins an epoch. Raises ExchangeAborted if the epoch has ended."""
        with self._lock:
            if epoch <= self.fenced:
                raise ExchangeAborted(f"epoch {epoch} has ended")
            self._rank, self._now = rank, MemberProgress(epoch)

    def begin_step(self, epoch: int, step: int, rank: RankRuntime) -> None:
        """Records that the member begins a step."""
        self._now = MemberProgress(epoch, step, rank.num_exchanges)

    def leave_epoch(self) -> None:
        """Records that the member is in no epoch, and drops the reference to its rank."""
        with self._lock:
            self._rank, self._now = None, MemberProgress()

    def fence(self, epoch: int) -> None:
        """Marks `epoch` as ended: the member must neither wait for other ranks in it nor join it."""
        with self._lock:
            self.fenced = max(self.fenced, epoch)
            if self._rank is not None and self._now.epoch <= epoch:
                self._rank.fence()


def reason_of(error: Exception) -> str:
    match error:
        case StartError():
            reason = str(error)
        case RankLost():
            reason = error.reason
        case _:
            reason = f"{type(error).__name__}: {error}"
    return reason[:MAX_REASON_CHARACTERS]


@contextmanager
def ending_in_time() -> Iterator[None]:
    """Ends the process if the body takes longer than CLOSE_SECONDS. The timer of faulthandler is used because a
    blocking call may hold the GIL.
    """
    with open(os.devnull, "w") as null_device:
        faulthandler.dump_traceback_later(CLOSE_SECONDS, exit=True, file=null_device)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


class StartedStep(NamedTuple):
    """A step that is not answered yet, and its start time on the monotonic clock."""

    step: int
    pending: StepHandle
    began: float


class ProtocolError(TypeError):
    """A message of the coordinator that is not valid in the current state. One side has a bug, so the member cannot
    continue. Only the type of the message is reported: a plan contains user text.
    """


class MemberProcess:
    """Sends hello, loads the model and then executes messages. An error within an epoch ends that epoch for the member,
    which then waits for the next one; any other error ends the process.
    """

    def __init__(
        self,
        spec: RankSpec,
        rank: RankRuntime,
        transport: Transport,
        status: MemberStatus,
        answer: Callable[[Outcome], None],
    ) -> None:
        """`answer` reports the outcome of an order. It may be called from any thread."""
        self._member = spec.member
        self._answer_order = answer
        self._rank = rank
        self._transport = transport
        self._status = status
        self._epoch = 0
        """The current epoch, or the one about to be joined; 0: none."""
        self._join: Join | None = None
        """The join message of the current epoch, which holds the rank."""
        self._ended = 0
        """The last epoch that has ended for this member."""
        self._step = 0
        """The current step, or the last one that was begun in this epoch."""
        self._captured_logs = LogCapture()
        """Messages logged while the model was loaded, until they are reported."""
        self._has_failed = False
        """Whether the last attempt to join an epoch failed for a reason local to this machine."""
        self._started_step: StartedStep | None = None
        self._last_answer_time = 0.0

    def run(self) -> None:
        """Returns on a Stop message. Raises ProtocolError, errors of the start, and errors that did not originate in an
        epoch.
        """
        self._transport.send(self._rank.make_hello())
        match self._transport.receive():
            case Load(parts):
                with capturing_logs() as self._captured_logs:
                    self._rank.load(parts)
                self._transport.send(Loaded(self._member))
            case Stop():
                return
            case message:
                raise ProtocolError(f"before the model is loaded: {type(message).__name__}")
        while True:
            try:
                if isinstance(message := self._next(), Stop):
                    return
                self._handle(message)
            except Exception as error:
                self._fail_epoch(error)

    def _next(self) -> ToRank:
        """Returns the next message. If a started step finishes first, it is answered before the message is received."""
        while self._started_step is not None and not self._transport.has_message:
            if self._started_step.pending.is_done:
                self._answer()
            else:
                time.sleep(LOOK_SECONDS)
        return self._transport.receive()

    def _handle(self, message: ToRank) -> None:
        match message:
            case StepPlan(epoch=epoch) as plan if self._join is not None and epoch == self._epoch:
                self._start(plan)
            case Save() | Fetch() | Discard() as order:
                self._rank.submit_order(order, self._answer_order)
            case Hold(parts):
                self._leave_epoch()  # an error from now on ends the process
                self._transport.send(WeightsReady(self._member, self._rank.hold(parts)))
            case StepPlan(epoch=epoch) | KvLayout(epoch=epoch) | OpenStore(epoch=epoch) | Join(epoch=epoch) if (
                self._is_over(epoch)
            ):
                pass  # it was sent before the coordinator learned of the end
            case KvLayout(epoch=epoch) as layout if self._join is not None and epoch == self._epoch:
                self._rank.set_layout(layout)
            case OpenStore(epoch=epoch) if self._join is None or epoch != self._epoch:
                self._switch_epoch(epoch)
                self._transport.send(StoreOpened(self._member, epoch, self._rank.open_store()))
            case Join(epoch=epoch) as join if self._join is None or epoch != self._epoch:
                self._switch_epoch(epoch)
                self._join_epoch(join)
            case _:
                raise ProtocolError(f"out of order in epoch {self._epoch}: {type(message).__name__}")

    def _is_over(self, epoch: int) -> bool:
        """Whether an epoch has ended for this member, or for the whole group before this member joined it."""
        if epoch == self._epoch:
            return False
        return epoch < self._epoch or epoch <= max(self._ended, self._status.fenced)

    def _switch_epoch(self, epoch: int) -> None:
        """Leaves the previous epoch in an orderly way."""
        if epoch != self._epoch:
            self._leave_epoch()
            self._epoch = epoch

    def _join_epoch(self, join: Join) -> None:
        """Joins an epoch and reports the messages logged since the last report."""
        with capturing_logs() as more:
            self._status.enter_epoch(join.epoch, self._rank)
            ready = self._rank.join(join)
        self._check_fenced()
        self._join, self._has_failed = join, False
        notes = (*self._captured_logs.warnings, *more.warnings)
        self._transport.send(
            msgspec.structs.replace(ready, notes=notes, details=(*self._captured_logs.details, *more.details))
        )
        self._captured_logs = LogCapture()

    def _start(self, plan: StepPlan) -> None:
        """Begins a step and answers the previous one, which comes first unless the two may overlap."""
        if not plan.may_overlap:
            self._answer()
        self._step = plan.step
        self._status.begin_step(plan.epoch, plan.step, self._rank)
        began = time.monotonic()
        pending = self._rank.start(plan)
        self._answer()
        self._started_step, self._step = StartedStep(plan.step, pending, began), plan.step
        if pending.is_done:
            self._answer()

    def _answer(self) -> None:
        """Waits for the started step, if any, and answers it. Its duration counts from its start or from the answer to
        the previous step, whichever is later.
        """
        if self._started_step is None:
            return
        (self._step, pending, began), self._started_step = self._started_step, None
        result = pending.result()
        self._check_fenced()
        now = time.monotonic()
        if self._join is not None and self._join.rank == 0 and result is not None:
            self._transport.send(msgspec.structs.replace(result, seconds=now - max(began, self._last_answer_time)))
        self._last_answer_time = now

    def _check_fenced(self) -> None:
        """Raises ExchangeAborted if the epoch has ended: a device released from an aborted exchange continues as if it
        had received data.
        """
        if self._status.fenced >= self._epoch:
            raise ExchangeAborted(f"epoch {self._epoch} has ended")

    def _fail_epoch(self, error: Exception) -> None:
        """Leaves the epoch that the error ends and reports the failure. Raises the error if no epoch caused it or if it
        would recur: unusable settings, or the second local failure in a row.
        """
        if not self._epoch or isinstance(error, StartError | ProtocolError):
            raise error
        is_own = self._join is None and isinstance(error, OSError | MemoryError)
        if is_own and self._has_failed:
            raise error
        self._has_failed = is_own
        is_fenced = self._status.fenced >= self._epoch
        level = logging.INFO if is_fenced else logging.WARNING  # the side that ended the epoch logs the reason
        reason = f"epoch {self._epoch} was ended" if is_fenced else reason_of(error)
        is_ours = not is_fenced and not isinstance(error, RankLost)  # the loss of another rank is no error here
        log.log(level, "epoch %d failed for member %d: %s", self._epoch, self._member, reason, exc_info=is_ours)
        blamed = error.rank if isinstance(error, RankLost) and not is_fenced else None
        # Report first: leaving may take time, and a member that is silent meanwhile would be taken for the lost one.
        self._transport.send(GroupFailure(self._member, self._epoch, self._step, reason, blamed))
        self._leave_epoch()

    def _leave_epoch(self) -> None:
        """Leaves the current epoch, if any, and drops its started step."""
        if self._epoch:
            self._ended, self._epoch, self._step = self._epoch, 0, 0
            self._join = self._started_step = None
            self._status.leave_epoch()
            with ending_in_time():
                self._rank.leave()
