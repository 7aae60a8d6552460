"""The engine and its streams, on fake ranks."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest

from coordinator.engine.engine import Engine
from coordinator.engine.stream import MAX_UNREAD, Stream
from coordinator.engine_messages import Admitted, DocumentPrompt, Ended, Prompt, SchedulingParams, Tokens
from coordinator.kv_cache.block_placer import BlockPlacer
from coordinator.scheduling.sequences import SequenceJob
from longleaf.config import EngineConfig
from longleaf.errors import AlreadyExists, DeadlineExceeded, InvalidArgument, NotFound, RankLost, Unavailable
from longleaf.positions import STATE_SPAN, AttentionSpan, WindowSpec
from longleaf.rank_protocol.step import Row, StepPlan, StepResult
from longleaf.sampling import SamplingParams
from longleaf.types import ContextSettings, Progress, RankShare
from tests.support.fakes.echo_model import echo_token
from tests.support.fakes.ranks import FakeRanks
from tests.support.gated import GatedRanks, comes_to
from tests.support.running import running as run

pytestmark = pytest.mark.timeout(60)

CONFIG = EngineConfig(model="none", world_size=2, chunk_size=32, block_size=4, replicate_below=8)


@asynccontextmanager
async def running(
    ranks: FakeRanks,
    wall_clock: Callable[[], float] = lambda: 12.0,
    clock: Callable[[], float] = time.monotonic,
    config: EngineConfig = CONFIG,
    **more: Any,
) -> AsyncIterator[tuple[Engine, asyncio.Task[None]]]:
    async with run(Engine(ranks, config, max_positions=3000, clock=clock, wall_clock=wall_clock, **more)) as found:
        yield found.engine, found.loop
    assert ranks.is_closed


def prompt(count: int, max_tokens: int, context: str | None = None) -> Prompt:
    return Prompt(context=context, token_ids=tuple(range(count)), sampling=SamplingParams(max_tokens=max_tokens))


async def test_views_and_streams() -> None:
    async with running(FakeRanks(2, 100)) as (engine, _):
        events = [event async for event in engine.ingest(DocumentPrompt(context="doc", token_ids=list(range(64))))]
        assert events[-1] == Progress(64, 64)
        view = engine.get_context("doc")
        assert (view.tokens, view.kv_bytes, view.created) == (64, 64 * 64, 12.0)
        assert view.shares == (RankShare(0, 32, 2048), RankShare(1, 32, 2048))
        assert engine.list_contexts() == [view]
        events = [event async for event in engine.submit(prompt(3, 4, "doc"))]
        assert events[0] == Admitted(67, 64)
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
        await engine.delete_context("doc")
        assert engine.list_contexts() == []


async def test_views_include_windows_on_every_rank() -> None:
    windows = WindowSpec(reaches=(AttentionSpan(5),), num_blocks=10, bytes_per_token=8)
    async with running(FakeRanks(2, 100, windows=windows)) as (engine, _):
        _ = [event async for event in engine.ingest(DocumentPrompt(context="doc", token_ids=list(range(64))))]
        view = engine.get_context("doc")
        assert view.shares == (RankShare(0, 32, 32 * 64 + 4 * 8), RankShare(1, 32, 32 * 64 + 4 * 8))
        assert view.kv_bytes == 64 * 64 + 2 * 4 * 8
        cluster = engine.cluster()
        assert (cluster.window_tokens, cluster.max_window_tokens) == (4, 40)
        assert [(w.kv_bytes, w.max_kv_bytes) for w in cluster.workers] == [(2080, 400 * 64 + 40 * 8)] * 2


async def test_views_include_recurrent_states() -> None:
    states = WindowSpec(reaches=(STATE_SPAN,), num_blocks=10, bytes_per_token=500, is_state=True)
    async with running(FakeRanks(2, 100, windows=states)) as (engine, _):
        _ = [event async for event in engine.ingest(DocumentPrompt(context="doc", token_ids=list(range(64))))]
        assert engine.get_context("doc").kv_bytes == 64 * 64 + 2 * 500
        cluster = engine.cluster()
        assert (cluster.states, cluster.max_states, cluster.state_bytes) == (1, 10, 500)
        assert (cluster.window_tokens, cluster.max_window_tokens) == (0, 0)
        await engine.delete_context("doc")
        assert engine.cluster().states == 0


async def test_errors_are_raised_immediately() -> None:
    async with running(FakeRanks(2, 100)) as (engine, _):
        for call, error in (
            (lambda: engine.submit(prompt(3, 4, "doc")), NotFound),
            (lambda: engine.submit(prompt(0, 4)), InvalidArgument),
            (lambda: engine.ingest(DocumentPrompt(context="doc", token_ids=[])), InvalidArgument),
            (lambda: engine.ingest(DocumentPrompt(context="doc", token_ids=[1], append=True)), NotFound),
            (lambda: engine.get_context("doc"), NotFound),
        ):
            with pytest.raises(error):
                call()
        with pytest.raises(NotFound):
            await engine.delete_context("doc")
        [_ async for _ in engine.ingest(DocumentPrompt(context="doc", token_ids=[1]))]
        with pytest.raises(AlreadyExists):
            engine.ingest(DocumentPrompt(context="doc", token_ids=[1]))


async def test_slow_reader_receives_joined_tokens() -> None:
    async with running(FakeRanks(2, 100)) as (engine, _):
        slow, fast = engine.submit(prompt(3, 50)), engine.submit(prompt(3, 60))
        assert isinstance([event async for event in fast][-1], Ended)
        events = [event async for event in slow]
        assert [type(event) for event in events] == [Admitted, Tokens, Ended]
        assert isinstance(events[1], Tokens)
        assert (events[1].index, len(events[1].token_ids)) == (0, 50)
        assert events[1].token_ids[0] == echo_token(2, 0, 1000)


async def test_observer_receives_every_step_with_its_result() -> None:
    ranks, seen = FakeRanks(2, 100), list[tuple[StepPlan, StepResult]]()
    async with running(ranks, observe=lambda plan, result: seen.append((plan, result))) as (engine, _):
        [_ async for _ in engine.ingest(DocumentPrompt(context="doc", token_ids=range(64)))]
        streams = [engine.submit(prompt(3, 5, "doc")), engine.submit(prompt(20, 9))]
        for stream in streams:
            [_ async for _ in stream]
    answered = len(seen)  # steps that were sent ahead are dropped with the engine
    assert answered >= 10
    assert [plan for plan, _ in seen] == ranks.plans[:answered]
    assert [result.step for _, result in seen] == [plan.step for plan, _ in seen]


async def test_samples_are_one_stream() -> None:
    async with running(FakeRanks(2, 100)) as (engine, _):
        requested = msgspec.structs.replace(prompt(20, 5), num_samples=3)
        stream, other = engine.submit(requested), engine.submit(prompt(3, 2))
        events = [event async for event in stream]
        ids = {sample: [] for sample in range(3)}
        for event in events:
            if isinstance(event, Tokens):
                assert event.index == len(ids[event.sample])
                ids[event.sample] += event.token_ids
        assert [len(found) for found in ids.values()] == [5, 5, 5]
        assert sorted(event.sample for event in events if isinstance(event, Ended)) == [0, 1, 2]
        assert await collect(other) == 2


async def test_stream_ends_with_its_last_sample() -> None:
    async with running(FakeRanks(2, 1000)) as (engine, _):
        stream = engine.submit(msgspec.structs.replace(prompt(20, 900), num_samples=2))
        seen: set[int] = set()
        while len(seen) < 2:
            event = await anext(stream)
            seen |= {event.sample} if isinstance(event, Tokens) else set()
        for sample in (1, 1, 0):
            assert not stream.is_closed
            stream.cancel_sample(sample)
        assert stream.is_closed
        assert (engine.cluster().running, engine.cluster().waiting) == (0, 0)
        engine.audit()


async def test_logprobs_and_stop_tokens_reach_the_stream() -> None:
    async with running(FakeRanks(2, 100)) as (engine, _):
        second = echo_token(echo_token(2, 0, 1000), 1, 1000)
        sampling = SamplingParams(max_tokens=9, num_logprobs=0, stop_tokens=(second,))
        stream = engine.submit(msgspec.structs.replace(prompt(3, 9), sampling=sampling))
        events = [event async for event in stream]
        received = [token.logprobs for event in events if isinstance(event, Tokens) for token in event.tokens]
        assert [entry.logprob for entry in received] == [-float(echo_token(2, 0, 1000)), -float(second)]
        assert isinstance(events[-1], Ended)
        assert (events[-1].reason, events[-1].completion_tokens) == ("stop_token", 2)


async def test_slow_reader_is_paused_until_it_reads() -> None:
    async with running(FakeRanks(2, 1000)) as (engine, _):
        slow = engine.submit(prompt(3, 2000))
        assert await collect(engine.submit(prompt(3, 1500))) == 1500
        first = await anext(event async for event in slow if isinstance(event, Tokens))
        assert MAX_UNREAD <= len(first.token_ids) <= MAX_UNREAD + 2, "at most the steps in flight"
        assert len(first.token_ids) + await collect(slow) == 2000


async def test_queued_requests_report_their_position() -> None:
    ranks = FakeRanks(2, 1000)
    config = msgspec.structs.replace(CONFIG, max_sequences=1)
    async with running(ranks, config=config) as (engine, _):
        streams = [engine.submit(prompt(3, 50)) for _ in range(3)]
        received = [[event async for event in stream if isinstance(event, Admitted)] for stream in streams]
        assert [events[0].queue_position for events in received[:1]] == [0]
        assert [events[-1].queue_position for events in received] == [0, 0, 0]
    async with running(FakeRanks(2, 1000), config=config) as (engine, _):
        running_now, *waiting = [engine.submit(prompt(3, 2000)) for _ in range(3)]
        await anext(running_now)
        places = [await anext(stream) for stream in waiting]
        assert places == [Admitted(3, 0, 1), Admitted(3, 0, 2)]


async def test_deadline_ends_a_job_on_an_idle_engine() -> None:
    now = [0.0]
    async with running(FakeRanks(2, 1000), clock=lambda: now[0]) as (engine, _):
        stream = engine.submit(msgspec.structs.replace(prompt(3, 2000), scheduling=SchedulingParams(deadline=0.001)))
        assert await collect(engine.submit(prompt(3, 1000))) == 1000  # by then the other one's reader is behind
        assert stream.is_full
        now[0] = 1.0
        with pytest.raises(DeadlineExceeded):
            await collect(stream)
        with pytest.raises(DeadlineExceeded):
            engine.submit(msgspec.structs.replace(prompt(3, 1), scheduling=SchedulingParams(deadline=0.5)))
        assert engine.cluster().running == 0


async def test_closing_a_stream_cancels_its_job() -> None:
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
        [_ async for _ in engine.ingest(DocumentPrompt(context="doc", token_ids=[1]))]
        stream = engine.ingest(DocumentPrompt(context="doc", token_ids=list(range(500)), append=True))
        await engine.delete_context("doc")
        with pytest.raises(NotFound):
            [_ async for _ in stream]


async def collect(stream: Stream) -> int:
    return sum([len(event.token_ids) async for event in stream if isinstance(event, Tokens)])


async def test_loss_of_the_last_rank_fails_every_stream() -> None:
    async with running(FakeRanks(1, 1000, lose_at=5)) as (engine, loop):
        results = await asyncio.gather(
            collect(engine.submit(prompt(3, 1000))), collect(engine.submit(prompt(3, 2000))), return_exceptions=True
        )
        assert [(type(result), getattr(result, "rank", None)) for result in results] == [(RankLost, 0)] * 2
        with pytest.raises(RankLost):
            await loop
        with pytest.raises(Unavailable, match="rank 0 was lost") as refused:
            engine.submit(prompt(3, 1))
        assert type(refused.value) is Unavailable, "this call lost no tokens"
        assert refused.value.__cause__ is results[0], "but it is known here why"


async def test_last_rank_may_be_lost_between_steps() -> None:
    ranks = FakeRanks(1, 1000)
    async with running(ranks) as (engine, loop):
        await collect(engine.submit(prompt(3, 1)))
        ranks.lose(0, "vanished")
        with pytest.raises(RankLost, match="vanished"):
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


class ManualClock:
    """A manual wall clock."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def names(engine: Engine) -> list[str]:
    return [context.id for context in engine.list_contexts()]


