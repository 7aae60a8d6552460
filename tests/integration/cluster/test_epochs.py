"""Consecutive epochs: the remaining members form the next epoch, independently of failures of the others."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection

import pytest
from msgspec.structs import replace

from coordinator.cluster import rank_manager as control_module
from coordinator.cluster.ports import MemberEvent, MemberJoined, MemberLost
from coordinator.cluster.rank_manager import RankManager
from longleaf.config import EngineConfig
from longleaf.errors import GroupFailed, RankLost, StartError, Unavailable
from longleaf.rank_protocol.encoding import ToRank
from longleaf.rank_protocol.group_messages import (
    AbortExchanges,
    GroupFailure,
    Join,
    KvLayout,
    MergeTiming,
    OpenStore,
    Ready,
    StoreOpened,
)
from longleaf.rank_protocol.member_messages import Died, Hold, Load, MemberProgress
from longleaf.rank_protocol.step import Decode, StepPlan, StepResult
from longleaf.sampling import Token
from longleaf.shares import even_share
from tests.support.members import ScriptedMember

pytestmark = pytest.mark.timeout(60)


class World:
    """RankManager with scripted members; members that it kills disappear."""

    def __init__(
        self, world_size: int, nodes: str = "", *, have_late_heartbeats: bool = False, **settings: object
    ) -> None:
        self.config = EngineConfig(model="none", world_size=world_size, **settings)  # type: ignore[arg-type]
        self.control = RankManager(self.config, kill=self.kill)
        self.members: dict[int, ScriptedMember] = {}
        self.killed: list[int] = []
        self.events: list[MemberEvent] = []
        self.control.registry.subscribe(self.events.append)
        for number, invitation in enumerate(self.control.invitations):
            node = (nodes or "a" * world_size)[number]
            self.members[number] = ScriptedMember(invitation, number, node, has_late_heartbeat=have_late_heartbeats)

    async def kill(self, member: int) -> None:
        self.killed.append(member)

    async def add(self, node: str = "a", deaf_to: Collection[type[ToRank]] = (), slot: int = 0) -> int:
        """Adds a member of this slot that loads the model beside the epoch."""
        number, invitation = self.control.registry.invite(slot)
        self.members[number] = ScriptedMember(invitation, number, node, deaf_to)
        await self.control.registry.admit(number)
        return number

    def beat(self, *numbers: int) -> None:
        for number in numbers:
            self.members[number].beat()

    async def connect_heartbeats(self) -> None:
        """Connects the heartbeat connections of the members: without them no abort can reach them."""
        self.beat(*self.members)
        await self.control.registry.wait_until(lambda: all(member.num_heartbeats for member in self.control.registry))

    async def hear(self, member: int, kind: type[ToRank]) -> ToRank:
        """The next message of this kind to a member."""
        while not isinstance(message := await self.members[member].receive(), kind):
            pass
        return message

    async def check(self, epoch: int, *members: int) -> None:
        """The epoch has these ranks: each is sent a layout, and rank 0 answers a step."""
        layout, plan = KvLayout(epoch, ()), StepPlan(epoch, 1, Decode(()))
        await self.control.group.send_layout(layout)
        step = asyncio.ensure_future(self.control.group.step(plan))
        for rank, member in enumerate(members):
            assert await self.hear(member, KvLayout) == layout
            assert await self.hear(member, StepPlan) == plan
            last = self.members[member].joins[-1]
            assert (last.epoch, last.rank, last.world_size) == (epoch, rank, len(members))
        await self.members[members[0]].send(StepResult(epoch, 1, {epoch: (Token(7),)}))
        assert (await step).tokens == {epoch: (Token(7),)}


MakeWorld = Callable[..., Awaitable[World]]


@pytest.fixture
async def make_world() -> AsyncIterator[MakeWorld]:
    """Checks that the epoch has these ranks: each gets a layout, and rank 0 answers a step."""
    worlds: list[World] = []

    async def make(*arguments: object, **settings: object) -> World:
        worlds.append(World(*arguments, **settings))  # type: ignore[arg-type]
        await worlds[-1].control.start(1)
        return worlds[-1]

    yield make
    for world in worlds:
        for member in world.members.values():
            await member.close()
        await world.control.close()


async def until(condition: Callable[[], object]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(("lost", "left"), [((0,), (1, 2)), ((1,), (0, 2)), ((0, 2), (1,))])
async def test_remaining_members_form_the_next_epoch(make_world: MakeWorld, lost, left) -> None:
    world = await make_world(3)
    await world.connect_heartbeats()
    step = asyncio.ensure_future(world.control.group.step(StepPlan(1, 1, Decode(()))))
    await world.hear(2, StepPlan)
    for member in lost:
        world.control.on_process_exit(member, "was killed by signal 9")
    end = await world.control.group.wait_ended()
    assert isinstance(end.error, RankLost)
    assert (end.error.rank, end.steps) == (lost[0], (1,))
    with pytest.raises(RankLost):
        await step
    formation = await world.control.form(2)
    assert (formation.epoch, formation.members) == (2, left)
    assert [hello.member for hello in formation.hellos] == list(left)
    assert [ready.member for ready in formation.readies] == list(left)
    await world.check(2, *left)
    assert [world.members[member].fences for member in left] == [[AbortExchanges(1)]] * len(left)
    assert world.events == [MemberLost(member, member, 1, "a", "was killed by signal 9", False) for member in lost]
    assert [(loss.member, loss.rank, loss.epoch, loss.slot) for loss in world.control.losses] == [
        (member, member, 1, "abandoned") for member in lost
    ]


def share(index: int, count: int = 3) -> Load:
    return Load(even_share(index, count))


async def test_a_group_with_sharded_weights_waits_for_the_replacement(make_world: MakeWorld) -> None:
    world = await make_world(3, weights="sharded")
    assert [world.members[member].loads for member in range(3)] == [[share(0)], [share(1)], [share(2)]]
    world.control.registry.attach_supervisor(lambda _: None)
    world.control.on_process_exit(1, "was killed by signal 9")
    await world.control.group.wait_ended()
    assert world.control.missing_weights == pytest.approx(1 / 3)
    forming = asyncio.ensure_future(world.control.form(2))
    await asyncio.sleep(0)
    assert not forming.done()
    member = await world.add(slot=1)
    assert world.members[member].loads == [share(1)]
    assert (await forming).members == (0, 2, member)
    assert not any(world.members[number].holds for number in (0, 2, member))
    assert not world.control.missing_weights


async def test_survivors_with_room_read_lost_parts_and_return_them_to_the_replacement(make_world: MakeWorld) -> None:
    world = await make_world(3, weights="sharded", spare_ranks=1)
    world.control.on_process_exit(1, "was killed by signal 9")
    await world.control.group.wait_ended()
    assert (await world.control.form(2)).members == (0, 2)
    left = {number: world.members[number] for number in (0, 2)}
    assert [one.holds for one in left.values()] == [[Hold(tuple(range(120)))], [Hold(tuple(range(120, 240)))]]
    member = await world.add(slot=1)
    assert world.members[member].loads == [share(1)]
    assert (await world.control.form(3)).members == (0, 2, member)
    assert [one.holds[1:] for one in left.values()] == [[Hold(even_share(0, 3))], [Hold(even_share(2, 3))]]
    assert not world.members[member].holds


async def test_a_member_lost_while_it_reads_weights_is_replaced_by_another_deal(make_world: MakeWorld) -> None:
    world = await make_world(4, weights="sharded", spare_ranks=2)
    world.members[2].deaf_to = {Hold}
    world.control.on_process_exit(1, "was killed by signal 9")
    await world.control.group.wait_ended()
    forming = asyncio.ensure_future(world.control.form(2))
    await until(lambda: bool(world.members[0].holds and world.members[3].holds))
    assert world.control.missing_weights
    world.control.on_process_exit(2, "was killed by signal 9")
    assert (await forming).members == (0, 3)
    shares = [set(world.members[number].holds[-1].parts) for number in (0, 3)]
    assert len(shares[0]) == len(shares[1]) == 120
    assert shares[0] | shares[1] == set(range(240))
    assert all(set(world.members[number].holds[0].parts) <= shares[i] for i, number in enumerate((0, 3)))


async def test_a_member_that_does_not_read_its_parts_in_time_is_killed(make_world: MakeWorld) -> None:
    world = await make_world(3, weights="sharded", spare_ranks=2, start_timeout=1.0)
    world.members[2].deaf_to = {Hold}
    world.control.on_process_exit(1, "was killed by signal 9")
    await world.control.group.wait_ended()
    assert (await world.control.form(2)).members == (0,)
    assert world.killed == [2]


async def test_a_member_that_hangs_as_it_joins_is_killed_before_it_should_read_weights(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading has minutes, so the other members would wait that long for weights of one that never reads."""
    monkeypatch.setattr(control_module, "ANSWER_SECONDS", 0.1)
    world = await make_world(3, weights="sharded", spare_ranks=1, rendezvous_timeout=0.3)
    world.members[1].deaf_to = (Join, AbortExchanges)
    world.members[2].deaf_to = (Join,)  # it waits for the other one until the abort
    world.control.on_process_exit(0, "was killed by signal 9")
    await world.control.group.wait_ended()
    forming = asyncio.ensure_future(world.control.form(2))
    await until(lambda: bool(world.members[1].joins[1:]))
    world.members[1].deaf_to = (Join, AbortExchanges, Hold)
    world.members[2].deaf_to = ()
    member = await world.add(slot=0)
    assert (await forming).members == (2, member)
    assert world.killed == [1]


