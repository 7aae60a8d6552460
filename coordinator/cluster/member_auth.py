"""Authentication of the control channel: key pairs, and counts of refused connections.

Members are identified by their CURVE keys (ZMQ). A peer without a valid key does not get past the handshake, and a
member may send messages only for itself.
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
"""Handshake timeout: a connection that has not authenticated by then is closed. Late ranks retry."""
MONITOR = "inproc://longleaf.connections"
log = logging.getLogger(__name__)


class ThrottledCounter:
    """Counts ignored events and logs them at exponentially increasing intervals, so that a misbehaving peer cannot fill
    the log.
    """

    def __init__(self, what: str, level: int = logging.WARNING) -> None:
        self.count = 0
        self._what = what
        self._level = level

    def set(self, count: int, reason: str) -> None:
        """Set a new count, which never decreases, with the reason of the last increase."""
        if count.bit_length() > self.count.bit_length():
            log.log(self._level, "%s: %d so far; latest reason: %s", self._what, count, reason)
        self.count = max(self.count, count)

    def add(self, reason: str) -> None:
        self.set(self.count + 1, reason)


class PendingHandshakes:
    """Counts connections that ended without authentication.

    ZMQ's success event does not identify a connection. With several open connections, success is known only after all
    of them have authenticated.
    """

    def __init__(self) -> None:
        self.num_refused = 0
        self._num_unproven = 0
        self._candidates = set[int]()
        """Descriptors of connections that may not have authenticated."""
        self.num_former = 0
        """Connections of former members, whose keys were revoked: their processes reconnect until they exit."""
        self._num_closing = 0
        """Refused connections of former members that have not ended yet."""

    def accepted(self, descriptor: int) -> None:
        self._candidates.add(descriptor)
        self._num_unproven += 1

    def handshake_done(self) -> None:
        """One of the candidates has authenticated, or has ended."""
        self._num_unproven = max(0, self._num_unproven - 1)
        if not self._num_unproven:
            self._candidates.clear()

    def ended(self, descriptor: int) -> None:
        if descriptor in self._candidates:  # with others accepted while it was open, it counts as unauthenticated
            self._candidates.remove(descriptor)
            if self._num_closing:
                self._num_closing -= 1
                self.num_former += 1
            else:
                self.num_refused += 1
            self.handshake_done()

    def refuse_former(self) -> None:
        """Note that a connection used the revoked key of a former member, and will end."""
        self._num_closing += 1


class MemberAuthenticator:
    """The keys of the members, and the access control of the control socket. Needs a running event loop."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._context = context
        self._public_key, self._secret_key = zmq.curve_keypair()
        self._numbers: dict[bytes, int] = {}
        self._former = set[bytes]()
        """Revoked keys."""
        self._refused = ThrottledCounter("rejected unauthenticated connections to the control channel")
        # not a warning: the last messages of a member may arrive after it was declared lost
        self._dropped = ThrottledCounter("dropped messages from former members", logging.INFO)
        self._returned = ThrottledCounter("rejected connections from former members", logging.INFO)
        self._connections = PendingHandshakes()
        # Untyped, because the package's own annotations are partial.
        self._gate: Any = AsyncioAuthenticator(context)
        self._monitor: Any = None
        self._task: asyncio.Task[None] | None = None

    @property
    def num_refused(self) -> int:
        """Connections that ended without authentication, and connections and messages of former members."""
        return self._refused.count + self._dropped.count + self._returned.count

    def invite(self, member: int, address: str) -> ConnectInfo:
        """Return the information that a new member of this number needs to connect."""
        public, secret = zmq.curve_keypair()
        self._numbers[public] = member
        return ConnectInfo(address=address, server_key=self._public_key, public_key=public, secret_key=secret)

    def forget(self, member: int) -> None:
        """Revoke the key of a member, also for its open connections."""
        self._former |= {key for key, number in self._numbers.items() if number == member}
        self._numbers = {key: number for key, number in self._numbers.items() if number != member}

    def number_of(self, public_key: bytes) -> int | None:
        """Return the member with this key, for a message that arrived; None for a revoked key, which is counted."""
        number = self._numbers.get(public_key)
        if number is None:
            self._dropped.add("its key was revoked")
        return number

    def authenticate_members(self, socket: Any) -> None:
        """Restrict `socket`, which is not bound yet, to members."""
        self._gate.configure_curve_callback(domain=DOMAIN, credentials_provider=self)
        self._gate.start()
        options: dict[int, int | bytes] = {zmq.CURVE_SERVER: 1, zmq.CURVE_SECRETKEY: self._secret_key}
        # without ZAP_ENFORCE_DOMAIN, every peer would pass if no handler answered in the domain
        options |= {zmq.ZAP_DOMAIN: DOMAIN.encode(), zmq.ZAP_ENFORCE_DOMAIN: 1}
        options |= {zmq.HANDSHAKE_IVL: HANDSHAKE_MILLISECONDS}
        for option, value in options.items():
            socket.setsockopt(option, value)
        socket.monitor(MONITOR, zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._monitor = self._context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # a full queue would block the I/O thread that serves the members
        self._monitor.connect(MONITOR)
        self._task = asyncio.get_running_loop().create_task(self._count())

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a connection with this public key is accepted. Called by the ZAP authenticator."""
        if key in self._former:
            self._connections.refuse_former()
        return key in self._numbers

    async def _count(self) -> None:
        """Count refused connections. No single event reports an unauthenticated connection; the count is derived from
        three.
        """
        while True:
            monitor_event = parse_monitor_message(await self._monitor.recv_multipart())
            match monitor_event["event"]:
                case zmq.EVENT_ACCEPTED:
                    self._connections.accepted(monitor_event["value"])
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._connections.handshake_done()
                case _:
                    self._connections.ended(monitor_event["value"])
            self._refused.set(self._connections.num_refused, "unknown key")
            self._returned.set(self._connections.num_former, "its key was revoked")

    async def close(self, socket: Any) -> None:
        """Stop the access control and the monitor of `socket`."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        socket.disable_monitor()
        self._monitor.close(linger=0)
        self._gate.stop()
