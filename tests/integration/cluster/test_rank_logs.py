"""Log lines of ranks in the coordinator's log, over the real channel and from real processes."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from threading import Thread

import pytest

from coordinator.cluster.rank_manager import RankManager
from coordinator.engine.engine import Engine
from coordinator.engine_messages import Prompt, Tokens
from longleaf.config import EngineConfig
from longleaf.rank_protocol.encoding import encode
from longleaf.rank_protocol.group_messages import Join, Ready
from longleaf.rank_protocol.log_messages import Logged, LogRecord
from longleaf.rank_protocol.rank_spec import RankSpec
from longleaf.rank_protocol.step import StepPlan
from longleaf.sampling import SamplingParams
from tests.integration.cluster.test_unauthenticated_peers import until
from tests.support.fakes.workers import EchoMain, EchoRank, RankFault
from tests.support.members import ScriptedMember
from tests.support.running import WatchedFleet, running_on
from workers.__main__ import live
from workers.control import serve
from workers.logs import MAX_BUFFERED_RECORDS
from workers.rank_runtime import StepHandle

pytestmark = pytest.mark.timeout(60)
CONFIG = EngineConfig(model="none", chunk_size=64, block_size=16, replicate_below=8)
library = logging.getLogger("longleaf.comm.shared_memory")
ours = logging.getLogger("workers.rank")


def rank_records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "coordinator.cluster"]


def texts(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in rank_records(caplog)]


@asynccontextmanager
async def engine_of(world_size: int, main: Callable[[RankSpec], None]) -> AsyncIterator[Engine]:
    config = EngineConfig(model="none", chunk_size=64, block_size=16, replicate_below=8, world_size=world_size)
    fleet = WatchedFleet(main)
    async with running_on(fleet, RankManager(config, kill=fleet.kill), config) as found:
        yield found.engine


async def answer(engine: Engine, max_tokens: int) -> list[int]:
    stream = engine.submit(Prompt(context=None, token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=max_tokens)))
    return [token async for event in stream if isinstance(event, Tokens) for token in event.token_ids]


async def test_error_that_ends_an_epoch_is_logged_with_its_traceback(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async with engine_of(2, EchoMain(RankFault(rank=1, kind="raise", step=20))) as engine:
        assert len(await answer(engine, 200)) == 200
        await until(lambda: rank_records(caplog))
        [node] = {worker.node for worker in engine.cluster().workers}
    [record] = rank_records(caplog)
    assert (record.levelno, record.rank, record.node) == (logging.WARNING, 1, node)  # type: ignore[attr-defined]
    first, *traceback = record.getMessage().splitlines()
    assert first == "rank 1: epoch 1 failed for member 1: RuntimeError: failed on request"
    assert (traceback[0], traceback[-1]) == ("Traceback (most recent call last):", "RuntimeError: failed on request")
    assert "failed on request" not in capfd.readouterr().err, "logged only once"


async def test_last_log_line_of_a_failing_member_is_forwarded(caplog: pytest.LogCaptureFixture) -> None:
    control, fleet = RankManager(CONFIG), WatchedFleet(EchoMain(RankFault(rank=0, kind="raise", step=0)))
    await fleet.launch(CONFIG, control.invitations, control.on_process_exit)
    with pytest.raises(Exception, match="failed on request"):
        await control.start(1)
    [record] = rank_records(caplog)
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith("rank 0: member 0 failed\nTraceback")
    await control.close()
    await fleet.shutdown()


class Noisy(EchoRank):
    """Logs during its start."""

    def load(self, parts: Sequence[int] = ()) -> None:
        library.warning("shared memory is full (slower)")

    def join(self, join: Join) -> Ready:
        library.warning("epoch %d is slow", join.epoch)
        return super().join(join)


@asynccontextmanager
async def alive(control: RankManager, make_rank: Callable[[RankSpec], EchoRank]) -> AsyncIterator[None]:
    """The first member runs as this rank, on a thread."""
    place = {"host": "127.0.0.1", "node": "here", "num_ranks_here": 1, "gpu": None}
    spec = RankSpec(member=0, config=CONFIG, invitation=control.invitations[0], **place)
    thread = Thread(target=serve, args=(spec, make_rank))
    thread.start()
    try:
        yield
    finally:
        await control.close()
        await asyncio.to_thread(thread.join)


async def test_startup_output_is_not_logged_twice(caplog: pytest.LogCaptureFixture) -> None:
    control = RankManager(CONFIG)
    async with alive(control, Noisy):
        formation = await control.start(1)
        assert formation.readies[0].notes == ("shared memory is full (slower)", "epoch 1 is slow")
        [member] = control.registry
        await control.form(2)
        await until(lambda: "rank 0: epoch 2 is slow" in texts(caplog))
        num_heartbeats = member.num_heartbeats
        await until(lambda: member.num_heartbeats > num_heartbeats + 1)
    assert texts(caplog) == ["rank 0: epoch 2 is slow"]


class MadMain:
    """Entry point of a process that logs a hundred lines in each step."""

    def __call__(self, spec: RankSpec) -> None:
        live(spec, MadRank)


class MadRank(EchoRank):
    def start(self, plan: StepPlan) -> StepHandle:
        for _ in range(100):
            ours.error("mad")
        return super().start(plan)


async def test_rank_that_floods_its_log_keeps_executing_steps(caplog: pytest.LogCaptureFixture) -> None:
    async with engine_of(1, MadMain()) as engine:
        assert len(await answer(engine, 200)) == 200
        await until(lambda: len(rank_records(caplog)) >= MAX_BUFFERED_RECORDS)
        assert len(await answer(engine, 20)) == 20
        await until(lambda: set(texts(caplog)) != {"rank 0: mad"})
        assert engine.cluster().epoch == 1
    num_mad = texts(caplog).count("rank 0: mad")  # more if steps are slow, because the limit is per second
    others = [text for text in texts(caplog) if text != "rank 0: mad"]
    counts = [
        int(text.removeprefix("rank 0: ").removesuffix(" log records dropped: too many per second")) for text in others
    ]
    assert 0 < sum(counts) <= 220 * 100 - num_mad


async def test_member_logs_over_both_connections_only_for_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    control = RankManager(EngineConfig(model="none", world_size=2))
    members = [ScriptedMember(invitation, number) for number, invitation in enumerate(control.invitations)]
    await control.start(1)
    await members[1].send(Logged(1, (LogRecord(30, "beside the steps"),)))
    await members[1]._heartbeat_socket.send(encode(Logged(1, (LogRecord(30, "with the heartbeat"),))))
    await members[1].send(Logged(0, (LogRecord(30, "a lie"),)))
    await members[1]._heartbeat_socket.send(encode(Logged(1, (LogRecord(10, "too little"),))))
    await until(lambda: control.num_ignored == 2 and len(rank_records(caplog)) == 2)
    assert sorted(texts(caplog)) == ["rank 1: beside the steps", "rank 1: with the heartbeat"]
    assert {(record.rank, record.node, record.epoch) for record in rank_records(caplog)} == {(1, "node", 1)}  # type: ignore[attr-defined]
    for member in members:
        await member.close()
    await control.close()