async def test_contexts_expire() -> None:
    date_clock = ManualClock()
    async with running(FakeRanks(2, 100), date_clock) as (engine, _):
        for name, settings in (
            ("early", ContextSettings(ttl=10.0, display_name="E")),
            ("late", ContextSettings(expires=1020.0)),
            ("never", ContextSettings()),
            ("pinned", ContextSettings(ttl=10.0, is_pinned=True)),
        ):
            [_ async for _ in engine.ingest(DocumentPrompt(context=name, token_ids=list(range(8)), settings=settings))]
        view = engine.get_context("early")
        assert (view.expires, view.display_name, view.is_pinned) == (1010.0, "E", False)
        date_clock.now = 1009.9
        assert names(engine) == ["early", "late", "never", "pinned"]
        date_clock.now = 1010.0
        assert names(engine) == ["late", "never", "pinned"]
        engine.audit()
        with pytest.raises(NotFound):
            engine.submit(prompt(3, 1, "early"))
        assert (await engine.update_context("late", ContextSettings(expires=None))).expires is None
        await engine.update_context("never", ContextSettings(ttl=5.0))
        date_clock.now = 2000.0
        assert names(engine) == ["late", "pinned"]
        assert engine.get_context("pinned").expires == 1010.0
        await engine.update_context("pinned", ContextSettings(is_pinned=False))
        assert names(engine) == ["late"]


