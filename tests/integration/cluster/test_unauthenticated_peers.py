"""The control channel with unauthorized peers: unauthenticated connections, and ranks that impersonate others."""

import asyncio
import gc
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from coordinator.cluster import control_socket, member_auth
from coordinator.cluster.rank_manager import RankManager
from longleaf.config import EngineConfig
from longleaf.errors import RankLost
from longleaf.rank_protocol.encoding import FromRank, decode_to_rank, encode
from longleaf.rank_protocol.group_messages import GroupFailure, Join, OpenStore, Ready, StoreOpened
from longleaf.rank_protocol.member_messages import Died, Heartbeat, Hello, Load, Loaded, Stop
from longleaf.rank_protocol.rank_spec import ConnectInfo
from longleaf.rank_protocol.snapshots import Fetched, Saved
from longleaf.rank_protocol.step import Decode, StepPlan, StepResult
from longleaf.sampling import Token
from workers.control import connect

pytestmark = pytest.mark.timeout(60)
Socket = zmq.Socket[bytes]

PLAN = StepPlan(1, 1, Decode(()))
LIES: tuple[FromRank, ...] = (
    Hello(7, "node", "127.0.0.1", 1),
    Hello(-1, "node", "127.0.0.1", 1),
    Heartbeat(9),
    Ready(7, "cpu", "float32", 4, 64),
    Died(7, "a lie"),
    Hello(0, "node", "6.6.6.6", 1),
    Ready(0, "cpu", "float32", 666, 64),
    Died(0, "a lie"),
    Heartbeat(0),
    GroupFailure(0, 1, 1, "a lie"),
    StepResult(1, 1, {1: (Token(666),)}),
    Saved(0, 1, 666, "a lie"),
    Fetched(0, 1),
)
"""Messages that rank 1 may not send: they impersonate other ranks."""


@pytest.fixture
def context() -> Iterator["zmq.Context[Socket]"]:
    context: zmq.Context[Socket] = zmq.Context()
    yield context
    context.destroy(linger=0)


CONFIG = EngineConfig(model="none", world_size=2, start_timeout=40.0)


@pytest.fixture
async def control() -> AsyncIterator[RankManager]:
    control = RankManager(CONFIG)
    yield control
    await control.close()


def introduce(context: "zmq.Context[Socket]", control: RankManager, rank: int) -> Socket:
    """The connection of a ready rank."""
    invitation = control.invitations[rank]
    connection = connect(context, invitation, invitation.commands_id)
    connection.send(encode(Hello(rank, "node", "127.0.0.1", 1)))
    return connection


def form(ranks: Sequence[Socket]) -> None:
    """The ranks' answers to the requests to load the model and to join the first epoch."""
    for rank, connection in enumerate(ranks):
        assert decode_to_rank(connection.recv()) == Load()
        connection.send(encode(Loaded(rank)))
    assert decode_to_rank(ranks[0].recv()) == OpenStore(1)
    ranks[0].send(encode(StoreOpened(0, 1, 1)))
    for rank, connection in enumerate(ranks):
        assert isinstance(decode_to_rank(connection.recv()), Join)
        connection.send(encode(Ready(rank, "cpu", "float32", 4, 64, epoch=1)))


async def until(condition: Callable[[], object]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(0.001)


async def check_service(control: RankManager, ranks: Sequence[Socket]) -> None:
    """Messages of the ranks arrive, no other peer is accepted, and rank 0 answers a step."""
    formation, _ = await asyncio.gather(control.start(1), asyncio.to_thread(form, ranks))
    assert [ready.num_blocks for ready in formation.readies] == [4, 4]
    assert [hello.host for hello in control.hellos] == ["127.0.0.1"] * 2
    step = asyncio.ensure_future(control.group.step(PLAN))
    assert decode_to_rank(await asyncio.to_thread(ranks[0].recv)) == PLAN
    ranks[0].send(encode(StepResult(1, 1, {1: (Token(5),)})))
    assert (await step).tokens == {1: (Token(5),)}


async def test_channel_binds_one_address_of_either_family(context) -> None:
    control = RankManager(CONFIG, "::1")
    assert re.fullmatch(r"tcp://\[::1\]:\d+", control.address)
    ranks = [introduce(context, control, rank) for rank in range(2)]
    await check_service(control, ranks)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(control.address.rpartition(":")[2])))
    await control.close()