async def test_a_member_suspended_while_it_reads_weights_is_killed(make_world: MakeWorld) -> None:
    world = await make_world(3, weights="sharded", spare_ranks=2, heartbeat_timeout=1.0)
    world.members[2].deaf_to = {Hold}
    world.beat(0, 2)
    world.control.on_process_exit(1, "was killed by signal 9")
    await world.control.group.wait_ended()
    forming = asyncio.ensure_future(world.control.form(2))
    await until(lambda: bool(world.members[0].holds))
    world.members[2].stop_beating()
    assert (await forming).members == (0,)
    assert world.killed == [2]
    assert set(world.members[0].holds[-1].parts) == set(range(240))


async def test_a_newcomer_lost_before_it_joins_leaves_its_share_to_the_next(make_world: MakeWorld) -> None:
    world = await make_world(3, weights="sharded")
    world.control.registry.attach_supervisor(lambda _: None)
    world.control.on_process_exit(1, "was killed by signal 9")
    await world.control.group.wait_ended()
    forming = asyncio.ensure_future(world.control.form(2))
    registry = world.control.registry
    number, invitation = registry.invite(1)
    world.members[number] = ScriptedMember(invitation, number, "a", deaf_to={Load})
    loading = asyncio.ensure_future(registry.admit(number))
    await until(lambda: (member := registry.get(number)) is not None and member.is_loading)
    world.control.on_process_exit(number, "was killed by signal 9")
    with pytest.raises(StartError, match="was killed by signal 9"):
        await loading
    assert not forming.done()
    member = await world.add(slot=1)
    assert world.members[member].loads == [share(1)]
    assert (await forming).members == (0, 2, member)


