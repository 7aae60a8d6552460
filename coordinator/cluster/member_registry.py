"""The members that live: how far each has come in its life, and in its step; and how it ends."""

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
"""How long one that loads the model may be silent, where those that have loaded it may be for less: then libraries may
keep all of its threads from running."""
IS_SILENT = 2
"""Missed pulses after which a member is not thought to be well."""
FRESH_SECONDS = 3 * PULSE_SECONDS
"""In which a member that is well tells anew how far it is."""
log = logging.getLogger(__name__)


@dataclass
class Member:
    """One worker process."""

    number: int
    hello: Hello | None = None
    is_loading: bool = False
    """It was told to load the model."""
    is_loaded: bool = False
    num_pulses: int = 0
    num_missed: int | None = None
    """Seconds since its last word; None before the first."""
    progress: MemberProgress = field(default_factory=MemberProgress)
    num_late: int = 0
    """Epochs one after the other that it has neither joined nor given up."""
    end: str = ""
    """Why it is gone, or is being killed; empty for one that shall live."""

    @property
    def node(self) -> str:
        return self.hello.node if self.hello is not None else ""

    @property
    def is_silent(self) -> bool:
        return self.num_missed is None or self.num_missed > IS_SILENT

    def take(self, message: Hello | Loaded | Heartbeat) -> None:
        """Raises ValueError for what is said a second time, or too early."""
        match message:
            case Hello() if self.hello is None:
                self.hello = message
            case Loaded() if self.is_loading:
                self.is_loaded = True
            case Heartbeat():
                self.progress = message.progress
                self.num_pulses += 1
            case _:
                raise ValueError(f"member {self.number} sends what it may not: {type(message).__name__} out of turn")


class MemberRegistry:
    """The members, by number; a number is never given twice. `kill` ends a member's process, `where` tells its place.
    Needs a running event loop; all but `lost` is for its thread."""

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
        self._pulses = self._loop.create_task(self._watch_pulses())
        self._tasks: set[asyncio.Task[None]] = set()
        """What is being done to members, such as killing them."""
        self.is_kept = False
        """Somebody replaces members that are lost."""
        self.epoch = 0
        self.ranks: tuple[int, ...] = ()
        """The members of the epoch, in rank order."""

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def get(self, number: int) -> Member | None:
        """None for one that is gone."""
        return self._members.get(number)

    @property
    def hellos(self) -> tuple[Hello, ...]:
        """Of those that have said it, in the order of their numbers."""
        return tuple(member.hello for member in self if member.hello is not None)

    def loaded(self) -> list[Member]:
        """Those that can join an epoch."""
        return [member for member in self if member.is_loaded and not member.end]

    def watch(self, observer: Callable[[MemberEvent], None]) -> None:
        """Has it told what becomes of members, from now on. It must be quick, and not raise."""
        self._observers.append(observer)

    def tell(self, event: MemberEvent) -> None:
        """Tells all who watch."""
        for observer in self._observers:
            observer(event)
        self.note_change()

    def note_change(self) -> None:
        """Has all who wait look again."""
        self._changed.set()

    async def wait(self, condition: Callable[[], object], verdict: asyncio.Future[EpochEnd] | None = None) -> None:
        """Waits until it holds. Raises what ends an epoch, if that has a verdict before."""
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
        """The number of a new member, and what it needs to connect."""
        number, self._next = self._next, self._next + 1
        self._members[number] = Member(number)
        return number, self._channel.invite(number)

    def withdraw(self, number: int) -> None:
        """Forgets a member whose process was not started."""
        self._members.pop(number, None)
        self._channel.forget(number)

    def agree(self) -> None:
        """What model those have that are here, others must have, too."""
        self._agreed = self.hellos

    def load(self, members: Sequence[Member]) -> None:
        for member in members:
            member.is_loading = True
        self._channel.send([member.number for member in members], Load())

    async def admit(self, number: int) -> None:
        """Has a new member load the model when it has said hello. It can be in the next epoch then.

        Raises StartError when it is lost, or has another model than the others.
        """
        member = self.get(number)
        if member is None:
            raise StartError("it is gone")
        await self.wait(lambda: member.end or member.hello)
        if not member.end and member.hello is not None:
            check_joiner(member.hello, self._agreed)
            self.load([member])
            await self.wait(lambda: member.end or member.is_loaded)
        if member.end:
            raise StartError(member.end)

    # --- ending ---

    def end(self, number: int, reason: str) -> None:
        """Kills a member, which then is lost. It is a stranger at once: nothing that it says until then counts."""
        member = self.get(number)
        if member is not None and not member.end:
            member.end = reason
            self._channel.forget(number)
            self.run(self._kill(number))

    async def _kill(self, number: int) -> None:
        try:
            await self._kill_process(number)
        except Exception:
            log.exception("member %d could not be killed", number)
        self.lose(number, "was killed")

    def run(self, work: Awaitable[None]) -> None:
        """Does it beside; `settle` waits for it."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self) -> None:
        """Waits until all are gone that are being killed."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    def lost(self, number: int, reason: str) -> None:
        """Tells that the process of a member has ended. Any thread may call it, at any time."""
        with suppress(RuntimeError):  # the loop has ended, and with it everybody who would want to know
            self._loop.call_soon_threadsafe(self.lose, number, reason)

    def lose(self, number: int, reason: str) -> None:
        """Forgets a member that has ended, and tells it, once; of one that was killed, why."""
        member = self._members.pop(number, None)
        if member is None:
            return
        member.end = member.end or reason
        self._channel.forget(number)
        rank = self.ranks.index(number) if number in self.ranks else None
        epoch = self.epoch if rank is not None else 0
        if not self._is_over:  # else it was told to leave
            self.tell(MemberLost(number, rank, epoch, member.node, member.end, self.is_kept))

    # --- pulses ---

    async def _watch_pulses(self) -> None:
        """Counts the seconds in which a member said nothing. Counting, unlike comparing times, forgives a coordinator
        that was itself stopped for a while."""
        while True:
            await asyncio.sleep(PULSE_SECONDS)
            for member in self:
                if member.num_missed is None:
                    continue
                member.num_missed += 1
                limit = self._lost_after if member.is_loaded else max(self._lost_after, PATIENCE_SECONDS)
                if member.num_missed > limit:
                    self.end(member.number, f"has been silent for {human_seconds(limit)}")

    async def find_behind(self, numbers: Iterable[int], is_over: Callable[[], bool]) -> Member | None:
        """Who holds up the others, of members that all are in a step, once each has told anew how far it is, or has
        missed that: one that is silent, else the one that has come least far. None when that is not a single one, or
        when it `is_over` meanwhile."""
        members = [member for number in numbers if (member := self.get(number)) is not None]
        heard = [member.num_pulses for member in members]
        with suppress(TimeoutError):
            async with asyncio.timeout(FRESH_SECONDS):
                await self.wait(
                    lambda: is_over() or all(one.num_pulses > old for one, old in zip(members, heard, strict=True))
                )
        return None if is_over() else _furthest_behind(members)

    async def close(self) -> None:
        """Forgets what is being done to members. Those that end from now on are no losses."""
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
