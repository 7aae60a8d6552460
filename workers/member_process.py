"""What a member does between its birth and its end: it loads, and joins one epoch after the other."""

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from longleaf.errors import ExchangeAborted, RankLost, StartError
from longleaf.rank_protocol.encoding import ToRank
from longleaf.rank_protocol.group_messages import GroupFailure, Join, KvLayout, OpenStore, StoreOpened
from longleaf.rank_protocol.member_messages import Load, Loaded, MemberProgress, Stop
from longleaf.rank_protocol.rank_spec import RankSpec
from longleaf.rank_protocol.snapshots import Discard, Fetch, Outcome, Save
from longleaf.rank_protocol.step import StepPlan
from workers.pending import StepHandle
from workers.ports import RankRuntime, Transport

CLOSE_SECONDS = 5.0
"""How long a member may take to leave an epoch; then its process ends as it is. Longer than fleets wait before they
kill."""
LOOK_SECONDS = 5e-5
"""Between two looks whether a device is done, or the next step is there."""
MAX_REASON_CHARACTERS = 8192
"""Characters of what is told of an exception: the coordinator takes no larger messages than ranks should send."""
LIBRARY = "longleaf"
"""Whose logger notes are taken of."""
log = logging.getLogger(__name__)


class MemberStatus:
    """Where a member stands, for the thread of its pulse: it tells how far the other one has come, and frees it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rank: RankRuntime | None = None
        self._now = MemberProgress()
        """With the exchanges that were entered before the step."""
        self.fenced = 0
        """The last epoch that has ended for everybody."""

    @property
    def progress(self) -> MemberProgress:
        rank, now = self._rank, self._now
        return MemberProgress(now.epoch, now.step, rank.num_exchanges - now.num_exchanges if rank else 0)

    def enter(self, epoch: int, rank: RankRuntime) -> None:
        """The member joins an epoch. Raises ExchangeAborted if that has ended."""
        with self._lock:
            if epoch <= self.fenced:
                raise ExchangeAborted(f"epoch {epoch} has ended")
            self._rank, self._now = rank, MemberProgress(epoch)

    def begin(self, epoch: int, step: int, rank: RankRuntime) -> None:
        """The member begins a step."""
        self._now = MemberProgress(epoch, step, rank.num_exchanges)

    def leave(self) -> None:
        """The member is in no epoch, and frees itself of what it does."""
        with self._lock:
            self._rank, self._now = None, MemberProgress()

    def fence(self, epoch: int) -> None:
        """Epoch `epoch` has ended: the member must not wait for others there, nor join it."""
        with self._lock:
            self.fenced = max(self.fenced, epoch)
            if self._rank is not None and self._now.epoch <= epoch:
                self._rank.fence()


@contextmanager
def taking_notes() -> Iterator[list[str]]:
    """The list to which goes what the library logs meanwhile: how ranks merge and why, what is slower than it could be.

    The coordinator tells it, and nobody else. A rank's own log lies where nobody looks, under Ray in a file of its
    worker.
    """
    logger, notes = logging.getLogger(LIBRARY), LogCapture()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(notes)
    logger.propagate = False
    try:
        yield notes.texts
    finally:
        logger.propagate = True
        logger.removeHandler(notes)
        logger.setLevel(level)


class LogCapture(logging.Handler):
    """Keeps the texts of what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def is_noted(record: logging.LogRecord) -> bool:
    """Whether what is being logged goes to notes."""
    is_taking = any(isinstance(handler, LogCapture) for handler in logging.getLogger(LIBRARY).handlers)
    return is_taking and record.name.split(".")[0] == LIBRARY


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
    """The process ends if what is done meanwhile takes too long: a timer of the interpreter's own sees to it, since
    what blocks may let no other thread run."""
    with open(os.devnull, "w") as no_client:
        faulthandler.dump_traceback_later(CLOSE_SECONDS, exit=True, file=no_client)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


class StartedStep(NamedTuple):
    """A step that is not answered yet, and when it was begun, by the monotonic clock."""

    step: int
    pending: StepHandle
    began: float


class ProtocolError(TypeError):
    """The coordinator says what makes no sense now: one of both has a bug, and they cannot go on together. Only the
    kind of the message is told: in a plan there is what people have written."""


