"""A member's end of the control channel: receives commands and sends heartbeats."""

import logging
import os
import threading
import time
from collections.abc import Callable

import zmq

from longleaf.errors import RankLost, StartError
from longleaf.rank_protocol.encoding import FromRank, ToRank, decode_to_rank, encode
from longleaf.rank_protocol.group_messages import AbortExchanges
from longleaf.rank_protocol.member_messages import HEARTBEAT_SECONDS, Died, Heartbeat
from longleaf.rank_protocol.rank_spec import ConnectInfo, RankSpec
from longleaf.rank_protocol.snapshots import Outcome
from longleaf.resources import num_processors
from workers.logs import RankLogBuffer
from workers.member_process import MemberProcess, MemberStatus, ending_in_time, reason_of
from workers.rank_runtime import RankRuntime

LINGER_MILLISECONDS = 2000
AWAKE_SECONDS = 2e-3
"""Seconds a rank polls for the next message before it sleeps. A step that waits for the previous one arrives within a
millisecond, and waking a thread takes a tenth of that or more. Ranks without a CPU each sleep immediately: polling
would slow down the computing ranks (steps of four ranks on two CPUs took 5 to 10 % longer).
"""
END, OUTCOMES = "inproc://end-of-heartbeat", "inproc://outcomes"
log = logging.getLogger(__name__)


class RankControlSocket:
    """The connection on which a rank receives messages and answers. It must be used by one thread only."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", spec: RankSpec) -> None:
        self._socket = connect(context, spec.invitation, spec.invitation.commands_id)
        has_own_cpus = spec.num_ranks_here * spec.config.threads_per_rank <= num_processors()
        self._awake_seconds = AWAKE_SECONDS if has_own_cpus else 0.0

    def send(self, message: FromRank) -> None:
        self._socket.send(encode(message))

    def receive(self) -> ToRank:
        """Waits for the next message."""
        until = time.monotonic() + self._awake_seconds
        while not self.has_message and time.monotonic() < until:
            os.sched_yield()
        return decode_to_rank(self._socket.recv())

    @property
    def has_message(self) -> bool:
        return bool(self._socket.poll(0))

    def close(self) -> None:
        self._socket.close()


def connect(context: "zmq.Context[zmq.Socket[bytes]]", invitation: ConnectInfo, identity: bytes) -> "zmq.Socket[bytes]":
    """Opens a connection to the coordinator. CURVE authenticates both ends: only invited members are accepted."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
    socket.setsockopt(zmq.IPV6, "[" in invitation.address)
    socket.setsockopt(zmq.CURVE_SERVERKEY, invitation.server_key)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, invitation.public_key)
    socket.setsockopt(zmq.CURVE_SECRETKEY, invitation.secret_key)
    socket.connect(invitation.address)
    return socket


class HeartbeatThread(threading.Thread):
    """Reports progress once a second even when the main thread is blocked, receives the ends of epochs, and forwards
    outcomes of orders and log records.

    The process ends as soon as `is_orphan()` returns true: ranks must not outlive the coordinator that started them,
    even if it is killed.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        spec: RankSpec,
        status: MemberStatus,
        records: RankLogBuffer,
        is_orphan: Callable[[], bool],
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._context = context
        self._spec = spec
        self._status = status
        self._records = records
        self._is_orphan = is_orphan
        self._end = context.socket(zmq.PAIR)
        self._end.bind(END)
        self._outcomes = context.socket(zmq.PUSH)
        self._outcomes.bind(OUTCOMES)
        self._reporting = threading.Lock()
        """Serializes the use of `_outcomes` by threads."""
        self._is_ended = False

    def enqueue_outcome(self, outcome: Outcome) -> None:
        """Queues the outcome of an order for sending. Any thread may call it; after `stop`, outcomes are dropped."""
        with self._reporting:
            if not self._is_ended:
                self._outcomes.send(encode(outcome))

    def run(self) -> None:
        socket = connect(self._context, self._spec.invitation, self._spec.invitation.heartbeat_id)
        end = self._context.socket(zmq.PAIR)
        end.connect(END)
        outcomes = self._context.socket(zmq.PULL)
        outcomes.connect(OUTCOMES)
        is_ended = False
        while not is_ended:
            if self._is_orphan():
                os._exit(1)
            socket.send(encode(Heartbeat(self._spec.member, self._status.progress)))
            if (logged := self._records.pop_batch(self._spec.member)) is not None:
                socket.send(encode(logged))
            is_ended = self._listen(socket, outcomes, end, time.monotonic() + HEARTBEAT_SECONDS)
        for each in (socket, outcomes, end):
            each.close(linger=0)

    def _listen(
        self, socket: "zmq.Socket[bytes]", outcomes: "zmq.Socket[bytes]", end: "zmq.Socket[bytes]", until: float
    ) -> bool:
        """Receives messages and forwards outcomes until the deadline; whether the thread should end."""
        poller = zmq.Poller()
        for each in (socket, outcomes, end):
            poller.register(each, zmq.POLLIN)
        while (left := until - time.monotonic()) > 0:
            ready = dict(poller.poll(1 + int(left * 1000)))
            if end in ready:
                return True
            if outcomes in ready:
                socket.send(outcomes.recv())
            if socket in ready and isinstance(message := decode_to_rank(socket.recv()), AbortExchanges):
                self._status.fence(message.epoch)
        return False

    def stop(self) -> None:
        with self._reporting:
            self._is_ended = True
        self._end.send(b"")
        self.join()
        self._end.close(linger=0)
        self._outcomes.close(linger=0)


def serve(
    spec: RankSpec, make_rank: Callable[[RankSpec], RankRuntime], is_orphan: Callable[[], bool] = lambda: False
) -> int:
    """Runs a member until it is stopped. Returns the exit code: 0 after a Stop message, 1 after an error.

    The process ends when `is_orphan()` returns true, or when closing times out.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    status, records = MemberStatus(), RankLogBuffer()
    channel, heartbeat = RankControlSocket(context, spec), HeartbeatThread(context, spec, status, records, is_orphan)
    heartbeat.start()
    try:
        return _live(spec, make_rank, channel, status, records, heartbeat.enqueue_outcome)
    finally:
        heartbeat.stop()
        channel.close()
        context.term()


def _live(
    spec: RankSpec,
    make_rank: Callable[[RankSpec], RankRuntime],
    channel: RankControlSocket,
    status: MemberStatus,
    records: RankLogBuffer,
    answer: Callable[[Outcome], None],
) -> int:
    rank: RankRuntime | None = None
    code = 0
    try:
        with records.listening():
            rank = make_rank(spec)
            MemberProcess(spec, rank, channel, status, answer).run()
    except Exception as error:
        if not isinstance(error, StartError):  # its message is sufficient
            with records.listening():
                log.exception("member %d failed", spec.member)
        # sent now, because the coordinator ignores records after Died
        while (logged := records.pop_batch(spec.member)) is not None:
            channel.send(logged)
        blamed = error.rank if isinstance(error, RankLost) else None
        # before closing, which may block or raise for the same reason
        channel.send(Died(spec.member, reason_of(error), isinstance(error, StartError), blamed))
        code = 1
    finally:
        status.leave_epoch()
        if rank is not None and not _is_closed(rank):
            code = 1
    return code


def _is_closed(rank: RankRuntime) -> bool:
    """Closes the rank; whether that succeeded."""
    with ending_in_time():
        try:
            rank.close()
        except Exception:
            log.exception("a rank failed to close")
            return False
    return True
