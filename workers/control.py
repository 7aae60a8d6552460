"""A rank's end of the control channel: receive plans, execute them, and report."""

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import msgspec
import zmq

from longleaf.channel.encoding import FromRank, ToRank, decode_to_rank, encode
from longleaf.channel.lives import PULSE_SECONDS, Died, Heartbeat, Hello, Join, Ready, Stop
from longleaf.channel.rank_spec import Invitation, RankSpec
from longleaf.channel.step import StepPlan
from longleaf.errors import StartError, WorkerLost
from workers.pending import Pending

LINGER_MILLISECONDS = 2000
CLOSE_SECONDS = 5.0
"""How long a rank may take to close; then its process ends as it is. Longer than fleets wait before they kill."""
LOOK_SECONDS = 5e-5
"""Between two looks whether a device is done, or the next step is there."""
MAX_REASON_CHARACTERS = 8192
"""Characters of what is told of an exception: the coordinator takes no larger messages than ranks should send."""
log = logging.getLogger(__name__)


class Computation(Protocol):
    """The computation of one rank. Any exception ends the rank, and with it the fleet."""

    def open_store(self) -> int:
        """Rank 0 only: opens the store where the process group meets; its port, or 0 at world size 1."""
        ...

    def load(self) -> None:
        """Loads the model and lays out the pool. Raises ModelRefused."""
        ...

    def join(self, join: Join) -> Ready:
        """Joins the process groups of an epoch."""
        ...

    def start(self, plan: StepPlan) -> Pending:
        """Begins a step. Only rank 0's result is sent."""
        ...

    def close(self) -> None:
        """Leaves the groups. Takes at most CLOSE_SECONDS, or the process ends."""
        ...


class Channel:
    """The connection on which a rank receives and answers. One thread uses it."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", spec: RankSpec) -> None:
        self._socket = connect(context, spec.invitation, spec.invitation.commands_id)

    def send(self, message: FromRank) -> None:
        self._socket.send(encode(message))

    def receive(self) -> ToRank:
        """Waits for the next message."""
        return decode_to_rank(self._socket.recv())

    @property
    def has_message(self) -> bool:
        return bool(self._socket.poll(0))

    def close(self) -> None:
        self._socket.close()


def connect(context: "zmq.Context[zmq.Socket[bytes]]", invitation: Invitation, identity: bytes) -> "zmq.Socket[bytes]":
    """A connection to the coordinator, and to nobody else. Only members that were invited are heard there."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
    socket.setsockopt(zmq.IPV6, "[" in invitation.address)
    socket.setsockopt(zmq.CURVE_SERVERKEY, invitation.server_key)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, invitation.public_key)
    socket.setsockopt(zmq.CURVE_SECRETKEY, invitation.secret_key)
    socket.connect(invitation.address)
    return socket


class Pulse(threading.Thread):
    """Reports once a second that the process lives, whatever its main thread does.

    With `parent`, the process ends as soon as that process is no longer its parent: ranks must not outlive the
    coordinator that started them, even if it is killed.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", spec: RankSpec, parent: int | None) -> None:
        super().__init__(name="pulse", daemon=True)
        self._context = context
        self._spec = spec
        self._parent = parent
        self._stop_requested = threading.Event()

    def run(self) -> None:
        socket = connect(self._context, self._spec.invitation, self._spec.invitation.pulse_id)
        message = encode(Heartbeat(self._spec.rank))
        while True:
            if self._parent is not None and os.getppid() != self._parent:
                os._exit(1)
            socket.send(message)
            if self._stop_requested.wait(PULSE_SECONDS):
                break
        socket.close(linger=0)

    def stop(self) -> None:
        self._stop_requested.set()
        self.join()


def serve(spec: RankSpec, make_rank: Callable[[RankSpec], Computation], parent: int | None = None) -> int:
    """Lives the life of a rank. Returns the exit code: 0 when told to leave, 1 when something raised.

    `parent` is the process that must stay alive, if any. The process ends if the rank does not close in time.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel, pulse = Channel(context, spec), Pulse(context, spec, parent)
    pulse.start()
    try:
        return _live(spec, make_rank, channel)
    finally:
        pulse.stop()
        channel.close()
        context.term()