def peer_without_a_key(context: "zmq.Context[Socket]", control: RankManager) -> Socket:
    connection = context.socket(zmq.DEALER)
    connection.setsockopt(zmq.IDENTITY, b"rank-0")
    connection.setsockopt(zmq.LINGER, 0)  # unsent messages would delay the end of the test
    connection.connect(control.address)
    return connection


def peer_with_a_wrong_key(context: "zmq.Context[Socket]", control: RankManager) -> Socket:
    """Uses the correct name with an invalid secret key."""
    public, secret = zmq.curve_keypair()
    invitation = msgspec.structs.replace(control.invitations[0], public_key=public, secret_key=secret)
    return connect(context, invitation, control.invitations[0].commands_id)


def peer_with_a_stolen_name(context: "zmq.Context[Socket]", control: RankManager) -> Socket:
    """It claims to be rank 0 by its public key, whose secret it does not have."""
    invitation = msgspec.structs.replace(control.invitations[0], secret_key=zmq.curve_keypair()[1])
    return connect(context, invitation, invitation.commands_id)


@pytest.mark.parametrize("enter", [peer_without_a_key, peer_with_a_wrong_key, peer_with_a_stolen_name])
async def test_unauthenticated_peer_is_refused_and_counted(context, control: RankManager, caplog, enter) -> None:
    intruder = enter(context, control)
    for message in (*LIES, StepResult(1, 1, {1: (Token(666),)})):
        intruder.send(encode(message))
    intruder.send(b"\xff" * 1000)
    await until(lambda: control.num_refused)
    ranks = [introduce(context, control, rank) for rank in range(2)]
    await check_service(control, ranks)
    assert control.num_ignored == 0, "none of its data was read"
    assert intruder.poll(0) == 0, "it received nothing"
    assert "rejected unauthenticated connections to the control channel: 1 so far" in caplog.text


async def test_lost_rank_is_not_counted_as_unauthenticated(context, control: RankManager) -> None:
    """Even if another peer connects before the rank has authenticated."""
    ranks = [introduce(context, control, rank) for rank in range(2)]
    await check_service(control, ranks)
    for epoch in range(2, 6):
        ranks[1].close(linger=0)
        control.on_process_exit(epoch - 1, "vanished")
        number, invitation = control.registry.invite()
        ranks[1] = connect(context, invitation, invitation.commands_id)
        ranks[1].send(encode(Hello(number, "node", "127.0.0.1", 1)))
        await until(lambda expected=number: control.hellos[-1].member == expected)
    assert control.num_refused == 0
    intruder = peer_with_a_wrong_key(context, control)
    await until(lambda: control.num_refused)
    intruder.close()


def is_ended(connection: socket.socket) -> bool:
    """Waits until the other end closes the connection."""
    connection.settimeout(40)
    with suppress(ConnectionResetError):
        while connection.recv(1000):
            pass
    return True


async def test_silent_and_malformed_connections_are_closed(context, monkeypatch) -> None:
    monkeypatch.setattr(member_auth, "HANDSHAKE_MILLISECONDS", 1000)
    control = RankManager(CONFIG)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    endless = b"\x06" + (1 << 40).to_bytes(8, "big") + bytes(1000)
    rubbish = (b"", b"\0", b"GET / HTTP/1.1\r\n\r\n" * 9, greeting, greeting + endless)
    host, port = control.address.removeprefix("tcp://").split(":")
    intruders = [socket.create_connection((host, int(port))) for _ in rubbish]
    for intruder, output in zip(intruders, rubbish, strict=True):
        intruder.sendall(output)
    ranks = [introduce(context, control, rank) for rank in range(2)]
    await check_service(control, ranks)
    assert await asyncio.to_thread(lambda: all(map(is_ended, intruders)))
    await until(lambda: control.num_refused >= len(rubbish))
    for intruder in intruders:
        intruder.close()
    await control.close()