class MemberProcess:
    """Says hello, loads, and then does what it is told. What is raised in an epoch ends that for the member, which then
    waits for the next one; what is raised otherwise ends its life."""

    def __init__(
        self,
        spec: RankSpec,
        rank: RankRuntime,
        mailbox: Transport,
        standing: MemberStatus,
        answer: Callable[[Outcome], None],
    ) -> None:
        """`answer` says what became of orders; any thread calls it."""
        self._member = spec.member
        self._answer_order = answer
        self._rank = rank
        self._mailbox = mailbox
        self._standing = standing
        self._epoch = 0
        """The one that the member is in, or about to join; 0: none."""
        self._join: Join | None = None
        """The epoch that it is in, and its rank there."""
        self._ended = 0
        """The last epoch that has ended for it."""
        self._step = 0
        """The step that it is in, or began last in this epoch."""
        self._notes: list[str] = []
        """What was logged while the model was loaded, until that is told."""
        self._has_failed = False
        """Whether it could not join an epoch, last time, for a reason of this machine's own."""
        self._begun: StartedStep | None = None
        self._answered = 0.0

    def run(self) -> None:
        """Returns when the member is to leave. Raises ProtocolError, what ended the start, and what an epoch is not to
        blame for."""
        self._mailbox.send(self._rank.greet())
        match self._mailbox.receive():
            case Load():
                with taking_notes() as self._notes:
                    self._rank.load()
                self._mailbox.send(Loaded(self._member))
            case Stop():
                return
            case message:
                raise ProtocolError(f"before the model is loaded: {type(message).__name__}")
        while True:
            try:
                if isinstance(message := self._next(), Stop):
                    return
                self._do(message)
            except Exception as error:
                self._break(error)

    def _next(self) -> ToRank:
        """The next message. A step that was begun is answered as soon as its device is done with it, unless the message
        has come before."""
        while self._begun is not None and not self._mailbox.has_message:
            if self._begun.pending.is_done:
                self._answer()
            else:
                time.sleep(LOOK_SECONDS)
        return self._mailbox.receive()

    def _do(self, message: ToRank) -> None:
        match message:
            case StepPlan(epoch=epoch) as plan if self._join is not None and epoch == self._epoch:
                self._start(plan)
            case Save() | Fetch() | Discard() as order:
                self._rank.carry_out(order, self._answer_order)
            case StepPlan(epoch=epoch) | KvLayout(epoch=epoch) | OpenStore(epoch=epoch) | Join(epoch=epoch) if (
                self._is_over(epoch)
            ):
                pass  # it was sent before the coordinator knew
            case KvLayout(epoch=epoch) as layout if self._join is not None and epoch == self._epoch:
                self._rank.take(layout)
            case OpenStore(epoch=epoch) if self._join is None or epoch != self._epoch:
                self._turn_to(epoch)
                self._mailbox.send(StoreOpened(self._member, epoch, self._rank.open_store()))
            case Join(epoch=epoch) as join if self._join is None or epoch != self._epoch:
                self._turn_to(epoch)
                self._enter(join)
            case _:
                raise ProtocolError(f"out of place in epoch {self._epoch}: {type(message).__name__}")

    def _is_over(self, epoch: int) -> bool:
        """Whether an epoch has ended for this member, or for all before this one has joined it."""
        if epoch == self._epoch:
            return False
        return epoch < self._epoch or epoch <= max(self._ended, self._standing.fenced)

    def _turn_to(self, epoch: int) -> None:
        """Ends the epoch before, in order."""
        if epoch != self._epoch:
            self._leave()
            self._epoch = epoch

    def _enter(self, join: Join) -> None:
        """Reports what was logged since the last report."""
        with taking_notes() as more:
            self._standing.enter(join.epoch, self._rank)
            ready = self._rank.join(join)
        self._look_up()
        self._join, self._has_failed = join, False
        self._mailbox.send(msgspec.structs.replace(ready, notes=(*self._notes, *more)))
        self._notes = []

    def _start(self, plan: StepPlan) -> None:
        """Begins a step, and answers the one before it: first, unless both may be under way at once."""
        if not plan.may_overlap:
            self._answer()
        self._step = plan.step
        self._standing.begin(plan.epoch, plan.step, self._rank)
        began = time.monotonic()
        pending = self._rank.start(plan)
        self._answer()
        self._begun, self._step = StartedStep(plan.step, pending, began), plan.step
        if pending.is_done:
            self._answer()

    def _answer(self) -> None:
        """Answers the step that was begun, if there is one, and waits for its end. It takes from when it was begun, or
        the one before it was answered, whatever came later."""
        if self._begun is None:
            return
        (self._step, pending, began), self._begun = self._begun, None
        result = pending.result()
        self._look_up()
        now = time.monotonic()
        if self._join is not None and self._join.rank == 0 and result is not None:
            self._mailbox.send(msgspec.structs.replace(result, seconds=now - max(began, self._answered)))
        self._answered = now

    def _look_up(self) -> None:
        """Raises ExchangeAborted if the epoch has ended: a device that is freed from an exchange goes on as if it had
        received something."""
        if self._standing.fenced >= self._epoch:
            raise ExchangeAborted(f"epoch {self._epoch} has ended")

    def _break(self, error: Exception) -> None:
        """Leaves the epoch that the error ends, and says so. Raises the error if it is not one of an epoch, or would
        come again: settings that cannot work, or the second one of this machine in a row."""
        if not self._epoch or isinstance(error, StartError | ProtocolError):
            raise error
        is_own = self._join is None and isinstance(error, OSError | MemoryError)
        if is_own and self._has_failed:
            raise error
        self._has_failed = is_own
        is_fenced = self._standing.fenced >= self._epoch
        level = logging.INFO if is_fenced else logging.WARNING  # who has ended it says why
        reason = f"epoch {self._epoch} was ended" if is_fenced else reason_of(error)
        is_ours = not is_fenced and not isinstance(error, RankLost)  # where another one is gone, nothing here is wrong
        log.log(level, "epoch %d is broken for member %d: %s", self._epoch, self._member, reason, exc_info=is_ours)
        blamed = error.rank if isinstance(error, RankLost) and not is_fenced else None
        # first of all: to leave may take its time, and who says nothing meanwhile is taken for the one that is gone
        self._mailbox.send(GroupFailure(self._member, self._epoch, self._step, reason, blamed))
        self._leave()

    def _leave(self) -> None:
        """Leaves the epoch, if it is in one; what was begun there is dropped."""
        if self._epoch:
            self._ended, self._epoch, self._step = self._epoch, 0, 0
            self._join = self._begun = None
            self._standing.leave()
            with ending_in_time():
                self._rank.leave()