async def test_sharded_weights_without_a_replacement_end_the_service(make_world: MakeWorld) -> None:
    world = await make_world(3, weights="sharded")
    world.control.on_process_exit(1, "was killed by signal 9")
    await world.control.group.wait_ended()
    with pytest.raises(RankLost, match="was killed by signal 9"):
        await world.control.form(2)


async def test_abort_sent_before_the_heartbeat_connection_is_sent_again(make_world: MakeWorld) -> None:
    """ZMQ drops messages on a connection that is not yet established."""
    world = await make_world(2, have_late_heartbeats=True)
    world.control.on_process_exit(1, "vanished")
    await world.control.group.wait_ended()
    member = world.members[0]
    member.beat(MemberProgress(1))
    await until(lambda: member.fences == [AbortExchanges(1)])
    assert (await world.control.form(2)).members == (0,)


async def test_unacknowledged_abort_is_sent_again(make_world: MakeWorld) -> None:
    world = await make_world(2)
    world.members[0].deaf_to = (AbortExchanges,)
    world.members[0].beat(MemberProgress(1))
    world.control.on_process_exit(1, "vanished")
    await until(lambda: world.members[0].num_fences > 2)
    world.members[0].progress = MemberProgress(2)
    heard = next(member.num_heartbeats for member in world.control.registry)
    await world.control.registry.wait_until(
        lambda: all(member.num_heartbeats > heard + 1 for member in world.control.registry)
    )
    num_fences = world.members[0].num_fences
    await world.control.registry.wait_until(
        lambda: all(member.num_heartbeats > heard + 3 for member in world.control.registry)
    )
    assert world.members[0].num_fences == num_fences


