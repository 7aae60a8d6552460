"""Lost members are replaced immediately, later, or never."""

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec
import pytest

from coordinator.cluster.ports import (
    MemberEvent,
    MemberJoined,
    MemberLost,
    ReplacementAbandoned,
    ReplacementDelayed,
    ReplacementStarted,
)
from coordinator.cluster.rank_manager import RankManager
from coordinator.cluster.replacement_supervisor import ReplacementSupervisor, ReplacementThrottle, pinned
from longleaf.config import EngineConfig, embedded_model
from longleaf.errors import StartError
from longleaf.fingerprint import read_fingerprint
from longleaf.positions import WindowSpec
from longleaf.rank_protocol.group_messages import Ready
from longleaf.rank_protocol.rank_spec import ConnectInfo
from tests.support.fakes.ranks import FakeFleet
from tests.support.members import ScriptedMember

pytestmark = pytest.mark.timeout(60)
CONFIG = EngineConfig(model=str(embedded_model()), world_size=2, max_losses_per_minute=3, kv_bytes=100)
OWN = read_fingerprint(embedded_model())
OTHER = msgspec.structs.replace(OWN, digest="another", files=OWN.files | {"tokenizer.json": "another"})
Event = TypeVar("Event", bound=MemberEvent)


class ScriptedFleet(FakeFleet):
    """Starts scripted members. Members in `failing` die while loading, members in `strange` have another model."""

    def __init__(self) -> None:
        super().__init__(0)
        self.members: dict[int, ScriptedMember] = {}
        self.replaced: list[tuple[int, int]] = []
        self.failing: set[int] = set()
        self.strange: set[int] = set()
        self.killed: list[int] = []
        self.problem: Exception | None = None

    async def kill(self, member: int) -> None:
        self.killed.append(member)

    async def replace(self, lost: int, member: int, invitation: ConnectInfo, config: EngineConfig) -> None:
        assert config == CONFIG
        if self.problem is not None:
            raise self.problem
        self.replaced.append((lost, member))
        self.start(member, invitation)

    def start(self, member: int, invitation: ConnectInfo) -> None:
        reported = OTHER if member in self.strange else OWN
        self.members[member] = ScriptedMember(invitation, member, fingerprint=reported)
        self.members[member].fails_to_load = member in self.failing


class SupervisedWorld:
    """A world of two members with replacement of losses. Time passes only in sleeps."""

    def __init__(self) -> None:
        self.fleet = ScriptedFleet()
        self.control = RankManager(CONFIG, kill=self.fleet.kill)
        self.events: list[MemberEvent] = []
        self.now = 0.0
        self.slept: list[float] = []
        self._changed = asyncio.Event()
        self.control.registry.subscribe(self._note)

    async def start(self) -> None:
        for member, invitation in enumerate(self.control.invitations):
            self.fleet.start(member, invitation)
        formation = await self.control.start(1)
        self.supervisor = ReplacementSupervisor(
            self.control.registry, self.fleet, CONFIG, formation.readies, lambda: self.now, self._sleep
        )

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)

    def _note(self, event: MemberEvent) -> None:
        self.events.append(event)
        self._changed.set()

    async def wait_for(self, kind: type[Event], count: int = 1) -> list[Event]:
        """The events of this type once there are that many."""
        while len(found := [event for event in self.events if isinstance(event, kind)]) < count:
            self._changed.clear()
            await self._changed.wait()
        return found

    async def close(self) -> None:
        await self.supervisor.close()
        for member in self.fleet.members.values():
            await member.close()
        await self.control.close()


@pytest.fixture
async def world() -> AsyncIterator[SupervisedWorld]:
    retained = SupervisedWorld()
    await retained.start()
    yield retained
    await retained.close()


