"""Schedules of losses, new members and leaving members, over the registry that deals weights, with simulated ranks."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any, cast

from coordinator.cluster.member import Member
from coordinator.cluster.member_registry import MemberRegistry
from coordinator.cluster.weight_deal import WeightDealer
from longleaf.rank_protocol.encoding import ToRank
from longleaf.rank_protocol.member_messages import Hold, Load, Loaded, WeightsReady
from longleaf.shares import NUM_PARTS, most_parts

MAX_RANKS = 9
NUM_EVENTS = 24


class SimulatedRank:
    """The parts that a simulated rank has in memory, and those that it uses."""

    def __init__(self) -> None:
        self.used = frozenset[int]()
        self.memory = frozenset[int]()
        self.num_read = 0
        """Parts that it has read since its group last formed."""

    def hold(self, parts: Sequence[int]) -> None:
        wanted = frozenset(parts)
        self.num_read += len(wanted - self.memory)
        self.memory = self.memory if wanted <= self.memory else wanted
        self.used = wanted

    def begin(self) -> None:
        """An epoch has begun."""
        self.memory, self.num_read = self.used, 0


class Channel:
    """Delivers orders to simulated ranks, which answer later."""

    def __init__(self) -> None:
        self.orders: list[tuple[int, ToRank]] = []

    def send(self, members: Sequence[int], message: ToRank) -> None:
        self.orders += [(member, message) for member in members]

    def invite(self, member: int) -> None:
        del member

    def forget(self, member: int) -> None:
        self.orders = [order for order in self.orders if order[0] != member]


async def no_process(member: int) -> None:
    del member


class WeightSchedule:
    """One schedule: a group forms, and after each event forms again if it can."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.num_ranks = self._random.randint(2, MAX_RANKS)
        self.num_spare = self._random.randint(0, self.num_ranks - 1)
        dealer = WeightDealer(self.num_ranks, self.num_spare)
        self._min_ranks = dealer.min_ranks
        self._channel = Channel()
        registry = MemberRegistry(cast(Any, self._channel), no_process, lambda _: "", 1000.0, dealer)
        self._registry = registry
        self._ranks = dict[int, SimulatedRank]()
        self._epoch = 0
        self._is_calm = False
        """Nothing is lost any more."""
        self._num_lost = 0
        """Members of the last group that are gone."""
        self._num_attempts = 0
        """Attempts to form a group since the last one has formed."""

    async def run(self) -> None:
        members = [self._invite(slot) for slot in range(self.num_ranks)]
        self._registry.load(members)
        self._answer_all()
        await self._form()
        for _ in range(NUM_EVENTS):
            event = self._random.choice((self._lose, self._lose, self._start_one, self._start_one, self._answer_one))
            event()
            if self._random.random() < 0.7:
                await self._form()
        self._is_calm = True
        for slot in self._empty_slots():
            self._registry.load([self._invite(slot)])
        self._answer_all()
        await self._form()
        assert len(self._registry.ranks) == self.num_ranks
        if not self.num_spare:
            assert all(rank.used == self._home(number) for number, rank in self._ranks.items())
        await self._registry.close()

    def _home(self, number: int) -> frozenset[int]:
        return WeightDealer(self.num_ranks).home(self._member(number).slot)

    def _member(self, number: int) -> Member:
        member = self._registry.get(number)
        assert member is not None
        return member

    def _invite(self, slot: int) -> Member:
        number, _ = self._registry.invite(slot)
        self._ranks[number] = SimulatedRank()
        return self._member(number)

    # --- events ---

    def _lose(self) -> None:
        """A member is lost, or leaves; it may be loading."""
        if len(self._ranks) > 1:
            self._remove(self._random.choice(sorted(self._ranks)))

    def _remove(self, number: int) -> None:
        self._num_lost += number in self._registry.ranks
        del self._ranks[number]
        self._registry.remove_lost(number, "was lost")

    def _empty_slots(self) -> list[int]:
        return sorted(set(range(self.num_ranks)) - {member.slot for member in self._registry})

    def _start_one(self) -> None:
        if empty := self._empty_slots():
            self._registry.load([self._invite(self._random.choice(empty))])

    def _answer_one(self) -> None:
        """A member completes its oldest order."""
        if self._channel.orders:
            number = self._random.choice(self._channel.orders)[0]
            order = next(order for order in self._channel.orders if order[0] == number)
            self._channel.orders.remove(order)
            rank, message = self._ranks[number], order[1]
            assert isinstance(message, Load | Hold)
            rank.hold(message.parts)
            answer = Loaded(number) if isinstance(message, Load) else WeightsReady(number, 0)
            self._member(number).on_message(answer)
            self._registry.notify_waiters()

    def _answer_all(self) -> None:
        while self._channel.orders:
            self._answer_one()

    # --- epochs ---

    async def _form(self) -> None:
        """Forms a group, during which further members may be lost, and a tenth of the attempts fails."""
        while len(members := self._registry.loaded()) >= self._min_ranks:
            numbers = [member.number for member in members]
            self._num_attempts += 1
            holding = asyncio.ensure_future(self._registry.hold_parts(members))
            await asyncio.sleep(0)
            while not holding.done():
                if not self._is_calm and self._random.random() < 0.05 and len(numbers) > 1:
                    self._remove(self._random.choice(sorted(self._ranks)))
                else:
                    self._answer_one()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            if not holding.result():
                continue
            if not self._is_calm and self._random.random() < 0.1:  # a member is lost before the group has formed
                self._remove(self._random.choice(numbers))
                continue
            self._begin(numbers)
            return

    def _begin(self, numbers: list[int]) -> None:
        """Checks the invariants of a group that has formed."""
        ranks = [self._ranks[number] for number in numbers]
        used = sorted(part for rank in ranks for part in rank.used)
        assert used == list(range(NUM_PARTS))
        room = max(most_parts(self.num_ranks, self.num_spare), most_parts(self.num_ranks, 0))
        assert all(len(rank.used) <= room for rank in ranks)
        before = self._registry.ranks
        survivors = [number for number in numbers if number in before]
        most_read = max((self._ranks[number].num_read for number in survivors), default=0)
        is_first = self._num_attempts == 1
        if is_first and set(numbers) <= set(before) and self._num_lost == 1:
            assert most_read <= NUM_PARTS / (len(before) * (len(before) - 1)) + 1
        if is_first and not self._num_lost and self._epoch:
            assert not most_read, "a new member makes others read"
        self._epoch += 1
        self._num_lost = self._num_attempts = 0
        self._registry.begin_epoch(self._epoch, tuple(numbers))
        self._registry.drop_surplus([self._member(number) for number in numbers])
        for rank in ranks:
            rank.begin()
        for number in numbers:
            assert self._member(number).used_parts == self._ranks[number].used