async def test_error_of_an_epoch_does_not_change_later(make_world: MakeWorld) -> None:
    world = await make_world(3)
    for epoch, lost in ((1, 0), (2, 1)):
        waiting = asyncio.create_task(world.control.group.wait_ended())
        await asyncio.sleep(0)
        assert not waiting.done()
        world.control.on_process_exit(lost, "vanished")
        assert str((await waiting).error) == "rank 0 was lost: vanished"
        old = world.control.group
        await world.control.form(epoch + 1)
    await world.check(3, 2)
    with pytest.raises(RankLost, match="rank 0 was lost: vanished"):
        await old.step(StepPlan(2, 9, Decode(())))
    with pytest.raises(RankLost):
        await old.send_layout(KvLayout(2, ()))
    assert [(loss.member, loss.rank, loss.epoch) for loss in world.control.losses] == [(0, 0, 1), (1, 0, 2)]


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 1, 2), (2, 0, 1)])
async def test_broken_epoch_is_formed_again_with_all_members(make_world: MakeWorld, order: tuple[int, ...]) -> None:
    world = await make_world(3)
    for member in order:
        own = GroupFailure(1, 1, 4, "ValueError: no")
        # the others saw it leave the group
        await world.members[member].send(own if member == 1 else GroupFailure(member, 1, 4, "was left", blamed=1))
    end = await world.control.group.wait_ended()
    assert isinstance(end.error, GroupFailed)
    assert (str(end.error), end.steps, world.killed) == ("rank 1: ValueError: no", (4,), [])
    assert (await world.control.form(2)).members == (0, 1, 2)
    await world.check(2, 0, 1, 2)


async def test_suspected_member_without_a_report_is_killed(make_world: MakeWorld) -> None:
    world = await make_world(3)
    world.members[1].deaf_to = (AbortExchanges,)
    await world.members[2].send(GroupFailure(2, 1, 4, "was left", blamed=1))
    end = await world.control.group.wait_ended()
    assert (world.killed, str(end.error), end.steps) == ([1], "rank 1 was lost: was left", (4,))
    assert (await world.control.form(2)).members == (0, 2)


async def test_only_members_that_loaded_the_model_join(make_world: MakeWorld) -> None:
    world = await make_world(2, "ab")
    await world.connect_heartbeats()
    waiting = asyncio.create_task(world.control.wait_joinable())
    number, invitation = world.control.registry.invite()
    world.control.on_process_exit(1, "vanished")
    await world.control.group.wait_ended()
    assert (await world.control.form(2)).members == (0,)
    assert not waiting.done()
    world.members[number] = ScriptedMember(invitation, number, "b")
    await world.control.registry.admit(number)
    await waiting
    assert (await world.control.form(3)).members == (0, 2)
    assert world.events[-1] == MemberJoined(2, 1, "b", 3)
    assert world.members[0].fences == [AbortExchanges(1)], "an orderly end needs no abort"
    await world.check(3, 0, 2)
    waiting = asyncio.create_task(world.control.wait_joinable())
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()


async def test_new_member_is_placed_beside_members_of_its_node(make_world: MakeWorld) -> None:
    world = await make_world(4, "aabb")
    world.control.on_process_exit(0, "vanished")
    await world.control.group.wait_ended()
    assert (await world.control.form(2)).members == (1, 2, 3)
    await world.add("a")
    assert (await world.control.form(3)).members == (1, 4, 2, 3)
    assert world.members[3].joins[-1].nodes == ("a", "a", "b", "b")


async def test_measurements_are_not_repeated(make_world: MakeWorld) -> None:
    world = await make_world(1)
    timing = (MergeTiming(1, "gather", {"gather": 2.0}),)
    world.members[0].merges = timing
    for epoch in (2, 3):
        await world.control.form(epoch)
    assert [join.merges for join in world.members[0].joins] == [(), (), timing]


# --- silent and blocked members ---


async def test_silent_member_is_killed_and_then_lost(make_world: MakeWorld) -> None:
    world = await make_world(3, heartbeat_timeout=1.0)
    world.beat(0, 2)
    world.members[1].beat()
    end = asyncio.create_task(world.control.group.wait_ended())
    await asyncio.sleep(0.1)
    world.members[1].stop_beating()
    assert str((await end).error) == "rank 1 was lost: no heartbeat for 1 s"
    assert world.killed == [1]


