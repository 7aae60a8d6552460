"""The socket of the control channel: messages to and from the members, over ZMQ.

Each member has two connections. On one it receives commands and sends its answers. On the other, a separate thread
sends heartbeats and the results of work outside the steps, and receives the notice that an epoch has ended. Steps never
pass through Ray: a ZMQ message costs tens of microseconds, a Ray call milliseconds.

Peers that are not members are refused during the handshake (coordinator.cluster.member_auth). A member may send
messages only in its own name: a message in the name of another member is ignored and counted.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import zmq
import zmq.asyncio

from coordinator.cluster.member_auth import MemberAuthenticator, ThrottledCounter
from longleaf.config import EngineConfig, join_address
from longleaf.rank_protocol.encoding import FromRank, ToRank, decode_from_rank, encode
from longleaf.rank_protocol.group_messages import AbortExchanges
from longleaf.rank_protocol.log_messages import Logged
from longleaf.rank_protocol.member_messages import Heartbeat, Stop
from longleaf.rank_protocol.rank_spec import ConnectInfo
from longleaf.rank_protocol.snapshots import Fetched, Saved
from longleaf.rank_protocol.step import MAX_ATTRIBUTED_SPANS, SPAN_BYTES, StepResult

LINGER_MILLISECONDS = 500
MAX_REPORT_BYTES, MAX_TOKEN_BYTES = 256 << 10, 2 << 10
"""Size limits in bytes: for the fixed part of a member's message, and for each token of a step. The spans of a step are
added to both. If a member sends a larger message, ZMQ closes its connection before allocating memory for the message.
"""
MAX_AT_ONCE = 64
"""Messages handled per turn of the event loop."""

_open_contexts = set[zmq.asyncio.Context]()
"""Contexts in use. Without this reference, the garbage collector would terminate the context of a socket that was not
closed, and wait for the socket forever.
"""

OnMessage = Callable[[int, FromRank], None]
"""Handles a message from a member. Raises ValueError for a message that the member may not send."""


class ControlSocket:
    """The channel at `host`. Must be created inside a running event loop; `on_message` is called on this loop."""

    def __init__(self, config: EngineConfig, host: str, on_message: OnMessage) -> None:
        self._on_message = on_message
        self._context = zmq.asyncio.Context()
        _open_contexts.add(self._context)
        self._members = MemberAuthenticator(self._context)
        # Untyped, because the package's own annotations are partial. Not a zmq.asyncio socket: its futures would delay
        # each message by several turns of the loop.
        self._socket: Any = zmq.Context(self._context).socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        num_tokens = config.max_sequences * (1 + config.max_draft_tokens)
        most = MAX_REPORT_BYTES + num_tokens * MAX_TOKEN_BYTES + MAX_ATTRIBUTED_SPANS * SPAN_BYTES
        self._socket.setsockopt(zmq.MAXMSGSIZE, most)
        self._socket.setsockopt(zmq.IPV6, ":" in host)
        self._members.authenticate_members(self._socket)
        self._socket.bind(f"tcp://{join_address(host, 0)}")
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """The address to which the members connect."""
        self._invitations: dict[int, ConnectInfo] = {}
        self._fences: dict[int, AbortExchanges] = {}
        """The last AbortExchanges sent to each member."""
        self._ignored = ThrottledCounter("ignored invalid messages from members")
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._loop.add_reader(self._socket.FD, self._receive)
        self._loop.call_soon(self._receive)

    @property
    def num_refused(self) -> int:
        """Rejected connections of unauthenticated peers and dropped messages of former members so far."""
        return self._members.num_refused

    @property
    def num_ignored(self) -> int:
        """Ignored messages so far: messages that a member may not send."""
        return self._ignored.count

    def invite(self, member: int) -> ConnectInfo:
        """Return the information that a new member needs to connect."""
        self._invitations[member] = self._members.invite(member, self.address)
        return self._invitations[member]

    def forget(self, member: int) -> None:
        """Revoke the access of a member: its messages are dropped, and no more messages are sent to it."""
        self._members.forget(member)
        self._invitations.pop(member, None)
        self._fences.pop(member, None)

    def send(self, members: Iterable[int], message: ToRank) -> None:
        """Send the message to the members, except forgotten ones. An AbortExchanges uses the heartbeat connection. Does
        nothing after `close`.
        """
        if self._is_closed:
            return
        data = encode(message)
        for member in members:
            if (invitation := self._invitations.get(member)) is None:
                continue
            name = invitation.commands_id
            if isinstance(message, AbortExchanges):
                name, self._fences[member] = invitation.heartbeat_id, message
            self._socket.send_multipart([name, data])
        self._loop.call_soon(self._receive)  # sending may have consumed the readiness event of the descriptor

    def _receive(self) -> None:
        """Handle pending messages. The descriptor is edge-triggered: every pending message must be read."""
        if self._is_closed:
            return
        for _ in range(MAX_AT_ONCE):
            if not self._socket.EVENTS & zmq.POLLIN:
                return
            frames = self._socket.recv_multipart(copy=False)
            member = self._members.number_of(frames[-1].get("User-Id").encode())
            if member is not None:
                try:
                    message = self._read(member, frames)
                    self._on_message(member, message)
                    self._resend_fences(member, message)
                except ValueError as error:
                    self._ignored.add(str(error))
        self._loop.call_soon(self._receive)

    def _resend_fences(self, member: int, message: FromRank) -> None:
        """Resend the AbortExchanges to a member whose heartbeat still reports an ended epoch. The previous one
        is lost if the heartbeat connection was not yet established or was reconnecting.
        """
        fence = self._fences.get(member)
        if fence is not None and isinstance(message, Heartbeat) and 0 < message.progress.epoch <= fence.epoch:
            self.send([member], fence)

    def _read(self, member: int, frames: list[Any]) -> FromRank:
        """Decode a message. Raises ValueError if it names another member or arrives on the wrong connection."""
        if len(frames) != 2:
            raise ValueError(f"{len(frames)} frames from member {member}")
        message = decode_from_rank(frames[1].buffer)
        invitation = self._invitations[member]
        is_beside = isinstance(message, Heartbeat | Saved | Fetched)  # sent by threads other than the step thread
        expected = {invitation.heartbeat_id if is_beside else invitation.commands_id}
        if isinstance(message, Logged):  # sent on either connection
            expected = {invitation.heartbeat_id, invitation.commands_id}
        speaks_for = member if isinstance(message, StepResult) else message.member
        if speaks_for != member or frames[0].bytes not in expected:
            raise ValueError(f"invalid message from member {member}: {type(message).__name__} for {speaks_for}")
        return message

    async def close(self) -> None:
        """Order the members to exit. Idempotent."""
        if self._is_closed:
            return
        self._loop.remove_reader(self._socket.FD)
        self.send(list(self._invitations), Stop())
        self._is_closed = True
        await self._members.close(self._socket)
        self._socket.close()
        await asyncio.to_thread(self._context.term)
        _open_contexts.discard(self._context)
