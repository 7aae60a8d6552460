"""The registry of live members: their startup state, their progress in the current step, and loss detection."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from coordinator.cluster.control_socket import ControlSocket
from coordinator.cluster.model_consistency import check_joiner
from coordinator.cluster.ports import EpochEnd, Kill, MemberEvent, MemberLost, Where
from longleaf.errors import StartError
from longleaf.formatting import human_seconds
from longleaf.rank_protocol.member_messages import PULSE_SECONDS, Heartbeat, Hello, Load, Loaded, MemberProgress
from longleaf.rank_protocol.rank_spec import ConnectInfo

PATIENCE_SECONDS = 15.0
"""Minimum heartbeat timeout in seconds for a member that is loading the model, because libraries can block all of its
threads during the load.
"""
IS_SILENT = 2
"""Missed heartbeats after which a member counts as silent."""
FRESH_SECONDS = 3 * PULSE_SECONDS
"""The time in seconds within which a healthy member reports its progress again."""
log = logging.getLogger(__name__)


@dataclass
class Member:
    """One worker process."""

    number: int
    hello: Hello | None = None
    is_loading: bool = False
    """The member was ordered to load the model."""
    is_loaded: bool = False
    num_pulses: int = 0
    num_missed: int | None = None
    """Seconds since the last message; None before the first."""
    progress: MemberProgress = field(default_factory=MemberProgress)
    num_late: int = 0
    """Consecutive epochs that the member has neither joined nor aborted in time."""
    end: str = ""
    """The reason why the member is lost or is being killed; empty for a healthy member."""

    @property
    def node(self) -> str:
        return self.hello.node if self.hello is not None else ""

    @property
    def is_silent(self) -> bool:
        return self.num_missed is None or self.num_missed > IS_SILENT

    def on_message(self, message: Hello | Loaded | Heartbeat) -> None:
        """Update the state from a message. Raises ValueError for a message that is repeated or arrives too early."""
        match message:
            case Hello() if self.hello is None:
                self.hello = message
            case Loaded() if self.is_loading:
                self.is_loaded = True
            case Heartbeat():
                self.progress = message.progress
                self.num_pulses += 1
            case _:
                raise ValueError(f"invalid message from member {self.number}: {type(message).__name__} out of order")


class MemberRegistry:
    """The members, by number; a number is never reused. `kill` ends the process of a member, `where` returns its
    location.

    Needs a running event loop. Every method except `lost` must be called on the thread of that loop.
    """

    def __init__(self, channel: ControlSocket, kill: Kill, where: Where, lost_after: float) -> None:
        self._channel = channel
        self._kill_process = kill
        self.where = where
        self._lost_after = lost_after
        self._loop = asyncio.get_running_loop()
        self._members: dict[int, Member] = {}
        self._next = 0
        self._agreed: tuple[Hello, ...] = ()
        self._changed = asyncio.Event()
        self._observers: list[Callable[[MemberEvent], None]] = []
        self._is_over = False
        self._pulses = self._loop.create_task(self._watch_heartbeats())
        self._tasks: set[asyncio.Task[None]] = set()
        """Running operations on members, such as kills."""
        self.has_supervisor = False
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
        return [member for member in self if member.is_loaded and not member.end]

    def watch(self, observer: Callable[[MemberEvent], None]) -> None:
        """Call `observer` for every event from now on. The observer must be fast and must not raise."""
        self._observers.append(observer)

    def publish(self, event: MemberEvent) -> None:
        """Notify all observers."""
        for observer in self._observers:
            observer(event)
        self.note_change()

    def note_change(self) -> None:
        """Make all waiters check their conditions again."""
        self._changed.set()

    async def wait(self, condition: Callable[[], object], verdict: asyncio.Future[EpochEnd] | None = None) -> None:
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

    # --- beginning ---

    def invite(self) -> tuple[int, ConnectInfo]:
        """Return the number of a new member, and the information that it needs to connect."""
        number, self._next = self._next, self._next + 1
        self._members[number] = Member(number)
        return number, self._channel.invite(number)

    def withdraw(self, number: int) -> None:
        """Remove a member whose process was not started."""
        self._members.pop(number, None)
        self._channel.forget(number)

    def agree(self) -> None:
        """Fix the model of the present members as the one that later members must have."""
        self._agreed = self.hellos

    def load(self, members: Sequence[Member]) -> None:
        for member in members:
            member.is_loading = True
        self._channel.send([member.number for member in members], Load())

    async def admit(self, number: int) -> None:
        """Order a new member to load the model once its hello has arrived; the member can then join the next epoch.

        Raises StartError when the member is lost, or has a different model.
        """
        member = self.get(number)
        if member is None:
            raise StartError("the member is lost")
        await self.wait(lambda: member.end or member.hello)
        if not member.end and member.hello is not None:
            check_joiner(member.hello, self._agreed)
            self.load([member])
            await self.wait(lambda: member.end or member.is_loaded)
        if member.end:
            raise StartError(member.end)

    # --- ending ---

    def end(self, number: int, reason: str) -> None:
        """Kill a member, which is reported as lost when its process has ended. Its messages are ignored from now on."""
        member = self.get(number)
        if member is not None and not member.end:
            member.end = reason
            self._channel.forget(number)
            self.run(self._kill(number))

    async def _kill(self, number: int) -> None:
        try:
            await self._kill_process(number)
        except Exception:
            log.exception("cannot kill member %d", number)
        self.lose(number, "was killed")

    def run(self, work: Awaitable[None]) -> None:
        """Run `work` in the background; `settle` waits for it."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait_killed(self) -> None:
        """Wait until all running kills have finished."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    def lost(self, number: int, reason: str) -> None:
        """Report that the process of a member has ended. Thread-safe; may be called at any time."""
        with suppress(RuntimeError):  # the loop is closed, and with it every consumer of the event
            self._loop.call_soon_threadsafe(self.lose, number, reason)

    def lose(self, number: int, reason: str) -> None:
        """Remove a member that has ended and report the loss once; for a killed member, with the reason of the kill."""
        member = self._members.pop(number, None)
        if member is None:
            return
        member.end = member.end or reason
        self._channel.forget(number)
        rank = self.ranks.index(number) if number in self.ranks else None
        epoch = self.epoch if rank is not None else 0
        if not self._is_over:  # after `close` the member left on request
            self.publish(MemberLost(number, rank, epoch, member.node, member.end, self.has_supervisor))

    # --- pulses ---

    async def _watch_heartbeats(self) -> None:
        """Count the seconds since the last message of each member. Counting ticks, unlike comparing timestamps,
        tolerates a coordinator process that was itself suspended.
        """
        while True:
            await asyncio.sleep(PULSE_SECONDS)
            for member in self:
                if member.num_missed is None:
                    continue
                member.num_missed += 1
                limit = self._lost_after if member.is_loaded else max(self._lost_after, PATIENCE_SECONDS)
                if member.num_missed > limit:
                    self.end(member.number, f"no heartbeat for {human_seconds(limit)}")

    async def find_behind(self, numbers: Iterable[int], is_over: Callable[[], bool]) -> Member | None:
        """Return the member that blocks the others, among members that are all in the same step.

        Waits until each member has reported its progress again or its time is up. The result is the member with the
        oldest report, else the single member with the least progress. None when several members are equally behind, or
        when `is_over` becomes true meanwhile.
        """
        members = [member for number in numbers if (member := self.get(number)) is not None]
        heard = [member.num_pulses for member in members]
        with suppress(TimeoutError):
            async with asyncio.timeout(FRESH_SECONDS):
                await self.wait(
                    lambda: is_over() or all(one.num_pulses > old for one, old in zip(members, heard, strict=True))
                )
        return None if is_over() else _furthest_behind(members)

    async def close(self) -> None:
        """Cancel the running operations on members. Members that end from now on are not reported as lost."""
        self._is_over = True
        tasks = [self._pulses, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _furthest_behind(members: Sequence[Member]) -> Member | None:
    silent = [member for member in members if member.is_silent]
    if silent:
        return max(silent, key=lambda member: (member.num_missed or 0, -member.number))
    least = min((member.progress for member in members), default=None)
    behind = [member for member in members if member.progress == least]
    return behind[0] if len(behind) == 1 < len(members) else None