@pytest.mark.parametrize("behind", [0, 2])
async def test_member_that_blocks_the_others_is_killed(make_world: MakeWorld, behind: int) -> None:
    world = await make_world(3, step_timeout=0.1)
    for number, member in world.members.items():
        member.beat(MemberProgress(1, 1, 6 if number == behind else 7))
    with pytest.raises(RankLost, match=r"step 1 exceeded its limit of 100 ms") as caught:
        await world.control.group.step(StepPlan(1, 1, Decode(())))
    assert (caught.value.rank, world.killed) == (behind, [behind])
    assert (await world.control.group.wait_ended()).steps == (1,)
    assert len((await world.control.form(2)).members) == 2


@pytest.mark.parametrize("counts", [(7, 7, 7), (6, 6, 7)])
async def test_no_member_is_killed_when_several_are_behind(make_world: MakeWorld, counts) -> None:
    world = await make_world(3, step_timeout=0.1)
    for number, member in world.members.items():
        member.beat(MemberProgress(1, 1, counts[number]))
    with pytest.raises(GroupFailed, match="step 1 exceeded its limit"):
        await world.control.group.step(StepPlan(1, 1, Decode(())))
    assert ((await world.control.group.wait_ended()).steps, world.killed) == ((1,), [])
    assert (await world.control.form(2)).members == (0, 1, 2)
    assert world.members[1].fences == [AbortExchanges(1)]


async def test_late_answer_is_accepted(make_world: MakeWorld) -> None:
    world = await make_world(2, step_timeout=0.1)
    step = asyncio.ensure_future(world.control.group.step(StepPlan(1, 1, Decode(()))))
    await world.hear(0, StepPlan)
    await asyncio.sleep(0.2)  # past the deadline, when members are asked for their progress
    await world.members[0].send(StepResult(1, 1, {1: (Token(3),)}))
    assert (await step).tokens == {1: (Token(3),)}
    assert world.killed == []


# --- while an epoch is formed ---


async def test_member_lost_while_an_epoch_forms_is_excluded(make_world: MakeWorld) -> None:
    world = await make_world(3)
    world.members[2].deaf_to = (Join,)
    world.control.on_process_exit(0, "vanished")
    await world.control.group.wait_ended()
    forming = asyncio.create_task(world.control.form(2))
    await until(lambda: [join.epoch for join in world.members[2].joins] == [1, 2])
    world.control.on_process_exit(2, "also vanished")
    formation = await forming
    assert (formation.epoch, formation.members) == (3, (1,)), "the second attempt has a new number"
    await world.check(3, 1)


async def test_member_lost_before_it_opens_a_store_is_excluded(make_world: MakeWorld) -> None:
    world = await make_world(3)
    world.members[1].deaf_to = (OpenStore,)
    world.control.on_process_exit(0, "vanished")
    await world.control.group.wait_ended()
    forming = asyncio.create_task(world.control.form(2))
    await until(lambda: world.control.group.epoch == 2)
    world.control.on_process_exit(1, "also vanished")
    assert (await forming).members == (2,)


async def test_member_that_fails_to_join_twice_is_killed(make_world: MakeWorld, monkeypatch) -> None:
    monkeypatch.setattr(control_module, "ANSWER_SECONDS", 0.3)
    world = await make_world(3, rendezvous_timeout=0.3)
    world.members[1].deaf_to = (Join, AbortExchanges)
    world.members[0].deaf_to = (Join,)  # it waits for the others until the abort
    await world.members[2].send(GroupFailure(2, 1, 1, "raised"))
    await world.control.group.wait_ended()
    forming = asyncio.create_task(world.control.form(2))
    await until(lambda: world.killed)
    world.members[0].deaf_to = ()
    formation = await forming
    assert world.killed == [1]
    assert formation.members == (0, 2)
    assert formation.epoch > 3, "two attempts failed"
    lost = [event for event in world.events if isinstance(event, MemberLost)]
    assert [(event.member, event.reason) for event in lost] == [(1, "did not join 2 epochs in time")]