async def test_lost_member_is_replaced(world: SupervisedWorld) -> None:
    for epoch, (lost, member) in enumerate([(1, 2), (0, 3), (2, 4)], start=2):
        world.control.on_process_exit(lost, "vanished")
        await world.control.wait_joinable()
        assert world.fleet.replaced[-1] == (lost, member)
        await world.control.form(epoch)
    assert world.slept == []
    assert await world.wait_for(ReplacementStarted) == [
        ReplacementStarted(2, 1),
        ReplacementStarted(3, 0),
        ReplacementStarted(4, 2),
    ]
    assert [event.member for event in await world.wait_for(MemberJoined)] == [2, 3, 4]


async def test_replacement_is_delayed_after_too_many_losses(world: SupervisedWorld) -> None:
    for member in (1, 2, 3):
        world.control.on_process_exit(member, "vanished")
        await world.wait_for(ReplacementStarted, member)
        await world.control.wait_joinable()
        await world.control.form(member + 1)
        world.now += 10.0
    world.control.on_process_exit(4, "vanished")
    assert await world.wait_for(ReplacementDelayed) == [
        ReplacementDelayed(4, 30.0, "too many ranks were lost within a minute")
    ]
    await world.wait_for(ReplacementStarted, 4)
    assert world.slept == [30.0]


async def test_slot_lost_during_loading_is_abandoned_until_requested(world: SupervisedWorld) -> None:
    world.fleet.failing = {2, 3, 4}
    world.control.on_process_exit(1, "vanished")
    reason = "3 replacements were lost before they joined; latest reason: no memory"
    assert await world.wait_for(ReplacementAbandoned) == [ReplacementAbandoned(4, reason)]
    assert await world.wait_for(ReplacementStarted) == [
        ReplacementStarted(2, 1),
        ReplacementStarted(3, 2),
        ReplacementStarted(4, 3),
    ]
    assert [event.member for event in await world.wait_for(MemberLost)] == [1, 2, 3, 4]
    assert world.fleet.killed == [], "they exited without a kill"
    assert world.supervisor.reset_slots() == 1
    assert world.supervisor.reset_slots() == 0, "a replacement is running"
    await world.control.wait_joinable()
    assert await world.wait_for(ReplacementStarted, 4) == [
        ReplacementStarted(2, 1),
        ReplacementStarted(3, 2),
        ReplacementStarted(4, 3),
        ReplacementStarted(5, 4),
    ]
    assert (await world.control.form(2)).members == (0, 5)
    assert world.supervisor.reset_slots() == 0
    assert len(world.fleet.replaced) == 4, "no member is missing"


async def test_established_rank_starts_without_earlier_failures(world: SupervisedWorld) -> None:
    world.fleet.failing = {2, 3, 5, 6}
    for epoch, lost in ((2, 1), (3, 4)):
        world.control.on_process_exit(lost, "vanished")
        await world.wait_for(ReplacementStarted, lost + 2 if lost > 1 else 3)
        await world.control.wait_joinable()
        await world.control.form(epoch)
    assert not [event for event in world.events if isinstance(event, ReplacementAbandoned)]
    assert [member for _, member in world.fleet.replaced] == [2, 3, 4, 5, 6, 7]


async def test_slot_whose_replacements_load_but_never_join_is_abandoned(world: SupervisedWorld) -> None:
    for lost in (1, 2, 3, 4):
        world.control.on_process_exit(lost, "did not join 2 epochs in time")
        if lost < 4:
            await world.wait_for(ReplacementStarted, lost)
            await world.control.wait_joinable()
    reason = "3 replacements were lost before they joined; latest reason: did not join 2 epochs in time"
    assert await world.wait_for(ReplacementAbandoned) == [ReplacementAbandoned(4, reason)]
    assert world.supervisor.reset_slots() == 1