async def test_rank_may_send_only_its_own_messages(context, control: RankManager, caplog) -> None:
    ranks = [introduce(context, control, rank) for rank in range(2)]
    for lie in LIES:
        ranks[1].send(encode(lie))
    rubbish = [b"", b"\xff", b"\x81\xa4type\xa1\xff", encode(Stop()), b"\x91" * 100_000]
    rubbish += [encode(Hello(1, "node", "6.6.6.6", 1)), encode(Loaded(1)), encode(StoreOpened(1, 1, 1))]
    rubbish += [encode(Ready(1, "cpu", "float32", 4, 64, epoch=1)), encode(GroupFailure(1, 1, 1, "a lie"))]
    rubbish += [encode(Saved(1, 1)), encode(Fetched(1, 1))]
    rubbish += [encode(Heartbeat(1)), encode(Died(1, "a lie", blamed=7)), encode(Died(1, "a lie", blamed=-1))]
    for message in rubbish:
        ranks[1].send(message)
    ranks[1].send_multipart([b"two", encode(Hello(1, "node", "127.0.0.1", 1))])
    await until(lambda: control.num_ignored == len(LIES) + len(rubbish) + 1)
    await check_service(control, ranks)
    lines = [record.message for record in caplog.records if "ignored invalid messages from members" in record.message]
    assert len(lines) == 5, "at 1, 2, 4, 8 and 16"
    assert (
        lines[0]
        == "ignored invalid messages from members: 1 so far; latest reason: invalid message from member 1: Hello for 7"
    )


@pytest.mark.parametrize("name", ["commands_id", "heartbeat_id"])
async def test_rank_cannot_take_over_the_connection_of_another(context, control: RankManager, name: str) -> None:
    """An impostor would have to guess the other's public key, and even then its own key identifies it."""
    thief = connect(context, control.invitations[1], getattr(control.invitations[0], name))
    for lie in LIES:
        thief.send(encode(lie))
    thief.send(encode(Hello(1, "node", "6.6.6.6", 1)))
    await until(lambda: control.num_ignored == len(LIES) + 1)
    thief.close(linger=0)
    await asyncio.sleep(0)
    assert control.hellos == ()


async def test_second_connection_with_the_same_name_takes_over_nothing(context, control: RankManager) -> None:
    ranks = [introduce(context, control, rank) for rank in range(2)]
    await check_service(control, ranks)
    replayed = connect(context, control.invitations[1], control.invitations[0].commands_id)
    replayed.send(encode(Died(1, "from the second connection")))
    step = asyncio.ensure_future(control.group.step(StepPlan(1, 2, Decode(()))))
    assert decode_to_rank(await asyncio.to_thread(ranks[0].recv)) == StepPlan(1, 2, Decode(()))
    ranks[0].send(encode(StepResult(1, 2, {1: (Token(6),)})))
    assert (await step).tokens == {1: (Token(6),)}
    assert replayed.poll(0) == 0


async def test_lost_member_is_refused_without_a_warning(context, control: RankManager, caplog) -> None:
    ranks = [introduce(context, control, rank) for rank in range(2)]
    await check_service(control, ranks)
    control.on_process_exit(1, "vanished")
    assert str((await control.group.wait_ended()).error) == "rank 1 was lost: vanished"
    ranks[1].send(encode(Died(1, "too late")))
    await until(lambda: control.num_refused == 1)
    again = connect(context, control.invitations[1], b"again")
    again.send(encode(Died(1, "too late")))
    await until(lambda: control.num_refused >= 2)
    assert [hello.member for hello in control.hellos] == [0]
    assert control.num_ignored == 0
    assert "unauthenticated" not in caplog.text
    peer_with_a_wrong_key(context, control).send(b"")
    await until(lambda: "unauthenticated connections to the control channel: 1 so far" in caplog.text)