def _live(spec: RankSpec, make_rank: Callable[[RankSpec], Computation], channel: Channel) -> int:
    rank: Computation | None = None
    code = 0
    try:
        rank = make_rank(spec)
        Life(spec, rank, channel).run()
    except Exception as error:
        if not isinstance(error, StartError):  # its message says it all
            log.exception("rank %d failed", spec.rank)
        blamed = error.rank if isinstance(error, WorkerLost) else None
        # before closing, which may block or raise for the same reason
        channel.send(Died(spec.rank, _reason(error), isinstance(error, StartError), blamed))
        code = 1
    finally:
        if rank is not None and not _is_closed(rank):
            code = 1
    return code


def _is_closed(rank: Computation) -> bool:
    """Closes the rank; whether it could. The process ends if that takes too long: a timer of the interpreter's own sees
    to it, since what blocks may let no other thread run."""
    with open(os.devnull, "w") as nobody:
        faulthandler.dump_traceback_later(CLOSE_SECONDS, exit=True, file=nobody)
        try:
            rank.close()
        except Exception:
            log.exception("a rank could not close")
            return False
        finally:
            faulthandler.cancel_dump_traceback_later()
    return True


@contextmanager
def taking_notes() -> Iterator[list[str]]:
    """The list to which goes what the library logs meanwhile: how ranks merge and why, what is slower than it could be.

    The coordinator tells it. A rank's own log lies where nobody looks, under Ray in a file of its worker.
    """
    logger, notes = logging.getLogger("longleaf"), Notes()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(notes)
    try:
        yield notes.texts
    finally:
        logger.removeHandler(notes)
        logger.setLevel(level)


class Notes(logging.Handler):
    """Keeps the texts of what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _reason(error: Exception) -> str:
    match error:
        case StartError():
            reason = str(error)
        case WorkerLost():
            reason = error.reason
        case _:
            reason = f"{type(error).__name__}: {error}"
    return reason[:MAX_REASON_CHARACTERS]


class Begun(NamedTuple):
    """A step that is not answered yet, and when it was begun, by the monotonic clock."""

    pending: Pending
    began: float


class Life:
    """What a rank does between its birth and its end: it says hello, loads, and then does what it is told. Whatever is
    raised ends it."""

    def __init__(self, spec: RankSpec, rank: Computation, channel: Channel) -> None:
        self._spec = spec
        self._rank = rank
        self._channel = channel
        self._epoch: int | None = None
        """The epoch that the rank has joined; None before the first."""
        self._begun: Begun | None = None
        self._answered = 0.0

    def run(self) -> None:
        """Returns when the rank is to leave. Raises TypeError when a message is out of place."""
        port = self._rank.open_store() if self._spec.rank == 0 else 0
        self._channel.send(Hello(self._spec.rank, self._spec.node, self._spec.host, os.getpid(), port))
        with taking_notes() as notes:
            self._rank.load()
        while True:
            match self._next():
                case StepPlan() as plan if plan.epoch == self._epoch:
                    self._start(plan)
                case Join() as join if self._epoch is None:
                    self._join(join, notes)
                case Stop():
                    return
                case message:
                    raise TypeError(f"out of place in epoch {self._epoch}: {message}")

    def _next(self) -> ToRank:
        """The next message. A step that was begun is answered as soon as its device is done with it, unless the message
        has come before."""
        while self._begun is not None and not self._channel.has_message:
            if self._begun.pending.is_done:
                self._answer()
            else:
                time.sleep(LOOK_SECONDS)
        return self._channel.receive()

    def _join(self, join: Join, notes: Sequence[str]) -> None:
        """Reports what `notes` say and what is logged meanwhile."""
        with taking_notes() as more:
            ready = self._rank.join(join)
        self._epoch = join.epoch
        self._channel.send(msgspec.structs.replace(ready, notes=(*notes, *more)))

    def _start(self, plan: StepPlan) -> None:
        """Begins a step, and answers the one before it: first, unless both may be under way at once."""
        if not plan.may_overlap:
            self._answer()
        began = time.monotonic()
        pending = self._rank.start(plan)
        self._answer()
        self._begun = Begun(pending, began)
        if pending.is_done:
            self._answer()

    def _answer(self) -> None:
        """Answers the step that was begun, if there is one, and waits for its end. It takes from when it was begun, or
        the one before it was answered, whatever came later."""
        if self._begun is None:
            return
        (pending, began), self._begun = self._begun, None
        result = pending.result()
        now = time.monotonic()
        if self._spec.rank == 0 and result is not None:
            self._channel.send(msgspec.structs.replace(result, seconds=now - max(began, self._answered)))
        self._answered = now