async def test_member_that_fails_to_open_a_store_twice_is_killed(make_world: MakeWorld, monkeypatch) -> None:
    monkeypatch.setattr(control_module, "ANSWER_SECONDS", 0.1)
    world = await make_world(3, rendezvous_timeout=0.3)
    world.members[0].deaf_to = (OpenStore, AbortExchanges)
    assert (await world.control.form(2)).members == (1, 2)
    assert world.killed == [0]


async def test_no_member_is_killed_without_evidence(make_world: MakeWorld, monkeypatch) -> None:
    monkeypatch.setattr(control_module, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(control_module, "MAX_ATTEMPTS", 3)
    world = await make_world(2, rendezvous_timeout=0.1)
    for member in world.members.values():
        member.deaf_to = (Join, AbortExchanges)
    with pytest.raises(Unavailable, match="cannot form an epoch: 3 attempts failed"):
        await world.control.form(2)
    assert world.killed == []
    for member in world.members.values():
        member.deaf_to = ()
    assert (await world.control.form(5)).members == (0, 1)


async def test_later_groups_get_more_time_if_the_first_one_was_slow() -> None:
    world = World(2, rendezvous_timeout=0.1)
    member, late = world.members[1], Ready(1, "cpu", "float32", 4, 64)
    member.deaf_to = (Join,)
    starting = asyncio.create_task(world.control.start(1))
    for epoch, forming in ((1, starting), (2, None)):
        forming = forming or asyncio.create_task(world.control.form(2))
        await until(lambda epoch=epoch: [join.epoch for join in member.joins][-1:] == [epoch])
        await asyncio.sleep(1.5 if epoch == 1 else 0.3)
        await member.send(replace(late, epoch=epoch))
        assert (await forming).epoch == epoch, "at the first attempt"
    for member in world.members.values():
        await member.close()
    await world.control.close()


async def test_new_member_that_cannot_join_does_not_block_the_others(make_world: MakeWorld) -> None:
    world = await make_world(2, rendezvous_timeout=0.3)
    await world.add(deaf_to=(Join,))  # it reaches no other member, and reports that at the abort
    formation = await world.control.form(2)
    assert (formation.members, world.killed) == ((0, 1), [2])
    lost = [event for event in world.events if isinstance(event, MemberLost)]
    assert [(event.member, event.reason) for event in lost] == [(2, "every epoch with it failed to form")]
    await world.check(formation.epoch, 0, 1)


async def test_member_with_its_own_join_error_is_lost(make_world: MakeWorld) -> None:
    world = await make_world(2)
    world.members[1].deaf_to = (Join,)
    forming = asyncio.create_task(world.control.form(2))
    await until(lambda: len(world.members[1].joins) == 2)
    await world.members[1].send(Died(1, "no memory"))
    assert (await forming).members == (0,)


async def test_loss_of_all_members_is_reported(make_world: MakeWorld) -> None:
    world = await make_world(2)
    for member in (0, 1):
        world.control.on_process_exit(member, "vanished")
    await world.control.group.wait_ended()
    with pytest.raises(RankLost, match="rank 0 was lost: vanished"):
        await world.control.form(2)
    number, invitation = world.control.registry.invite()
    forming = asyncio.create_task(world.control.form(2))
    await asyncio.sleep(0)
    world.members[number] = ScriptedMember(invitation, number)
    await world.control.registry.admit(number)
    assert (await forming).members == (2,)


async def test_messages_of_another_epoch_are_ignored(make_world: MakeWorld) -> None:
    world = await make_world(3)
    world.control.on_process_exit(0, "vanished")
    await world.control.group.wait_ended()
    await world.control.form(2)
    old: list[StoreOpened | Ready] = [Ready(2, "cpu", "float32", 4, 64, epoch=epoch) for epoch in (0, 1, 2, 3)]
    old += [StoreOpened(1, epoch, 5) for epoch in (1, 2, 3)] + [StoreOpened(2, 2, 5)]
    for message in (*old, GroupFailure(2, 3, 1, "a lie"), StepResult(2, 1, {})):
        await world.members[message.member if not isinstance(message, StepResult) else 2].send(message)
    await until(lambda: world.control.num_ignored == len(old) + 2)
    await world.members[2].send(GroupFailure(2, 1, 7, "late", blamed=0))  # correct, but of an earlier epoch
    await world.members[1].send(StepResult(1, 1, {0: (Token(666),)}))
    await world.check(2, 1, 2)
    assert world.control.num_ignored == len(old) + 2
    assert not world.control.group.is_suspected
