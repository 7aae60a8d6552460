"""Processes that die, stop and are replaced, in each kind of fleet, without computation."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from multiprocessing import forkserver

import psutil
import pytest

from coordinator.cluster import fork_server
from coordinator.cluster.local_fleet import LAST_WORD_SECONDS, LocalFleet
from coordinator.cluster.ports import Fleet, MemberEvent, ReplacementAbandoned
from coordinator.cluster.rank_manager import RankManager
from coordinator.cluster.ray_fleet import RayFleet
from coordinator.cluster.replacement_supervisor import ReplacementSupervisor
from longleaf.config import EngineConfig
from longleaf.errors import RankLost, StartError
from longleaf.rank_protocol.rank_spec import RankSpec
from tests.support.fakes.workers import EchoMain
from tests.support.members import MemberActor, MemberMain

pytestmark = pytest.mark.timeout(120)
MakeFleet = Callable[[], Fleet]
FLEETS = [
    pytest.param(lambda: LocalFleet(MemberMain()), id="local"),
    pytest.param(lambda: RayFleet(MemberActor), id="ray", marks=[pytest.mark.ray, pytest.mark.extended]),
]


class World:
    """Members as processes, and their exit codes."""

    def __init__(self, fleet: Fleet, config: EngineConfig) -> None:
        self.fleet = fleet
        self.config = config
        self.control = RankManager(config, kill=fleet.kill)
        self.events: list[MemberEvent] = []
        self.control.registry.subscribe(self.events.append)
        self.supervisor: ReplacementSupervisor | None = None

    def process(self, member: int) -> psutil.Process:
        [pid] = [hello.pid for hello in self.control.hellos if hello.member == member]
        return psutil.Process(pid)

    def keep(self, formation) -> ReplacementSupervisor:
        self.supervisor = ReplacementSupervisor(self.control.registry, self.fleet, self.config, formation.readies)
        return self.supervisor


@asynccontextmanager
async def running(fleet: Fleet, **settings: object) -> AsyncIterator[World]:
    """A world with a launched fleet; all of it is removed afterwards."""
    config = EngineConfig(model="none", **settings)  # type: ignore[arg-type]
    world = World(fleet, config)
    try:
        await fleet.reserve(config)
        await fleet.launch(config, world.control.invitations, world.control.on_process_exit)
        yield world
        processes = [psutil.Process(hello.pid) for hello in world.control.hellos if psutil.pid_exists(hello.pid)]
    finally:
        if world.supervisor is not None:
            await world.supervisor.close()
        await world.control.close()
        await fleet.shutdown()
    assert (await asyncio.to_thread(psutil.wait_procs, processes, timeout=20))[1] == []


@pytest.fixture(autouse=True)
def cluster(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("ray"):
        request.getfixturevalue("ray_cluster")


@pytest.mark.parametrize("make_fleet", FLEETS)
async def test_killed_member_is_replaced_in_its_slot(make_fleet: MakeFleet) -> None:
    async with running(make_fleet(), world_size=3) as world:
        control = world.control
        world.keep(await control.start(1))
        for epoch, (lost, others, member) in enumerate([(1, (0, 2), 3), (0, (2, 3), 4), (3, (2, 4), 5)]):
            world.process(lost).send_signal(signal.SIGKILL)
            loss = await control.group.wait_ended()
            assert isinstance(loss.error, RankLost)
            assert (await control.form(2 * epoch + 2)).members == others
            await control.wait_joinable()
            formation = await control.form(2 * epoch + 3)
            assert set(formation.members) == {*others, member}
            assert len({hello.pid for hello in formation.hellos}) == 3


@pytest.mark.parametrize("make_fleet", FLEETS)
async def test_stopped_member_is_killed_and_replaced(make_fleet: MakeFleet) -> None:
    async with running(make_fleet(), world_size=2, heartbeat_timeout=2.0) as world:
        world.keep(await world.control.start(1))
        stopped = world.process(1)
        stopped.send_signal(signal.SIGSTOP)
        loss = await world.control.group.wait_ended()
        assert "no heartbeat for 2 s" in str(loss.error)
        assert (await world.control.form(2)).members == (0,)
        await world.control.wait_joinable()
        assert (await world.control.form(3)).members == (0, 2)
        await asyncio.to_thread(stopped.wait, 20)  # Ray needs time


@pytest.mark.parametrize("make_fleet", FLEETS)
async def test_fleet_kills_only_its_own_members(make_fleet: MakeFleet) -> None:
    async with running(make_fleet(), world_size=2) as world:
        await world.control.start(1)
        process = world.process(0)
        process.send_signal(signal.SIGSTOP)
        for member in (0, 0, 7):
            await world.fleet.kill(member)
        await asyncio.to_thread(process.wait, 20)
        assert "rank 0 was lost" in str((await world.control.group.wait_ended()).error)
        with pytest.raises(StartError, match="slot"):
            await world.fleet.replace(7, 8, world.control.invitations[0], world.config)


@pytest.mark.parametrize("make_fleet", FLEETS)
async def test_world_survives_the_loss_of_all_but_one_member(make_fleet: MakeFleet) -> None:
    async with running(make_fleet(), world_size=3) as world:
        await world.control.start(1)
        for member in (0, 2):
            world.process(member).send_signal(signal.SIGKILL)
        await world.control.group.wait_ended()
        formation = await world.control.form(2)
        while len(formation.members) > 1:  # the second exit was noticed later
            await world.control.group.wait_ended()
            formation = await world.control.form(formation.epoch + 1)
        assert formation.members == (1,)


async def test_replacement_that_dies_while_loading_is_abandoned() -> None:
    async with running(LocalFleet(MemberMain(num_good=2)), world_size=2) as world:
        world.keep(await world.control.start(1))
        world.process(1).send_signal(signal.SIGKILL)
        abandoned = asyncio.Event()
        world.control.registry.subscribe(
            lambda event: abandoned.set() if isinstance(event, ReplacementAbandoned) else None
        )
        await abandoned.wait()
        assert isinstance(world.events[-1], ReplacementAbandoned)
        assert "latest reason: exited with code 3" in world.events[-1].reason


async def test_slot_survives_a_process_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise BlockingIOError("no process")

    async with running(LocalFleet(MemberMain()), world_size=2) as world:
        await world.control.start(1)
        number, invitation = world.control.registry.invite()
        with monkeypatch.context() as patch:
            patch.setattr(world.fleet, "_spawn", fail)
            with pytest.raises(BlockingIOError):
                await world.fleet.replace(1, number, invitation, world.config)
        await world.fleet.replace(1, number, invitation, world.config)
        await world.control.registry.admit(number)
        assert (await world.control.form(2)).members == (0, number)


async def test_replacements_leak_no_descriptor() -> None:
    async with running(LocalFleet(MemberMain()), world_size=2, max_losses_per_minute=100) as world:
        world.keep(await world.control.start(1))
        counts: list[int] = []
        for number in range(1, 7):
            world.process(number).send_signal(signal.SIGKILL)
            await world.control.group.wait_ended()
            await world.control.wait_joinable()
            assert (await world.control.form(number + 1)).members == (0, number + 1)
            counts.append(psutil.Process().num_fds())
        assert max(counts[2:]) <= counts[1]


def leave(spec: RankSpec) -> None:
    raise SystemExit(3)


async def test_last_message_of_a_process_is_handled_before_its_exit() -> None:
    """It sends the reason for its exit, which may arrive after the exit is noticed."""
    loop, config, fleet = asyncio.get_running_loop(), EngineConfig(model="none", world_size=1), LocalFleet(leave)
    control, reported = RankManager(config), loop.create_future()
    try:
        await fleet.launch(config, control.invitations, lambda *death: reported.set_result((loop.time(), *death)))
        place = fleet._places[0]
        await place.has_ended.wait()
        ended = loop.time()
        time, member, reason = await reported
        assert (member, reason) == (0, "exited with code 3")
        assert time >= ended + LAST_WORD_SECONDS / 2
    finally:
        await fleet.shutdown()
        await control.close()


async def test_member_started_during_shutdown_is_ended() -> None:
    fleet, config = LocalFleet(MemberMain()), EngineConfig(model="none", world_size=3)
    control = RankManager(config)
    launching = asyncio.create_task(fleet.launch(config, control.invitations, control.on_process_exit))
    await asyncio.sleep(0)
    await fleet.shutdown()
    await launching
    assert [child for child in multiprocessing.active_children() if child.name.startswith("rank-")] == []
    await control.close()


async def test_shutdown_during_fork_server_import_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = forkserver.ForkServer()  # a private one
    monkeypatch.setattr(forkserver, "_forkserver", server)
    monkeypatch.setattr(forkserver, "connect_to_new_process", server.connect_to_new_process)
    server.ensure_running()
    os.kill(server._forkserver_pid, signal.SIGSTOP)  # it does not answer, like one that imports
    fleet, config = LocalFleet(MemberMain(), kill_server=fork_server.kill), EngineConfig(model="none", world_size=2)
    control = RankManager(config)
    launching = asyncio.create_task(fleet.launch(config, control.invitations, control.on_process_exit))
    while not fleet._spawning.locked():  # noqa: ASYNC110  # it is a lock of threads
        await asyncio.sleep(0)
    await fleet.shutdown()
    await launching
    await control.close()
    assert caplog.messages == []


async def test_ranks_exit_with_their_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Including stopped (SIGSTOP) ranks. Replacements are spawned."""
    server = forkserver.ForkServer()  # a private one
    monkeypatch.setattr(forkserver, "connect_to_new_process", server.connect_to_new_process)
    async with running(LocalFleet(EchoMain()), world_size=2) as world:
        await world.control.start(1)
        ranks = [world.process(member) for member in (0, 1)]
        ranks[1].send_signal(signal.SIGSTOP)
        os.kill(server._forkserver_pid, signal.SIGKILL)
        assert (await asyncio.to_thread(psutil.wait_procs, ranks, timeout=20))[1] == []
        number, invitation = world.control.registry.invite()
        await world.fleet.replace(1, number, invitation, world.config)
        assert psutil.Process(world.fleet._places[number].process.pid).ppid() == os.getpid()
