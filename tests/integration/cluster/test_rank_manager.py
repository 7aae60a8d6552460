"""Engine, control channel and real processes, with ranks that compute nothing."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from coordinator.cluster.local_fleet import LocalFleet
from coordinator.cluster.rank_manager import RankManager
from coordinator.engine.engine import Engine
from coordinator.engine.stream import Stream
from coordinator.engine_messages import Admitted, DocumentPrompt, Ended, Prompt, Tokens
from longleaf.config import EngineConfig
from longleaf.errors import RankLost, StartError, Unavailable
from longleaf.rank_protocol.group_messages import Join, KvLayout
from longleaf.rank_protocol.member_messages import Load
from longleaf.rank_protocol.rank_spec import RankSpec
from longleaf.rank_protocol.step import Decode, Prefill, StepPlan, StepResult
from longleaf.runs import Run
from longleaf.sampling import SamplingParams, Token
from longleaf.types import Progress
from tests.support.fakes.echo_model import echo_token
from tests.support.fakes.workers import EchoMain, EchoRank, RankFault
from tests.support.gated import comes_to
from tests.support.members import ScriptedMember
from tests.support.running import WatchedFleet, running_on
from workers.control import serve
from workers.logs import capturing_logs

pytestmark = pytest.mark.timeout(60)


class Service:
    def __init__(self, engine: Engine, loop: asyncio.Task[None], pids: list[int]) -> None:
        self.engine = engine
        self.loop = loop
        self.pids = pids


@asynccontextmanager
async def serving(config: EngineConfig, fault: RankFault | None = None) -> AsyncIterator[Service]:
    """A running engine; checks that no process remains."""
    fleet = WatchedFleet(EchoMain(fault))
    control = RankManager(config, kill=fleet.kill)
    try:
        async with running_on(fleet, control, config) as found:
            yield Service(found.engine, found.loop, [hello.pid for hello in control.hellos])
    finally:
        assert not [p for p in fleet.children if p.is_running()]


def config(**changes: object) -> EngineConfig:
    settings: dict[str, object] = {"model": "none", "chunk_size": 64, "block_size": 16, "replicate_below": 8}
    return EngineConfig(**(settings | changes))  # type: ignore[arg-type]


def prompt(count: int, max_tokens: int, context: str | None = None) -> Prompt:
    return Prompt(context=context, token_ids=tuple(range(count)), sampling=SamplingParams(max_tokens=max_tokens))


def expected(last: int, count: int) -> list[int]:
    answer: list[int] = []
    for index in range(count):
        last = echo_token(last, index)
        answer.append(last)
    return answer


async def answer(stream: Stream) -> list[int]:
    return [token async for event in stream if isinstance(event, Tokens) for token in event.token_ids]


@pytest.mark.parametrize("world_size", [1, 3])
async def test_ingest_and_generate(world_size: int) -> None:
    async with serving(config(world_size=world_size)) as service:
        engine = service.engine
        document = list(range(200))
        events = [event async for event in engine.ingest(DocumentPrompt(context="doc", token_ids=document))]
        assert events[-1] == Progress(200, 200)
        events = [event async for event in engine.submit(prompt(40, 20, "doc"))]
        assert events[0] == Admitted(240, 200)
        ended = events[-1]
        assert isinstance(ended, Ended)
        assert (ended.reason, ended.completion_tokens) == ("length", 20)
        tokens = [t for event in events if isinstance(event, Tokens) for t in event.token_ids]
        assert tokens == expected(39, 20)
        answers = await asyncio.gather(*(answer(engine.submit(prompt(3 + i, 30))) for i in range(5)))
        assert answers == [expected(2 + i, 30) for i in range(5)]
        view = engine.get_context("doc")
        assert (view.tokens, sum(share.tokens for share in view.shares)) == (200, 200)
        assert [worker.pid for worker in engine.cluster().workers] == service.pids
        engine.audit()


@pytest.mark.parametrize("kind", ["raise", "kill"])
@pytest.mark.parametrize("rank", [0, 2])
async def test_streams_continue_with_the_remaining_ranks(rank: int, kind: str) -> None:
    fault = RankFault(rank=rank, kind=kind, step=40)  # type: ignore[arg-type]
    async with serving(config(world_size=3), fault) as service:
        streams = [service.engine.submit(prompt(4 + index, 200)) for index in range(3)]
        assert await asyncio.gather(*map(answer, streams)) == [expected(3 + index, 200) for index in range(3)]
        cluster = service.engine.cluster()
        assert cluster.epoch == 2
        if kind == "raise":
            assert (cluster.world_size, cluster.losses) == (3, ())
        else:
            [loss] = cluster.losses
            assert (cluster.world_size, loss.rank, loss.reason) == (2, rank, "was killed by signal 9")
        service.engine.audit()


async def test_last_rank_is_named() -> None:
    async with serving(config(), RankFault(rank=0, kind="kill", step=4)) as service:
        streams = [service.engine.submit(prompt(4, 1_000)) for _ in range(3)]
        for result in await asyncio.gather(*map(answer, streams), return_exceptions=True):
            assert isinstance(result, RankLost)
            assert (result.rank, result.reason) == (0, "was killed by signal 9")
        with pytest.raises(RankLost):
            await service.loop
        with pytest.raises(Unavailable, match="rank 0"):
            service.engine.submit(prompt(4, 1))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("at_close", ["raise", "hang", "grip"])
async def test_rank_reports_its_error_before_it_closes(at_close: str) -> None:
    """Its process also exits, however the close ends."""
    fault = RankFault(rank=0, kind="refuse", step=2, at_close=at_close)  # type: ignore[arg-type]
    settings = config(heartbeat_timeout=1000.0)
    control, fleet = RankManager(settings), LocalFleet(EchoMain(fault))
    await fleet.launch(settings, control.invitations, control.on_process_exit)
    await control.start(1)
    process = psutil.Process(control.hellos[0].pid)
    plans = [StepPlan(1, n, Prefill((n,), 0, (5, 6), (Run(0, 0, 2, (n,)),))) for n in (1, 2)]
    await control.group.step(plans[0])
    with pytest.raises(StartError, match="refused on request"):
        await control.group.step(plans[1])
    assert await asyncio.to_thread(process.wait, timeout=40) in (None, 1)
    await control.close()
    await fleet.shutdown()


@pytest.mark.parametrize("rank", [0, 1])
async def test_rank_that_hangs_past_the_deadline_is_killed(rank: int) -> None:
    """Its heartbeats continue."""
    fault = RankFault(rank=rank, kind="hang", step=2)
    async with serving(config(world_size=2, step_timeout=0.5), fault) as service:
        answered = await answer(service.engine.submit(prompt(4, 100)))
        assert answered == expected(3, 100)
        if service.engine.cluster().losses:  # only rank 0 answers: the test does not wait for other ranks
            [loss] = service.engine.cluster().losses
            assert (loss.rank, rank) == (0, 0)
            assert "exceeded its limit of" in loss.reason
        assert service.engine.cluster().epoch == 2 - rank


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGSTOP, "no heartbeat for 3 s"), (signal.SIGKILL, "signal 9")])
async def test_rank_lost_while_idle_is_reported(number: signal.Signals, reason: str) -> None:
    async with serving(config(world_size=2, heartbeat_timeout=3.0)) as service:
        engine = service.engine
        assert await answer(engine.submit(prompt(4, 2))) == expected(3, 2)
        os.kill(service.pids[1], number)
        await comes_to(engine, lambda: engine.cluster().epoch == 2)
        [loss] = engine.cluster().losses
        assert (loss.member, loss.rank, loss.epoch) == (1, 1, 1)
        assert reason in loss.reason
        assert not psutil.pid_exists(service.pids[1])
        assert await answer(engine.submit(prompt(4, 9))) == expected(3, 9)


@pytest.mark.parametrize(("kind", "error"), [("refuse", StartError), ("raise", RankLost), ("kill", RankLost)])
async def test_start_fails(kind: str, error: type[Exception]) -> None:
    fault = RankFault(rank=1, kind=kind)  # type: ignore[arg-type]
    with pytest.raises(error):
        async with serving(config(world_size=2), fault):
            pass


async def test_start_timeout_names_the_rank() -> None:
    fault = RankFault(rank=1, kind="hang")
    with pytest.raises(StartError, match=r"rank .*1 did not start within 2"):
        async with serving(config(world_size=2, start_timeout=2.0), fault):
            pass


async def test_cancel_frees_everything() -> None:
    async with serving(config(world_size=2)) as service:
        stream = service.engine.submit(prompt(100, 2_000))
        async for event in stream:
            if isinstance(event, Tokens):
                break
        stream.cancel()
        stream.cancel()
        assert [event async for event in stream if isinstance(event, Admitted)] == []
        assert await answer(service.engine.submit(prompt(4, 3))) == expected(3, 3)
        assert [worker.tokens for worker in service.engine.cluster().workers] == [0, 0]
        service.engine.audit()


async def test_two_plans_are_sent_before_the_first_answer() -> None:
    control = RankManager(config(step_timeout=0.3))
    rank = ScriptedMember(control.invitations[0], 0)
    await control.start(1)
    plans = [StepPlan(1, number, Decode(())) for number in (1, 2, 3, 4)]
    steps = [asyncio.ensure_future(control.group.step(plan)) for plan in plans[:2]]
    assert [await rank.receive() for _ in steps] == plans[:2]
    for number in (2, 1):
        await rank.send(StepResult(1, number, {number: (Token(number),)}))
    assert [(await step).tokens for step in steps] == [{1: (Token(1),)}, {2: (Token(2),)}]
    steps = [asyncio.ensure_future(control.group.step(plan)) for plan in plans[2:]]
    for step in steps:
        with pytest.raises(RankLost, match="step 3 exceeded its limit"):
            await step
    await rank.close()
    await control.close()


async def test_answer_counts_only_for_its_own_epoch() -> None:
    control = RankManager(config())
    rank = ScriptedMember(control.invitations[0], 0)
    await control.start(3)
    assert rank.joins == [Join(3, 0, "127.0.0.1", 0, ("node",))]
    step = asyncio.ensure_future(control.group.step(StepPlan(3, 1, Decode(()))))
    for epoch in (2, 4, 3):
        await rank.send(StepResult(epoch, 1, {epoch: (Token(7),)}))
    assert (await step).tokens == {3: (Token(7),)}
    await rank.close()
    await control.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("joined", "message"),
    [
        (0, StepPlan(1, 1, Decode(()))),
        (0, Join(1, 0, "127.0.0.1", 0, ("here",))),
        (1, StepPlan(2, 1, Decode(()))),
        (1, Join(1, 0, "127.0.0.1", 0, ("here",))),
        (1, KvLayout(2, ())),
        (1, Load()),
    ],
)
async def test_unexpected_message_ends_the_rank(joined: int, message: StepPlan | Load | Join | KvLayout) -> None:
    control = RankManager(config())
    place = {"host": "127.0.0.1", "node": "here", "num_ranks_here": 1, "gpu": None}
    spec = RankSpec(member=0, config=config(), invitation=control.invitations[0], **place)
    process = asyncio.create_task(asyncio.to_thread(serve, spec, EchoRank))
    await (control.start(joined) if joined else control.registry.wait_until(lambda: control.hellos))
    control._channel.send([0], message)
    where = f"out of order in epoch {joined}" if joined else "before the model is loaded"
    text = str((await control.group.wait_ended()).error)
    assert text.endswith(f"{where}: {type(message).__name__}"), "the content of the message is not shown"
    assert await process == 1
    await control.close()


def test_library_log_lines_during_rank_start_are_kept() -> None:
    logger = logging.getLogger("longleaf.comm.shared_memory")
    with capturing_logs() as notes:
        logger.debug("too much")
        logger.info("a merge was chosen")
        logger.warning("rank %d has no compiler", 3)
        logging.getLogger("another.library").warning("of no interest")
    logger.warning("too late")
    assert (notes.details, notes.warnings) == (["a merge was chosen"], ["rank 3 has no compiler"])


ORPHANS = """
import asyncio
from coordinator.cluster.rank_manager import RankManager
from coordinator.cluster.local_fleet import LocalFleet
from longleaf.config import EngineConfig
from tests.support.fakes.workers import EchoMain

async def main():
    config = EngineConfig(model="none", world_size=2)
    control, fleet = RankManager(config), LocalFleet(EchoMain())
    await fleet.launch(config, control.invitations, control.on_process_exit)
    await control.start(1)
    print(*(hello.pid for hello in control.hellos), flush=True)
    await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""


async def test_ranks_exit_when_the_coordinator_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    coordinator = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdout=asyncio.subprocess.PIPE, env=environment
    )
    assert coordinator.stdout is not None
    ranks = [psutil.Process(int(pid)) for pid in (await coordinator.stdout.readline()).split()]
    assert len(ranks) == 2
    coordinator.kill()
    await coordinator.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, ranks, timeout=20)
    assert alive == []