async def test_abandoned_member_is_refused_before_the_next_epoch(context) -> None:
    """While its process still runs, with valid keys."""
    is_gone = asyncio.Event()

    async def kill(member: int) -> None:
        await is_gone.wait()

    control = RankManager(CONFIG, kill=kill)
    ranks = [introduce(context, control, rank) for rank in range(2)]
    await check_service(control, ranks)
    assert decode_to_rank(ranks[1].recv()) == PLAN
    control.registry.kill(1, "was abandoned")
    ranks[1].send(encode(Died(1, "exited voluntarily")))
    await until(lambda: control.num_refused == 1)
    again = connect(context, control.invitations[1], control.invitations[1].commands_id)
    again.send(encode(Died(1, "exited voluntarily")))
    await until(lambda: control.num_refused == 2)
    forming = asyncio.create_task(control.form(2))
    is_gone.set()
    assert isinstance(decode_to_rank(await asyncio.to_thread(ranks[0].recv)), Join)
    ranks[0].send(encode(Ready(0, "cpu", "float32", 4, 64, epoch=2)))
    assert (await forming).members == (0,)
    assert [loss.reason for loss in control.losses] == ["was abandoned"]
    assert (ranks[1].poll(0), again.poll(0)) == (0, 0), "it received nothing"
    assert (control.num_refused, control.num_ignored) == (2, 0)
    await control.close()


async def test_flooding_peer_does_not_starve_other_messages(context, control: RankManager) -> None:
    connection = introduce(context, control, 1)
    await until(lambda: control.hellos)
    control.registry.remove_lost(1, "vanished")
    num_messages, num_turns = 1500, 0
    for _ in range(num_messages):
        connection.send(encode(Heartbeat(1)))
    while control.num_refused < num_messages:
        await asyncio.sleep(0)
        num_turns += 1
    assert num_turns >= num_messages // control_socket.MAX_AT_ONCE


async def test_message_too_large_for_any_rank_is_dropped(context, control: RankManager) -> None:
    ranks = [introduce(context, control, rank) for rank in range(2)]
    await check_service(control, ranks)
    ranks[1].send(encode(Died(1, "x" * (8 << 20))))
    ranks[0].send(encode(Died(0, "the last word")))
    error = (await control.group.wait_ended()).error
    assert isinstance(error, RankLost)
    assert (error.rank, error.reason) == (0, "the last word")


async def test_keys_are_not_disclosed(context, control: RankManager, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    ranks = [introduce(context, control, rank) for rank in range(2)]
    await check_service(control, ranks)
    peer_with_a_wrong_key(context, control)
    await until(lambda: control.num_refused)
    for invitation in control.invitations:
        assert isinstance(invitation, ConnectInfo)
        for secret in (invitation.secret_key.decode(), control._channel._members._secret_key.decode()):
            assert secret not in f"{invitation!r} {invitation} {invitation.__rich_repr__()} {caplog.text}"


async def test_closed_channel_leaves_no_resources(context) -> None:
    def threads() -> set[str]:
        found = set[str]()
        for task in Path("/proc/self/task").iterdir():
            with suppress(FileNotFoundError):  # it has just exited
                found |= {task.name} if "ZMQ" in (task / "comm").read_text() else set()
        return found

    def left() -> tuple[int, int]:
        """Threads of ZMQ and open files of this process."""
        return len(threads()), len(list(Path("/proc/self/fd").iterdir()))

    gc.collect()  # of earlier tests
    previous = threads()
    intruder = context.socket(zmq.DEALER)  # this context's threads exist from here on
    intruder.setsockopt(zmq.LINGER, 0)
    await until(lambda: len(threads() - previous) == 2)  # they set their names shortly after their start
    before = left()
    for _ in range(3):
        control = RankManager(CONFIG)
        intruder.connect(control.address)
        await until(lambda control=control: control.num_refused)
        await control.close()
        intruder.disconnect(control.address)
    await until(lambda: all(now <= then for now, then in zip(left(), before, strict=True)))


def test_unclosed_socket_does_not_block_the_garbage_collector() -> None:
    """A test or a service that fails before it closes the socket must end."""

    async def leave() -> None:
        unclosed = control_socket.ControlSocket(EngineConfig(model="m"), "127.0.0.1", lambda *_: None)
        vars(unclosed)["itself"] = unclosed  # a cycle, so that the collector finds it

    asyncio.run(leave())
    gc.collect()