async def test_missing_slot_stops_blocking_and_is_filled_when_it_returns(world: SupervisedWorld) -> None:
    world.fleet.problem = StartError("no slot")
    world.control.on_process_exit(1, "its node died")
    [abandoned] = await world.wait_for(ReplacementAbandoned)
    message = "no slot for 5 min; a replacement starts when one is free: no slot"
    assert (abandoned.lost, abandoned.reason) == (1, message)
    assert world.now >= CONFIG.start_timeout
    await world.control.wait_ready()
    assert world.supervisor.reset_slots() == 0, "the slot is still searched for"
    world.fleet.problem = None
    await world.control.wait_joinable()
    assert len([event for event in world.events if isinstance(event, ReplacementAbandoned)]) == 1, "reported once"
    assert [loss.slot for loss in world.control.losses] == ["starting"]


async def test_replacement_has_the_model_of_the_others(world: SupervisedWorld) -> None:
    world.fleet.strange = {2, 3, 4}
    world.control.on_process_exit(1, "vanished")
    [abandoned] = await world.wait_for(ReplacementAbandoned)
    assert abandoned.reason.endswith("has a different tokenizer.json than node node (127.0.0.1)")
    assert world.fleet.killed == [2, 3, 4]
    reported = list(world.events)
    assert reported[-2:] == [
        MemberLost(4, None, 0, "node", abandoned.reason.partition("latest reason: ")[2], True),
        abandoned,
    ]
    assert [loss.slot for loss in world.control.losses] == ["abandoned"] * 4
    await world.supervisor.close()
    assert world.events == reported, "it is reported once"


@pytest.mark.parametrize(
    ("problem", "message"),
    [(StartError("no slot"), "no slot"), (BlockingIOError("no process"), "BlockingIOError: no process")],
)
async def test_slot_that_cannot_be_filled_now_is_retried(
    world: SupervisedWorld, problem: Exception, message: str
) -> None:
    world.fleet.problem = problem
    world.control.on_process_exit(1, "its node died")
    assert await world.wait_for(ReplacementDelayed) == [ReplacementDelayed(1, 5.0, message)]
    for _ in range(1000):  # it retries periodically
        await asyncio.sleep(0)
    assert set(world.slept) == {5.0}
    assert len(await world.wait_for(ReplacementDelayed)) == 1, "reported once"
    assert len(list(world.control.registry)) <= 2, "only started members are waited for"
    world.fleet.problem = None
    await world.control.wait_joinable()
    [replacing] = await world.wait_for(ReplacementStarted)
    assert (await world.control.form(2)).members == (0, replacing.member)


async def test_no_member_is_replaced_after_close(world: SupervisedWorld) -> None:
    await world.supervisor.close()
    world.control.on_process_exit(1, "vanished")
    await world.wait_for(MemberLost)
    assert world.fleet.replaced == []


def test_losses_up_to_the_limit_cause_no_delay() -> None:
    throttle = ReplacementThrottle(2)
    for now, expected in ((0.0, 0.0), (10.0, 0.0), (20.0, 40.0), (70.5, 0.0), (71.0, 9.0)):
        throttle.record_loss(now)
        assert throttle.delay(now) == expected
    assert throttle.delay(80.0) == 0.0


def test_zero_loss_limit_delays_every_replacement() -> None:
    throttle = ReplacementThrottle(0)
    throttle.record_loss(5.0)
    assert throttle.delay(6.0) == 59.0


def test_replacement_pool_has_the_previous_size() -> None:
    config = EngineConfig(model="none", block_size=16)
    ready = Ready(0, "cpu", "float32", 100, 64)
    assert pinned(config, ready).kv_bytes == 100 * 16 * 64
    windows = WindowSpec(reaches=(), num_blocks=7, bytes_per_token=32)
    both = pinned(config, msgspec.structs.replace(ready, windows=windows))
    assert (both.kv_bytes, both.window_bytes) == (100 * 16 * 64 + 7 * 16 * 32, 7 * 16 * 32)
    given = msgspec.structs.replace(config, kv_bytes=5)
    assert pinned(given, ready) is given
