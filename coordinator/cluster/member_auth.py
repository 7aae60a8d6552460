"""Who may speak on the control channel: key pairs, and the connections that are refused.

Members are told apart by their keys alone (ZMQ's CURVE): who has none of them reaches nothing behind the handshake, and
a member speaks for itself only.
"""

import asyncio
import logging
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import parse_monitor_message

from longleaf.rank_protocol.rank_spec import ConnectInfo

DOMAIN = "longleaf"
HANDSHAKE_MILLISECONDS = 10_000
"""A connection that has not proven who it is by then is dropped. Ranks whose handshake was late try again."""
MONITOR = "inproc://longleaf.connections"
log = logging.getLogger(__name__)


class ThrottledCounter:
    """Counts what is ignored, and logs it ever more rarely: whoever sends rubbish must not fill the log."""

    def __init__(self, what: str, level: int = logging.WARNING) -> None:
        self.count = 0
        self._what = what
        self._level = level

    def set(self, count: int, reason: str) -> None:
        """Takes a new count, which never falls, and why it rose."""
        if count.bit_length() > self.count.bit_length():
            log.log(self._level, "%s: %d so far; the last: %s", self._what, count, reason)
        self.count = max(self.count, count)

    def add(self, reason: str) -> None:
        self.set(self.count + 1, reason)


class PendingHandshakes:
    """Counts connections that ended without having proven whose they are. No event tells which one has proven it: of
    some that are open it is known only that all have."""

    def __init__(self) -> None:
        self.num_refused = 0
        self._num_unproven = 0
        self._candidates = set[int]()
        """Descriptors of those that may not have proven it."""
        self.num_former = 0
        """Of former members, whose keys were struck out: their process connects again until it is dead."""
        self._num_leaving = 0
        """Of those that are refused and have not ended yet."""

    def accepted(self, descriptor: int) -> None:
        self._candidates.add(descriptor)
        self._num_unproven += 1

    def settle(self) -> None:
        """One of the candidates has proven it, or is gone."""
        self._num_unproven = max(0, self._num_unproven - 1)
        if not self._num_unproven:
            self._candidates.clear()

    def ended(self, descriptor: int) -> None:
        if descriptor in self._candidates:  # with others that came while it was open, it is taken for a stranger's
            self._candidates.remove(descriptor)
            if self._num_leaving:
                self._num_leaving -= 1
                self.num_former += 1
            else:
                self.num_refused += 1
            self.settle()

    def refuse_former(self) -> None:
        """A connection has proven to be of a former member, and will end."""
        self._num_leaving += 1


class MemberAuthenticator:
    """The members' keys, and the guard of the socket on which they are heard. Needs a running event loop."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._context = context
        self._public_key, self._secret_key = zmq.curve_keypair()
        self._numbers: dict[bytes, int] = {}
        self._former = set[bytes]()
        """Keys that were struck out."""
        self._refused = ThrottledCounter("refused connections of strangers to the control channel")
        # no warning: what a member said last may come when it is lost already
        self._dropped = ThrottledCounter("dropped messages of former members", logging.INFO)
        self._returned = ThrottledCounter("refused connections of former members", logging.INFO)
        self._connections = PendingHandshakes()
        # Untyped, because the package's own annotations are partial.
        self._gate: Any = AsyncioAuthenticator(context)
        self._monitor: Any = None
        self._task: asyncio.Task[None] | None = None

    @property
    def num_refused(self) -> int:
        """Connections that ended without having proven to be a member's, and connections and messages of former
        members."""
        return self._refused.count + self._dropped.count + self._returned.count

    def invite(self, member: int, address: str) -> ConnectInfo:
        """What a new member of this number needs to connect."""
        public, secret = zmq.curve_keypair()
        self._numbers[public] = member
        return ConnectInfo(address=address, server_key=self._public_key, public_key=public, secret_key=secret)

    def forget(self, member: int) -> None:
        """Makes it a stranger from now on, also on the connections that it has."""
        self._former |= {key for key, number in self._numbers.items() if number == member}
        self._numbers = {key: number for key, number in self._numbers.items() if number != member}

    def number_of(self, public_key: bytes) -> int | None:
        """The member with this key, of which there is a message; None for one that is a stranger by now, which is
        counted."""
        number = self._numbers.get(public_key)
        if number is None:
            self._dropped.add("its key was struck out")
        return number

    def guard(self, socket: Any) -> None:
        """Lets members alone through to `socket`, which is not bound yet."""
        self._gate.configure_curve_callback(domain=DOMAIN, credentials_provider=self)
        self._gate.start()
        options: dict[int, int | bytes] = {zmq.CURVE_SERVER: 1, zmq.CURVE_SECRETKEY: self._secret_key}
        # without the second, everybody would pass if nobody answered in the domain
        options |= {zmq.ZAP_DOMAIN: DOMAIN.encode(), zmq.ZAP_ENFORCE_DOMAIN: 1}
        options |= {zmq.HANDSHAKE_IVL: HANDSHAKE_MILLISECONDS}
        for option, value in options.items():
            socket.setsockopt(option, value)
        socket.monitor(MONITOR, zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._monitor = self._context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # a full queue would hold up the thread that serves the members
        self._monitor.connect(MONITOR)
        self._task = asyncio.get_running_loop().create_task(self._count())

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a connection with this public key may go on; the gate asks."""
        if key in self._former:
            self._connections.refuse_former()
        return key in self._numbers

    async def _count(self) -> None:
        """Counts connections. What is no member's is told by no event of its own."""
        while True:
            reported = parse_monitor_message(await self._monitor.recv_multipart())
            match reported["event"]:
                case zmq.EVENT_ACCEPTED:
                    self._connections.accepted(reported["value"])
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._connections.settle()
                case _:
                    self._connections.ended(reported["value"])
            self._refused.set(self._connections.num_refused, "no key of a member")
            self._returned.set(self._connections.num_former, "its key was struck out")

    async def close(self, socket: Any) -> None:
        """Ends the guard of `socket`."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        socket.disable_monitor()
        self._monitor.close(linger=0)
        self._gate.stop()
