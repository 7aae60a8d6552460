"""Members of the control channel without processes; a test configures their faults."""

import asyncio
import os
from collections.abc import Collection
from contextlib import suppress
from typing import Any, cast

import zmq
import zmq.asyncio

from longleaf.fingerprint import Fingerprint
from longleaf.rank_protocol.encoding import FromRank, ToRank, decode_to_rank, encode
from longleaf.rank_protocol.group_messages import (
    AbortExchanges,
    GroupFailure,
    Join,
    MergeTiming,
    OpenStore,
    Ready,
    StoreOpened,
)
from longleaf.rank_protocol.member_messages import (
    Died,
    Heartbeat,
    Hello,
    Hold,
    Load,
    Loaded,
    MemberProgress,
    Stop,
    WeightsReady,
)
from longleaf.rank_protocol.rank_spec import ConnectInfo, RankSpec
from longleaf.rank_protocol.snapshots import Outcome
from workers.control import connect

HEARTBEAT_SECONDS = 0.05


class ScriptedMember:
    """Sends hello, loads, opens stores and joins without a script, and drops an epoch that is fenced while it joins;
    `receive` returns all other messages. Messages of the types `deaf_to` are ignored; heartbeats start with `beat`.
    Needs a running event loop."""

    def __init__(
        self,
        invitation: ConnectInfo,
        number: int,
        node: str = "node",
        deaf_to: Collection[type[ToRank]] = (),
        fingerprint: Fingerprint | None = None,
        has_late_heartbeat: bool = False,
    ) -> None:
        """With `has_late_heartbeat` the heartbeat connection opens with `beat`."""
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        # Untyped, because the package's own annotations are partial.
        self._socket: Any = connect(cast(Any, self._context), invitation, invitation.commands_id)
        self._invitation = invitation
        self._heartbeat_socket: Any = None
        self.number = number
        self.deaf_to = deaf_to
        self.fails_to_load = False
        self.crashes_at_load = False
        self.merges: tuple[MergeTiming, ...] = ()
        self.progress = MemberProgress()
        self.joins: list[Join] = []
        self.loads: list[Load] = []
        self.holds: list[Hold] = []
        self.fences: list[AbortExchanges] = []
        self.num_fences = 0
        """With those that were sent again."""
        self._hello = Hello(number, node, "127.0.0.1", os.getpid(), fingerprint)
        self._inbox: asyncio.Queue[ToRank] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._live())]
        if not has_late_heartbeat:
            self._open_heartbeat_socket()

    def _open_heartbeat_socket(self) -> None:
        self._heartbeat_socket = connect(cast(Any, self._context), self._invitation, self._invitation.heartbeat_id)
        self._tasks.append(asyncio.create_task(self._listen()))

    async def _live(self) -> None:
        await self.send(self._hello)
        while True:
            message = decode_to_rank(await self._socket.recv())
            if isinstance(message, Join):
                self.joins.append(message)
            if isinstance(message, Load):
                self.loads.append(message)
            if isinstance(message, tuple(self.deaf_to)):
                continue
            answer = self._answer(message)
            await (self._inbox.put(message) if answer is None else self.send(answer))

    def _answer(self, message: ToRank) -> FromRank | None:
        match message:
            case Load() if self.crashes_at_load:
                os._exit(3)
            case Load():
                return Died(self.number, "no memory") if self.fails_to_load else Loaded(self.number)
            case Hold():
                self.holds.append(message)
                return WeightsReady(self.number, 0)
            case OpenStore(epoch):
                return StoreOpened(self.number, epoch, 1)
            case Join(epoch):
                return Ready(self.number, "cpu", "float32", 4, 64, merges=self.merges, epoch=epoch)
            case _:
                return None

    async def _listen(self) -> None:
        while True:
            message = decode_to_rank(await self._heartbeat_socket.recv())
            assert isinstance(message, AbortExchanges)
            self.num_fences += 1
            if message in self.fences:
                continue  # it is sent again until a heartbeat acknowledges it
            self.fences.append(message)
            if AbortExchanges not in self.deaf_to:
                self.progress = MemberProgress()
                await self.send(GroupFailure(self.number, message.epoch, 0, "was fenced"))

    def beat(self, progress: MemberProgress | None = None) -> None:
        """Sends heartbeats from now on."""
        self.progress = progress or self.progress
        self._is_beating = True
        if self._heartbeat_socket is None:
            self._open_heartbeat_socket()
        self._tasks.append(asyncio.create_task(self._beat()))

    def stop_beating(self) -> None:
        self._is_beating = False

    async def _beat(self) -> None:
        while self._is_beating:
            await self._heartbeat_socket.send(encode(Heartbeat(self.number, self.progress)))
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def send(self, message: FromRank) -> None:
        await self._socket.send(encode(message))

    async def tell(self, outcome: Outcome) -> None:
        """Sends the outcome of an order, as the heartbeat thread does."""
        await self._heartbeat_socket.send(encode(outcome))

    async def receive(self) -> ToRank:
        """The next message that it does not answer on its own."""
        return await self._inbox.get()

    async def live(self) -> int:
        """Executes messages until it is asked to leave; returns the exit code."""
        parent = os.getppid()
        self.beat()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    if isinstance(await self.receive(), Stop):
                        break
            if os.getppid() != parent:
                break
        await self.close()
        return 0

    async def close(self) -> None:
        """As a process that is gone."""
        for task in self._tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait(self._tasks)
        self._context.destroy(linger=0)


async def live(spec: RankSpec, num_good: int) -> int:
    """The life of a process. Members from number `num_good` on die while they load the model."""
    member = ScriptedMember(spec.invitation, spec.member, spec.node)
    member.crashes_at_load = spec.member >= num_good
    return await member.live()


class MemberMain:
    """Entry of a plain process that lives as a ScriptedMember."""

    def __init__(self, num_good: int = 1000) -> None:
        self._num_good = num_good

    def __call__(self, spec: RankSpec) -> None:
        os._exit(asyncio.run(live(spec, self._num_good)))


class MemberActor:
    """The same in an actor."""

    def run(self, spec: RankSpec) -> int:
        return asyncio.run(live(spec, 1000))