async def test_context_expires_on_an_idle_engine() -> None:
    has_passed = asyncio.Event()

    def clock() -> float:
        now = time.time()
        if engine._scheduler is not None and (engine._scheduler.contexts.next_expiry or now) < now:
            has_passed.set()
        return now

    async with running(FakeRanks(2, 100), clock) as (engine, _):
        [
            _
            async for _ in engine.ingest(
                DocumentPrompt(context="doc", token_ids=[1, 2], settings=ContextSettings(ttl=0.05))
            )
        ]
        assert engine._scheduler is not None
        await has_passed.wait()  # the engine checks expiry without a request
        assert "doc" not in engine._scheduler.contexts


@pytest.mark.parametrize("is_waiting", [False, True])
async def test_ingest_ends_when_its_context_expires(is_waiting: bool) -> None:
    """Running or queued, it ends, and its blocks are freed immediately."""
    date_clock, ranks = ManualClock(), GatedRanks()
    async with running(ranks, date_clock) as (engine, _):
        others = [engine.submit(prompt(2, 230)) for _ in range(4 if is_waiting else 0)]
        stream = engine.ingest(
            DocumentPrompt(context="doc", token_ids=list(range(200)), settings=ContextSettings(expires=1010.0))
        )
        pinned = ContextSettings(expires=1010.0, is_pinned=True)
        pinned_stream = engine.ingest(DocumentPrompt(context="kept", token_ids=list(range(8)), settings=pinned))
        ranks.allow(2)
        await comes_to(engine, lambda: len(ranks.plans) == 2)
        assert engine.cluster().waiting == int(is_waiting)
        date_clock.now = 1010.0
        engine.list_contexts()  # looks at the clock
        with pytest.raises(InvalidArgument, match=r"config\.expire_time"):
            [_ async for _ in stream]
        engine.audit()
        ranks.allow(1000)
        for other in (*others, pinned_stream):
            [_ async for _ in other]
        assert names(engine) == ["kept"]
        assert sum(worker.tokens for worker in engine.cluster().workers) == 8


