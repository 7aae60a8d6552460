"""The engine and its streams, on fake ranks."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import msgspec
import pytest

from coordinator.engine import Engine
from coordinator.events import Ended, Progress, Prompt, RankShare, Started, Tokens
from coordinator.fakes import FakeRanks, echo_token
from coordinator.stream import MAX_UNREAD, Stream
from longleaf.config import EngineConfig
from longleaf.errors import AlreadyExists, DeadlineExceeded, InvalidArgument, NotFound, Unavailable, WorkerLost
from longleaf.sampling import Sampling

CONFIG = EngineConfig(model="none", world_size=2, chunk_size=32, block_size=4, replicate_below=8)


@asynccontextmanager
async def running(
    ranks: FakeRanks, config: EngineConfig = CONFIG, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[tuple[Engine, asyncio.Task[None]]]:
    engine = Engine(ranks, config, max_positions=3000, clock=clock, wall_clock=lambda: 12.0)
    await engine.start()
    loop = asyncio.create_task(engine.run())
    try:
        yield engine, loop
        engine.check() if not loop.done() else None
    finally:
        await engine.close()
        await asyncio.wait([loop])
    assert ranks.is_closed


def prompt(count: int, max_tokens: int, context: str | None = None) -> Prompt:
    return Prompt(context=context, token_ids=tuple(range(count)), sampling=Sampling(max_tokens=max_tokens))


async def test_views_and_streams() -> None:
    async with running(FakeRanks(2, 100)) as (engine, _):
        events = [event async for event in engine.ingest("doc", list(range(64)), append=False)]
        assert events[-1] == Progress(64, 64)
        view = engine.get_context("doc")
        assert (view.tokens, view.kv_bytes, view.created) == (64, 64 * 64, 12.0)
        assert view.shares == (RankShare(0, 32), RankShare(1, 32))
        assert engine.list_contexts() == [view]
        events = [event async for event in engine.submit(prompt(3, 4, "doc"))]
        assert events[0] == Started(67, 64)
        ended = events[-1]
        assert isinstance(ended, Ended)
        assert (ended.prompt_tokens, ended.cached_tokens, ended.completion_tokens) == (67, 64, 4)
        assert 0 <= ended.queue_seconds <= ended.first_token_seconds
        cluster = engine.cluster()
        assert [(w.rank, w.node, w.tokens, w.max_tokens, w.kv_bytes) for w in cluster.workers] == [
            (0, "fake", 32, 400, 2048),
            (1, "fake", 32, 400, 2048),
        ]
        assert (engine.total_tokens, engine.max_positions) == (800, 3000)
        engine.delete_context("doc")
        assert engine.list_contexts() == []


async def test_errors_are_raised_at_once() -> None:
    async with running(FakeRanks(2, 100)) as (engine, _):
        for call, error in (
            (lambda: engine.submit(prompt(3, 4, "doc")), NotFound),
            (lambda: engine.submit(prompt(0, 4)), InvalidArgument),
            (lambda: engine.ingest("doc", [], append=False), InvalidArgument),
            (lambda: engine.ingest("doc", [1], append=True), NotFound),
            (lambda: engine.get_context("doc"), NotFound),
            (lambda: engine.delete_context("doc"), NotFound),
        ):
            with pytest.raises(error):
                call()
        [_ async for _ in engine.ingest("doc", [1], append=False)]
        with pytest.raises(AlreadyExists):
            engine.ingest("doc", [1], append=False)


async def test_slow_reader_gets_joined_tokens() -> None:
    async with running(FakeRanks(2, 100)) as (engine, _):
        slow, fast = engine.submit(prompt(3, 50)), engine.submit(prompt(3, 60))
        assert isinstance([event async for event in fast][-1], Ended)
        events = [event async for event in slow]
        assert [type(event) for event in events] == [Started, Tokens, Ended]
        assert isinstance(events[1], Tokens)
        assert (events[1].index, len(events[1].token_ids)) == (0, 50)
        assert events[1].token_ids[0] == echo_token(2, 0, 1000)


async def test_a_reader_that_is_behind_is_paused_until_it_reads() -> None:
    async with running(FakeRanks(2, 1000)) as (engine, _):
        slow = engine.submit(prompt(3, 2000))
        assert await collect(engine.submit(prompt(3, 1500))) == 1500
        first = await anext(event async for event in slow if isinstance(event, Tokens))
        assert MAX_UNREAD <= len(first.token_ids) <= MAX_UNREAD + 2, "no more than were under way"
        assert len(first.token_ids) + await collect(slow) == 2000


async def test_those_that_wait_are_told_their_place() -> None:
    ranks = FakeRanks(2, 1000)
    config = msgspec.structs.replace(CONFIG, max_sequences=1)
    async with running(ranks, config) as (engine, _):
        streams = [engine.submit(prompt(3, 50)) for _ in range(3)]
        told = [[event async for event in stream if isinstance(event, Started)] for stream in streams]
        assert [events[0].queue_position for events in told[:1]] == [0]
        assert [events[-1].queue_position for events in told] == [0, 0, 0]
    async with running(FakeRanks(2, 1000), config) as (engine, _):
        running_now, *waiting = [engine.submit(prompt(3, 2000)) for _ in range(3)]
        await anext(running_now)
        places = [await anext(stream) for stream in waiting]
        assert places == [Started(3, 0, 1), Started(3, 0, 2)]


async def test_a_deadline_ends_a_job_while_nothing_else_happens() -> None:
    now = [0.0]
    async with running(FakeRanks(2, 1000), clock=lambda: now[0]) as (engine, _):
        stream = engine.submit(msgspec.structs.replace(prompt(3, 2000), deadline=0.001))
        assert await collect(engine.submit(prompt(3, 1000))) == 1000  # by then the other one's reader is behind
        assert stream.is_full
        now[0] = 1.0
        with pytest.raises(DeadlineExceeded):
            await collect(stream)
        with pytest.raises(DeadlineExceeded):
            engine.submit(msgspec.structs.replace(prompt(3, 1), deadline=0.5))
        assert engine.cluster().running == 0


async def test_cancel_by_leaving() -> None:
    async with running(FakeRanks(2, 1000)) as (engine, _):
        async with aclosing(engine.submit(prompt(100, 2000))) as stream:
            async for event in stream:
                if isinstance(event, Tokens):
                    break
        async with engine.submit(prompt(100, 2000)) as stream:
            await anext(stream)
        assert [event async for event in stream if not isinstance(event, Progress)] == []
        assert engine.cluster().running == 0
        assert [worker.tokens for worker in engine.cluster().workers] == [0, 0]


async def test_deleted_context_fails_its_ingest() -> None:
    async with running(FakeRanks(2, 1000)) as (engine, _):
        [_ async for _ in engine.ingest("doc", [1], append=False)]
        stream = engine.ingest("doc", list(range(500)), append=True)
        engine.delete_context("doc")
        with pytest.raises(NotFound):
            [_ async for _ in stream]


async def collect(stream: Stream) -> int:
    return sum([len(event.token_ids) async for event in stream if isinstance(event, Tokens)])


async def test_lost_rank_fails_every_stream() -> None:
    async with running(FakeRanks(2, 1000, lose_at=5, lost_rank=1)) as (engine, loop):
        results = await asyncio.gather(
            collect(engine.submit(prompt(3, 1000))), collect(engine.submit(prompt(3, 2000))), return_exceptions=True
        )
        assert [(type(result), getattr(result, "rank", None)) for result in results] == [(WorkerLost, 1)] * 2
        with pytest.raises(WorkerLost):
            await loop
        with pytest.raises(Unavailable, match="rank 1 was lost"):
            engine.submit(prompt(3, 1))


async def test_loss_between_steps() -> None:
    ranks = FakeRanks(2, 1000)
    async with running(ranks) as (engine, loop):
        await collect(engine.submit(prompt(3, 1)))
        ranks.lose(0, "vanished")
        with pytest.raises(WorkerLost, match="vanished"):
            await loop


async def test_close_ends_streams() -> None:
    async with running(FakeRanks(2, 1000)) as (engine, loop):
        stream = engine.submit(prompt(3, 2000))
        await anext(stream)
        await engine.close()
        with pytest.raises(Unavailable, match="stopping"):
            await collect(stream)
        await loop


async def test_not_started() -> None:
    engine = Engine(FakeRanks(), CONFIG, max_positions=10)
    with pytest.raises(Unavailable, match="starting"):
        engine.submit(prompt(3, 1))
