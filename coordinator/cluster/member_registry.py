"""The registry of live members: their startup state, and their losses. Silent members are found by
`HeartbeatMonitor`."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any

from coordinator.cluster.control_socket import ControlSocket
from coordinator.cluster.heartbeat_monitor import HeartbeatMonitor
from coordinator.cluster.member import Member
from coordinator.cluster.model_consistency import check_joiner
from coordinator.cluster.ports import EpochEnd, Kill, LocationOf, MemberEvent, MemberLost
from coordinator.cluster.weight_deal import NO_PARTS, Holding, Parts, WeightDealer
from coordinator.task_set import TaskSet
from longleaf.errors import StartError
from longleaf.rank_protocol.member_messages import Died, Hello, Hold, Load
from longleaf.rank_protocol.rank_spec import ConnectInfo

log = logging.getLogger(__name__)


class MemberRegistry:
    """The members, by number; a number is never reused. `kill` ends the process of a member, `location_of` returns its
    location.

    Needs a running event loop. Every method except `report_exit` must be called on the thread of that loop.
    """

    def __init__(
        self,
        channel: ControlSocket,
        kill: Kill,
        location_of: LocationOf,
        heartbeat_timeout: float,
        dealer: WeightDealer | None = None,
    ) -> None:
        """`dealer` deals sharded weights; None: every member holds all weights."""
        self._channel = channel
        self._kill_process = kill
        self.location_of = location_of
        self._loop = asyncio.get_running_loop()
        self._dealer = dealer
        self._members: dict[int, Member] = {}
        self._next = 0
        self._reference_hellos: tuple[Hello, ...] = ()
        self._changed = asyncio.Event()
        self._observers: list[Callable[[MemberEvent], None]] = []
        self._is_over = False
        self.heartbeats = HeartbeatMonitor(self, heartbeat_timeout)
        self._tasks = TaskSet()
        """Running operations on members, such as kills."""
        self._has_supervisor = False
        """Lost members are replaced."""
        self.epoch = 0
        self.ranks: tuple[int, ...] = ()
        """The members of the epoch, in rank order."""

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def get(self, number: int) -> Member | None:
        """Return None for a member that is gone."""
        return self._members.get(number)

    @property
    def hellos(self) -> tuple[Hello, ...]:
        """The hellos received so far, in the order of the member numbers."""
        return tuple(member.hello for member in self if member.hello is not None)

    def loaded(self) -> list[Member]:
        """Return the members that can join an epoch."""
        return [member for member in self if member.is_loaded and not member.loss_reason]

    def subscribe(self, observer: Callable[[MemberEvent], None]) -> None:
        """Call `observer` for every event from now on. The observer must be fast and must not raise."""
        self._observers.append(observer)

    def publish(self, event: MemberEvent) -> None:
        """Notify all observers."""
        for observer in self._observers:
            observer(event)
        self.notify_waiters()

    def notify_waiters(self) -> None:
        """Make all waiters check their conditions again."""
        self._changed.set()

    async def wait_until(
        self, condition: Callable[[], object], verdict: asyncio.Future[EpochEnd] | None = None
    ) -> None:
        """Wait until `condition` holds. If `verdict` is set before, raise the error that ended the epoch."""
        while not condition():
            self._changed.clear()
            changed = self._loop.create_task(self._changed.wait())
            awaited: list[asyncio.Future[Any]] = [changed] if verdict is None else [changed, verdict]
            try:
                await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
            if verdict is not None and verdict.done():
                raise verdict.result().error

    def begin_epoch(self, epoch: int, ranks: tuple[int, ...]) -> None:
        """Record the current epoch and its members, in rank order."""
        self.epoch, self.ranks = epoch, ranks

    def attach_supervisor(self, observer: Callable[[MemberEvent], None]) -> None:
        """Report lost members as replaced until `detach_supervisor`, and call `observer` for every event."""
        self._has_supervisor = True
        self.subscribe(observer)

    def detach_supervisor(self) -> None:
        """Report that members lost from now on are not replaced."""
        self._has_supervisor = False

    # --- beginning ---

    def invite(self, slot: int = 0) -> tuple[int, ConnectInfo]:
        """Return the number of a new member for a slot, and the information that it needs to connect."""
        number, self._next = self._next, self._next + 1
        self._members[number] = Member(number, slot)
        return number, self._channel.invite(number)

    def withdraw(self, number: int) -> None:
        """Remove a member whose process was not started."""
        self._members.pop(number, None)
        self._channel.forget(number)

    def fix_model(self) -> None:
        """Fix the model of the present members as the one that later members must have."""
        self._reference_hellos = self.hellos

    def load(self, members: Sequence[Member]) -> None:
        """Order members to load the model; with sharded weights, the parts that they will hold together with the others
        that have loaded or are loading.
        """
        present = [member for member in self if member.is_loading and not member.loss_reason]
        dealt = self._deal([*present, *members])
        for member in members:
            member.is_loading = True
            member.parts = member.used_parts = dealt.get(member.number, NO_PARTS)
            self._channel.send([member.number], Load(tuple(sorted(member.parts))))

    def _deal(self, members: Sequence[Member]) -> dict[int, Parts]:
        """The parts of the weights that members will hold; empty if every member holds all weights."""
        if self._dealer is None:
            return {}
        return self._dealer.deal(
            [
                Holding(one.number, one.slot, one.parts, is_new=not one.parts or one.number not in self.ranks)
                for one in members
            ]
        )

    async def hold_parts(self, members: Sequence[Member]) -> bool:
        """Make members use all parts of sharded weights, each part once, and read those that they lack. Return whether
        all members still exist. May be cancelled.
        """
        for number, parts in self._deal(members).items():
            member = self._members.get(number)
            if member is None:
                return False
            if parts != member.used_parts or member.is_reading:
                member.parts = member.parts if parts <= member.parts else parts
                member.used_parts = parts
                member.is_reading = True
                self._channel.send([number], Hold(tuple(sorted(parts))))
        await self.wait_until(lambda: all(not one.is_reading or one.loss_reason for one in members))
        return not any(one.loss_reason for one in members)

    def drop_surplus(self, members: Sequence[Member]) -> None:
        """Record that members release the parts that they do not use: their epoch has formed."""
        for member in members:
            member.parts = member.used_parts

    async def admit(self, number: int) -> None:
        """Order a new member to load the model once its hello has arrived; the member can then join the next epoch.

        Raises StartError when the member is lost, or has a different model.
        """
        member = self.get(number)
        if member is None:
            raise StartError("the member is lost")
        await self.wait_until(lambda: member.loss_reason or member.hello)
        if not member.loss_reason and member.hello is not None:
            check_joiner(member.hello, self._reference_hellos)
            self.load([member])
            await self.wait_until(lambda: member.loss_reason or member.is_loaded)
        if member.loss_reason:
            raise StartError(member.loss_reason)

    # --- ending ---

    def kill(self, number: int, reason: str) -> None:
        """Kill a member, which is reported as lost when its process has ended. Its messages are ignored from now on."""
        member = self.get(number)
        if member is not None and not member.loss_reason:
            member.loss_reason = reason
            self._channel.forget(number)
            self.run_in_background(self._kill_and_remove(number))

    async def _kill_and_remove(self, number: int) -> None:
        try:
            await self._kill_process(number)
        except Exception:
            log.exception("cannot kill member %d", number)
        self.remove_lost(number, "was killed")

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the background; `wait_killed` waits for it."""
        self._tasks.start(work)

    async def wait_killed(self) -> None:
        """Wait until all running kills have finished."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def report_exit(self, number: int, reason: str) -> None:
        """Report that the process of a member has ended. Thread-safe; may be called at any time."""
        with suppress(RuntimeError):  # the loop is closed, and with it every consumer of the event
            self._loop.call_soon_threadsafe(self.remove_lost, number, reason)

    def remove_lost(self, number: int, reason: str, report: Died | None = None) -> None:
        """Remove a member that has ended and report the loss once; for a killed member, with the reason of the kill.
        `report` is the member's own report of its end, if it sent one.
        """
        member = self._members.pop(number, None)
        if member is None:
            return
        member.loss_reason = member.loss_reason or reason
        self._channel.forget(number)
        rank = self.ranks.index(number) if number in self.ranks else None
        epoch = self.epoch if rank is not None else 0
        if not self._is_over:  # after `close` the member left on request
            self.publish(MemberLost(number, rank, epoch, member.node, member.loss_reason, self._has_supervisor, report))

    async def close(self) -> None:
        """Cancel the running operations on members. Members that end from now on are not reported as lost."""
        self._is_over = True
        tasks = [self.heartbeats.task, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