async def test_ingest_expires_on_an_idle_engine() -> None:
    async with running(GatedRanks(), time.time) as (engine, _):
        soon = ContextSettings(expires=time.time() + 0.05)
        stream = engine.ingest(DocumentPrompt(context="doc", token_ids=list(range(200)), settings=soon))
        with pytest.raises(InvalidArgument, match=r"config\.expire_time"):
            [_ async for _ in stream]


async def test_expired_context_finishes_generations_and_fails_appends() -> None:
    date_clock = ManualClock()
    async with running(FakeRanks(2, 1000), date_clock) as (engine, _):
        [
            _
            async for _ in engine.ingest(
                DocumentPrompt(context="doc", token_ids=[1], settings=ContextSettings(ttl=10.0))
            )
        ]
        answer, append = (
            engine.submit(prompt(3, 5, "doc")),
            engine.ingest(DocumentPrompt(context="doc", token_ids=list(range(500)), append=True)),
        )
        assert isinstance(await anext(answer), Admitted)
        date_clock.now = 1010.0
        assert names(engine) == []
        assert sum([len(event.token_ids) async for event in answer if isinstance(event, Tokens)]) == 5
        with pytest.raises(NotFound):
            [_ async for _ in append]


async def test_append_keeps_the_settings_and_past_expiry_is_refused() -> None:
    async with running(FakeRanks(2, 100)) as (engine, _):
        [
            _
            async for _ in engine.ingest(
                DocumentPrompt(context="doc", token_ids=[1], settings=ContextSettings(ttl=10.0))
            )
        ]
        [_ async for _ in engine.ingest(DocumentPrompt(context="doc", token_ids=[1], append=True))]
        assert engine.get_context("doc").expires == 22.0
        for settings in (ContextSettings(expires=12.0), ContextSettings(ttl=1e12)):
            with pytest.raises(InvalidArgument, match=r"context\.(expire_time|ttl)"):
                await engine.update_context("doc", settings)
        with pytest.raises(NotFound):
            await engine.update_context("none", ContextSettings(is_pinned=True))


async def test_unexpected_error_of_a_job_ends_only_its_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    next_row = SequenceJob.next_row

    def fail(self: SequenceJob, placer: BlockPlacer) -> Row:
        if self.prompt.max_tokens == 7:
            raise IndexError("a secret of the inside")
        return next_row(self, placer)

    monkeypatch.setattr(SequenceJob, "next_row", fail)
    async with running(FakeRanks(2, 100)) as (engine, loop):
        bad, good = engine.submit(prompt(3, 7)), engine.submit(prompt(3, 9))
        with pytest.raises(Unavailable, match="unexpected error ended this request") as caught:
            [_ async for _ in bad]
        assert "secret" not in str(caught.value)
        assert isinstance([event async for event in good][-1], Ended)
        assert not loop.done()
        engine.audit()
    assert "a secret of the inside" in caplog.text
