"""The control channel's socket: messages to the members and from them, over ZMQ.

Each member has two connections: one on which it receives and answers, and one on which a thread of its own reports that
the process lives and what is done beside the steps, and hears that an epoch has ended. Ray never carries a step: a ZMQ
message costs tens of microseconds, a Ray call milliseconds.

Whoever is no member is refused while connecting (coordinator.cluster.member_auth), and a member is heard for itself
only: what else arrives is ignored and counted."""

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
from longleaf.rank_protocol.step import MAX_TOLD_SPANS, SPAN_BYTES, StepResult

LINGER_MILLISECONDS = 500
MAX_REPORT_BYTES, MAX_TOKEN_BYTES = 256 << 10, 2 << 10
"""What a member says at most, and of each token of a step, beside what it tells of spans. More ends its connection
before memory is taken."""
MAX_AT_ONCE = 64
"""Messages that are taken before all else has its turn."""

Take = Callable[[int, FromRank], None]
"""Takes what a member says. Raises ValueError for what it may not say."""


class ControlSocket:
    """The channel at `host`. Must be made inside a running event loop; `take` is called there."""

    def __init__(self, config: EngineConfig, host: str, take: Take) -> None:
        self._take = take
        self._context = zmq.asyncio.Context()
        self._members = MemberAuthenticator(self._context)
        # Untyped, because the package's own annotations are partial. Not one of zmq.asyncio: with its futures a message
        # would come some turns of the loop later.
        self._socket: Any = zmq.Context(self._context).socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        num_tokens = config.max_sequences * (1 + config.max_draft_tokens)
        most = MAX_REPORT_BYTES + num_tokens * MAX_TOKEN_BYTES + MAX_TOLD_SPANS * SPAN_BYTES
        self._socket.setsockopt(zmq.MAXMSGSIZE, most)
        self._socket.setsockopt(zmq.IPV6, ":" in host)
        self._members.guard(self._socket)
        self._socket.bind(f"tcp://{join_address(host, 0)}")
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where the members connect."""
        self._invitations: dict[int, ConnectInfo] = {}
        self._fences: dict[int, AbortExchanges] = {}
        """The last one that each member was sent."""
        self._ignored = ThrottledCounter("ignored messages of members")
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._loop.add_reader(self._socket.FD, self._receive)
        self._loop.call_soon(self._receive)

    @property
    def num_refused(self) -> int:
        """Connections of strangers so far that were ended, and messages of former members that were dropped."""
        return self._members.num_refused

    @property
    def num_ignored(self) -> int:
        """Messages so far that a member may not send."""
        return self._ignored.count

    def invite(self, member: int) -> ConnectInfo:
        """What a new member needs to connect."""
        self._invitations[member] = self._members.invite(member, self.address)
        return self._invitations[member]

    def forget(self, member: int) -> None:
        """Makes it a stranger: neither is it heard any more, nor told anything."""
        self._members.forget(member)
        self._invitations.pop(member, None)
        self._fences.pop(member, None)

    def send(self, members: Iterable[int], message: ToRank) -> None:
        """Tells it to those of them that are not forgotten; a fence on the connection of their pulses. Nobody is told
        anything after the end."""
        if self._is_closed:
            return
        data = encode(message)
        for member in members:
            if (invitation := self._invitations.get(member)) is None:
                continue
            name = invitation.commands_id
            if isinstance(message, AbortExchanges):
                name, self._fences[member] = invitation.pulse_id, message
            self._socket.send_multipart([name, data])
        self._loop.call_soon(self._receive)  # to send has looked, too

    def _receive(self) -> None:
        """Takes what is there. The descriptor tells only of what came after the last look: so nothing must be left."""
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
                    self._take(member, message)
                    self._fence_again(member, message)
                except ValueError as error:
                    self._ignored.add(str(error))
        self._loop.call_soon(self._receive)

    def _fence_again(self, member: int, message: FromRank) -> None:
        """What is sent before a pulse has connected, or while it connects again, is dropped: a member whose pulse tells
        that it still is in an epoch that has ended is told once more."""
        fence = self._fences.get(member)
        if fence is not None and isinstance(message, Heartbeat) and 0 < message.progress.epoch <= fence.epoch:
            self.send([member], fence)

    def _read(self, member: int, frames: list[Any]) -> FromRank:
        """What a member says. Raises ValueError unless it says it for itself, on the connection for it."""
        if len(frames) != 2:
            raise ValueError(f"{len(frames)} frames of member {member}")
        message = decode_from_rank(frames[1].buffer)
        invitation = self._invitations[member]
        is_beside = isinstance(message, Heartbeat | Saved | Fetched)  # said by other threads than that of the steps
        expected = {invitation.pulse_id if is_beside else invitation.commands_id}
        if isinstance(message, Logged):  # by whichever thread of the member has a connection at hand
            expected = {invitation.pulse_id, invitation.commands_id}
        speaks_for = member if isinstance(message, StepResult) else message.member
        if speaks_for != member or frames[0].bytes not in expected:
            raise ValueError(f"member {member} sends what it may not: {type(message).__name__} for {speaks_for}")
        return message

    async def close(self) -> None:
        """Tells the members to leave. Idempotent."""
        if self._is_closed:
            return
        self._loop.remove_reader(self._socket.FD)
        self.send(list(self._invitations), Stop())
        self._is_closed = True
        await self._members.close(self._socket)
        self._socket.close()
        await asyncio.to_thread(self._context.term)
