"""Snapshot orders to members beside the steps: each member gets its own orders, and each order its own outcome."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import pytest

from coordinator.cluster.local_fleet import LocalFleet
from coordinator.cluster.rank_manager import RankManager
from longleaf.config import EngineConfig
from longleaf.errors import DataLoss, GroupFailed, RankLost, StorageUnavailable, Unavailable
from longleaf.rank_protocol.encoding import ToRank
from longleaf.rank_protocol.group_messages import KvLayout
from longleaf.rank_protocol.snapshots import Discard, Failure, Fetch, Fetched, Save, Saved
from longleaf.rank_protocol.step import Decode, Prefill, Restore, RestorePortion, Row, SamplingTerms, StepPlan
from longleaf.runs import Run
from longleaf.sampling import SamplingParams, Token
from tests.support.fakes.echo_model import echo_token
from tests.support.fakes.workers import EchoMain
from tests.support.members import ScriptedMember

pytestmark = pytest.mark.timeout(60)
RUNS = (Run(0, 0, 6, (3, 1)),)
SAVE, FETCH = Save(4, "contexts/1/a", 0, RUNS), Fetch(4, "contexts/1/a", 10, "abc", ((0, 8),))


class World:
    def __init__(self) -> None:
        self.control = RankManager(EngineConfig(model="none", world_size=2))
        invitations = enumerate(self.control.invitations)
        self.members = [ScriptedMember(invitation, number) for number, invitation in invitations]

    async def hear(self, member: int, kind: type[ToRank]) -> ToRank:
        while not isinstance(message := await self.members[member].receive(), kind):
            pass
        return message


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    await made.control.start(1)
    yield made
    for member in made.members:
        await member.close()
    await made.control.close()


async def fails(work: Awaitable[object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as raised:
        await work
    assert raised.type is kind


async def test_each_result_reaches_its_requester(world: World) -> None:
    """In any order; one ticket may save and fetch on one member or several."""
    saves = [asyncio.create_task(world.control.save(member, SAVE)) for member in (0, 1)]
    fetching = asyncio.create_task(world.control.fetch(1, FETCH))
    assert [await world.hear(0, Save), await world.hear(1, Save), await world.hear(1, Fetch)] == [SAVE, SAVE, FETCH]
    await world.members[1].tell(Fetched(1, 5))
    await world.members[1].tell(Fetched(1, 4))
    await fetching
    assert not any(save.done() for save in saves)
    for member in (1, 0):
        await world.members[member].tell(Saved(member, 4, 100 + member, "digest"))
        assert await saves[member] == Saved(member, 4, 100 + member, "digest")
    await world.control.discard(1, [4, 5])
    assert await world.hear(1, Discard) == Discard((4, 5))
    assert world.control.num_ignored == 0


@pytest.mark.parametrize(
    ("outage", "kind"), [("unavailable", StorageUnavailable), ("damaged", DataLoss), ("dropped", Unavailable)]
)
async def test_failures_are_raised_with_their_type(world: World, outage, kind) -> None:
    for work, outcome in [(world.control.save(0, SAVE), Saved), (world.control.fetch(0, FETCH), Fetched)]:
        requested = asyncio.create_task(work)
        await world.hear(0, Save | Fetch)
        await world.members[0].tell(outcome(0, 4, failure=Failure(outage, "why")))
        await fails(requested, kind, "contexts/1/a.*why")


async def test_lost_member_returns_no_results(world: World) -> None:
    requested = [asyncio.create_task(world.control.save(member, SAVE)) for member in (0, 1)]
    requested.append(asyncio.create_task(world.control.fetch(1, FETCH)))
    await world.hear(1, Fetch)
    world.control.on_process_exit(1, "was killed by signal 9")
    for work in requested[1:]:
        await fails(work, RankLost, "rank 1 was lost: was killed by signal 9")
    await fails(world.control.fetch(1, FETCH), RankLost, "is no longer a member")
    assert not requested[0].done()
    await world.members[0].tell(Saved(0, 4))
    assert await requested[0] == Saved(0, 4)


async def test_requests_survive_an_epoch_change(world: World) -> None:
    requested = asyncio.create_task(world.control.fetch(0, FETCH))
    await world.hear(0, Fetch)
    world.control.on_process_exit(1, "was killed by signal 9")
    assert (await world.control.form(2)).members == (0,)
    await world.members[0].tell(Fetched(0, 4))
    await requested


async def test_requester_may_cancel(world: World) -> None:
    requested = asyncio.create_task(world.control.save(0, SAVE))
    await world.hear(0, Save)
    requested.cancel()
    with pytest.raises(asyncio.CancelledError):
        await requested
    again = asyncio.create_task(world.control.fetch(0, FETCH))
    await world.hear(0, Fetch)
    await world.members[0].tell(Saved(0, 4))
    await world.members[0].tell(Fetched(0, 4))
    await again


async def test_ticket_is_used_once_at_a_time(world: World) -> None:
    requested = asyncio.create_task(world.control.save(0, SAVE))
    await world.hear(0, Save)
    with pytest.raises(ValueError, match="ticket 4 of member 0 is in use"):
        await world.control.save(0, SAVE)
    await world.members[0].tell(Saved(0, 4))
    assert await requested == Saved(0, 4)


async def test_requests_of_many_runs_arrive(world: World) -> None:
    runs = tuple(Run(0, 16 * i, 16 * i + 16, (7 * i,)) for i in range(20_000))
    requested = asyncio.create_task(world.control.save(0, Save(1, "p", 0, runs)))
    heard = await world.hear(0, Save)
    assert isinstance(heard, Save)
    assert heard.runs == runs
    await world.members[0].tell(Saved(0, 1))
    await requested


async def test_close_leaves_no_waiting_caller(world: World) -> None:
    requested = asyncio.create_task(world.control.save(0, SAVE))
    await world.hear(0, Save)
    await world.control.close()
    await fails(requested, Unavailable, "the service is stopping")


async def test_members_without_a_model_save_and_restore(tmp_path: Path) -> None:
    """As processes: a member restores data that another member wrote, and only data that it has fetched."""
    config = EngineConfig(model="none", world_size=2, block_size=4, snapshot_url=str(tmp_path))
    fleet = LocalFleet(EchoMain())
    control = RankManager(config, kill=fleet.kill)
    try:
        await fleet.launch(config, control.invitations, control.on_process_exit)
        group = (await control.start(1)).group
        pieces = Run(0, 0, 8, (5, 6)), Run(1, 8, 14, (5, 2))
        await group.step(StepPlan(1, 1, Prefill((3,), 0, tuple(range(14)), pieces)))
        saved = [await control.save(member, Save(7, f"p{member}", 3, (pieces[member],))) for member in (0, 1)]
        for ticket, run in enumerate(pieces):
            found = saved[ticket].num_bytes, saved[ticket].digest
            await control.fetch(1, Fetch(ticket, f"p{ticket}", *found, ((run.start, run.end),)))
        await fails(control.fetch(1, Fetch(2, "p2", 1, "", ())), DataLoss, "p2")
        group = (await control.form(2)).group
        await group.send_layout(KvLayout(2, ()))
        portions = RestorePortion(0, (Run(1, 0, 8, (1, 2)),)), RestorePortion(1, (Run(1, 8, 14, (3, 4)),))
        assert (await group.step(StepPlan(2, 1, Restore(4, 0, portions)))).step == 1
        row = Row(1, (4, 9), 14, (5,), (Run(0, 14, 15, (0,)),), 0, SamplingTerms(SamplingParams()))
        assert (await group.step(StepPlan(2, 2, Decode((row,))))).tokens == {1: (Token(echo_token(5, 0)),)}
        with pytest.raises(GroupFailed, match="what was not fetched is to be restored"):
            await group.step(StepPlan(2, 3, Restore(5, 0, (RestorePortion(0, (Run(0, 0, 8, (7, 8)),)),))))
    finally:
        await control.close()
        await fleet.shutdown()
