"""A resumable generation continues after a disconnect without gap or repetition, and ends if the client does not
return."""

import asyncio
import gc
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.handlers import resumable_generations as replays
from coordinator.handlers.generation import Generation
from coordinator.handlers.resumable_generations import ResumableGeneration, ResumableGenerations
from coordinator.text.tokenizer_pool import TokenizerPool
from longleaf.errors import Cancelled, InvalidArgument, NotFound, RankLost, ResourceExhausted, Unavailable
from longleaf.sampling import Logprobs, SamplingParams, TokenLogprob
from longleaf.types import Delta, Event, Finished, Generate, Progress, Recovering, Started
from tests.support.service import FakeEngine, load_tokenizer, write_model
from tests.support.timers import Timers

pytestmark = pytest.mark.timeout(60)

REQUEST = Generate(input="x", sampling=SamplingParams(), resume_seconds=30.0)
HEAD = [Started(5, 3), Progress(3, 5), Progress(5, 5)]
LOST = [Recovering(8, done, 64) for done in (0, 32, 64)]


def deltas(sizes: list[int]) -> list[Event]:
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    return [Delta(start, tuple(range(start, start + size)), "x") for start, size in zip(starts, sizes, strict=True)]


class Source:
    """A generation that yields `script` as far as allowed, then ends or fails."""

    def __init__(self, script: list[Event], error: Exception | None = None) -> None:
        self._script = script
        self._error = error
        self._allowed = asyncio.Semaphore(0)
        self.num_events = 0
        self.exhausted = asyncio.Event()
        self.is_closed = asyncio.Event()

    def allow(self, count: int = 1000) -> None:
        for _ in range(count):
            self._allowed.release()

    async def events(self) -> AsyncGenerator[Event, None]:
        try:
            for event in self._script:
                if self._allowed.locked():
                    self.exhausted.set()
                await self._allowed.acquire()
                self.num_events += 1
                yield event
            if self._error is not None:
                raise self._error
        finally:
            self.is_closed.set()


def hold(source: Source, timers: Timers) -> tuple[ResumableGenerations, ResumableGeneration]:
    generations = ResumableGenerations(timers)
    return generations, generations.register("id", REQUEST, source.events())


async def read(replay: ResumableGeneration, count: int, token_index: int = 0) -> list[Event]:
    """The first `count` events; the client disconnects after them."""
    found: list[Event] = []
    async with aclosing(replay.read(token_index)) as events:
        while len(found) < count and (event := await anext(events, None)) is not None:
            found.append(event)
    return found


@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=12),
    breaks=st.lists(st.integers(1, 9), max_size=6),
    lost=st.integers(0, 2),
    recoveries=st.lists(st.integers(0, 12), max_size=6),
)
@settings(max_examples=150, deadline=None)
def test_resumed_client_receives_every_token_once(
    sizes: list[int], breaks: list[int], lost: int, recoveries: list[int]
) -> None:
    """`lost` deltas were in flight at each disconnect; a recovery is reported before the deltas with these numbers."""

    async def scenario() -> None:
        script = [*HEAD, *deltas(sizes), Finished("length")]
        output = [[*LOST[: recoveries.count(i)], event] for i, event in enumerate(script[3:])]
        source = Source([*HEAD, *(event for part in output for event in part)])
        source.allow()
        _, replay = hold(source, Timers())
        seen: list[Event] = []
        for count in [*breaks, 1000]:
            index = sum(len(event.token_ids) for event in seen)
            events = await read(replay, count, index)
            assert events[0] == HEAD[0]
            arrived = [event for event in events if isinstance(event, Delta)]
            seen += arrived[: max(0, len(arrived) - lost)] if count != 1000 else arrived
        assert seen == script[3:-1]
        assert events[-1] == Finished("length")

    asyncio.run(scenario())


async def test_generation_continues_after_its_reader_disconnects() -> None:
    source = Source([*HEAD, *deltas([1, 1])])
    _, replay = hold(source, Timers())
    source.allow(4)
    reading = asyncio.create_task(read(replay, 5))
    await source.exhausted.wait()
    reading.cancel()
    with suppress(asyncio.CancelledError):
        await reading
    assert not source.is_closed.is_set()
    source.allow(1)
    assert await read(replay, 5, 1) == [HEAD[0], deltas([1, 1])[1]]


async def test_recovery_events_are_sent_once_and_not_retained() -> None:
    first, second = deltas([2, 1])
    source = Source([*HEAD, first, *LOST, second, Finished("length")])
    source.allow()
    _, replay = hold(source, Timers())
    assert await read(replay, 99) == [*HEAD, first, *LOST, second, Finished("length")]
    assert await read(replay, 99) == [*HEAD, first, second, Finished("length")]
    assert await read(replay, 99, 2) == [HEAD[0], second, Finished("length")]


async def test_client_that_resumes_during_a_recovery_receives_its_state() -> None:
    first, second = deltas([2, 1])
    source = Source([*HEAD, first, *LOST[:2], second, Finished("length")])
    source.allow(6)
    _, replay = hold(source, Timers())
    assert (await read(replay, 6))[3:] == [first, *LOST[:2]]
    assert await read(replay, 2, 2) == [HEAD[0], LOST[1]]
    source.allow()
    assert await read(replay, 99, 2) == [HEAD[0], LOST[1], second, Finished("length")]


async def test_all_readers_receive_recovery_events() -> None:
    first, second = deltas([2, 1])
    source = Source([*HEAD, first, LOST[0], second, Finished("length")])
    _, replay = hold(source, Timers())
    readers = [asyncio.create_task(read(replay, 99)) for _ in range(2)]
    source.allow(5)
    await source.exhausted.wait()
    source.allow()
    for found in await asyncio.gather(*readers):
        assert [event for event in found if not isinstance(event, Recovering)] == [*HEAD, first, second, found[-1]]
        assert found.count(LOST[0]) == 1


async def test_long_recovery_evicts_no_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "MAX_WEIGHT", 30)
    first, second = deltas([2, 1])
    source = Source([*HEAD, first, *(Recovering(8, done, 64) for done in range(64)), second, Finished("length")])
    source.allow()
    _, replay = hold(source, Timers())
    await read(replay, 99)
    assert await read(replay, 99) == [*HEAD, first, second, Finished("length")]


async def test_two_readers_receive_the_same_events() -> None:
    source = Source([*HEAD, *deltas([1] * 9), Finished("length")])
    _, replay = hold(source, Timers())
    readers = [asyncio.create_task(read(replay, 99)) for _ in range(2)]
    source.allow()
    first, second = await asyncio.gather(*readers)
    assert first == second
    assert len(first) == 3 + 9 + 1
    assert source.num_events == 13


async def test_cancel_ends_the_generation_and_its_readers() -> None:
    source, timers = Source([*HEAD, *deltas([1] * 9)]), Timers()
    generations, replay = hold(source, timers)
    source.allow(5)
    readers = [asyncio.create_task(read(replay, 99)) for _ in range(2)]
    await source.exhausted.wait()
    await generations.cancel("id")
    assert source.is_closed.is_set()
    for reader in readers:
        with pytest.raises(Cancelled, match="generations/id"):
            await reader
    with pytest.raises(NotFound):
        await generations.cancel("id")
    again = generations.register("id", REQUEST, source.events())
    timers.advance(29.0)
    assert generations.get("id") is again, "the timer of the previous generation is cancelled"
    timers.advance(1.0)
    assert generations.get("id") is None


async def test_cancelled_finished_generation_is_removed() -> None:
    source = Source([*HEAD, *deltas([1]), Finished("length")])
    source.allow()
    generations, replay = hold(source, Timers())
    assert len(await read(replay, 99)) == 5
    await generations.cancel("id")
    assert generations.get("id") is None


async def test_generation_ends_after_the_retention_time_without_readers() -> None:
    source, timers = Source([*HEAD, *deltas([1] * 9)]), Timers()
    generations, replay = hold(source, timers)
    source.allow(5)
    await read(replay, 5)
    timers.advance(29.0)
    assert generations.find("id") is replay
    await read(replay, 2, 1)
    timers.advance(29.0)
    assert generations.find("id") is replay
    timers.advance(1.0)
    with pytest.raises(NotFound, match="generations/id"):
        generations.find("id")
    await source.is_closed.wait()


async def test_waiting_generation_ends_after_the_retention_time() -> None:
    source, timers = Source([*HEAD]), Timers()
    _, replay = hold(source, timers)
    reading = asyncio.create_task(read(replay, 1))
    await source.exhausted.wait()
    reading.cancel()
    await asyncio.wait([reading])
    timers.advance(30.0)
    await source.is_closed.wait()


async def test_unread_generation_is_removed() -> None:
    timers = Timers()
    generations, _ = hold(Source([]), timers)
    timers.advance(30.0)
    assert generations.get("id") is None


async def test_finished_generation_can_be_read_during_the_retention_time() -> None:
    source, timers = Source([*HEAD, *deltas([2]), Finished("length")]), Timers()
    _, replay = hold(source, timers)
    source.allow()
    whole = await read(replay, 99)
    timers.advance(20.0)
    assert await read(replay, 99) == whole
    timers.advance(20.0)
    assert await read(replay, 99, 2) == [HEAD[0], Finished("length")]


async def test_failed_generation_is_not_retained() -> None:
    timers = Timers()
    source = Source([*HEAD], RankLost(1, "gone"))
    generations, replay = hold(source, timers)
    source.allow()
    with pytest.raises(RankLost):
        await read(replay, 99)
    assert generations.get("id") is None
    again = generations.register("id", REQUEST, Source([]).events())
    timers.advance(29.0)
    assert generations.get("id") is again


class Failing:
    """A generation that waits before it fails; its reader disconnects meanwhile."""

    def __init__(self, generations: ResumableGenerations) -> None:
        self._generations = generations
        self._is_waiting, self._gate = asyncio.Event(), asyncio.Event()

    async def events(self) -> AsyncGenerator[Event, None]:
        yield HEAD[0]
        self._is_waiting.set()
        await self._gate.wait()
        raise RankLost(1, "gone")

    async def fail_next(self) -> None:
        """Makes the generation fail in the next iteration of the event loop."""
        reading = asyncio.create_task(read(self._generations.register("id", REQUEST, self.events()), 2))
        await self._is_waiting.wait()
        reading.cancel()
        await asyncio.wait([reading])
        self._gate.set()


@pytest.mark.parametrize("num_turns", [0, 1, 2, 3])
async def test_failure_at_expiry_does_not_affect_the_successor(num_turns: int) -> None:
    """The name is used again this number of event loop iterations later."""
    timers, reported = Timers(), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    generations = ResumableGenerations(timers)
    await Failing(generations).fail_next()
    timers.advance(30.0)
    for _ in range(num_turns):
        await asyncio.sleep(0)
    source = Source([*HEAD, *deltas([1, 1]), Finished("length")])
    source.allow()
    successor = generations.register("id", REQUEST, source.events())
    assert (await read(successor, 99))[-1] == Finished("length")
    assert generations.get("id") is successor
    gc.collect()  # asyncio logs a failed task when it is collected
    assert not reported


async def test_name_is_free_after_expiry(tmp_path: Path) -> None:
    """The resources of the previous generation are still being released, and it waits for its next token."""
    engine, timers, threads = FakeEngine(), Timers(), TokenizerPool()
    engine.is_endless = True
    tokenizer = load_tokenizer(write_model(tmp_path))
    generation = Generation(engine, tokenizer, threads, later=timers)
    request = Generate(
        input="x", sampling=SamplingParams(), resume_seconds=30.0, request_id="id", use_chat_template=False
    )
    silent = asyncio.Event()
    reading = asyncio.create_task(wait_for_tokens(generation.run(request), silent))
    await silent.wait()
    reading.cancel()
    await asyncio.wait([reading])
    timers.advance(30.0)
    async with aclosing(generation.run(request)) as successor:
        assert isinstance(await anext(successor), Started)
    assert len(engine.streams) == 2
    await threads.close()


async def wait_for_tokens(events: AsyncGenerator[Event, None], begun: asyncio.Event) -> None:
    async for event in events:
        if isinstance(event, Progress):
            begun.set()


async def test_reader_at_expiry_gets_not_found() -> None:
    """The answer is not reported as complete: the reader existed before the end, but had not begun to read."""
    source, timers = Source([*HEAD, *deltas([1] * 9)]), Timers()
    _, replay = hold(source, timers)
    source.allow(5)
    await read(replay, 5)
    late = replay.read(1)
    timers.advance(30.0)
    with pytest.raises(NotFound, match="generations/id"):
        [_ async for _ in late]


@pytest.mark.parametrize(("index", "why"), [(1, "inside a delta"), (5, "only 4 tokens")])
async def test_index_inside_a_delta_is_refused(index: int, why: str) -> None:
    source = Source([*HEAD, *deltas([2, 2])])
    _, replay = hold(source, Timers())
    source.allow()
    await read(replay, 5)
    with pytest.raises(InvalidArgument, match=why) as caught:
        await read(replay, 1, index)
    assert caught.value.field == "resume_token_index"


async def test_retained_deltas_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "MAX_WEIGHT", 30)
    top = Logprobs(-1.0, (TokenLogprob(0, -1.0), TokenLogprob(1, -2.0)))
    script = [Delta(i, (i,), "x", (top,)) for i in range(50)]
    source = Source([*HEAD, *script])
    _, replay = hold(source, Timers())
    source.allow()
    await read(replay, 99)
    assert await read(replay, 99, 40) == [HEAD[0], *script[40:]]
    with pytest.raises(InvalidArgument, match="no longer buffered; the first available index is 40"):
        await read(replay, 1, 39)
    with pytest.raises(InvalidArgument, match="no longer buffered"):
        await read(replay, 1)


async def test_reader_behind_the_retained_deltas_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "MAX_WEIGHT", 5)
    source = Source([*HEAD, *deltas([1] * 50)])
    _, replay = hold(source, Timers())
    source.allow()
    async with aclosing(replay.read()) as slow:
        await anext(slow)
        await read(replay, 99)
        with pytest.raises(Unavailable, match="another call"):
            await anext(slow)


async def test_client_is_limited_to_its_share() -> None:
    generations = ResumableGenerations(Timers(), max_resumable=3)
    greedy, other = (
        Generate(input="x", sampling=SamplingParams(), resume_seconds=30.0, client=c) for c in ("greedy", "b")
    )
    for number in range(2):
        generations.register(f"greedy {number}", greedy, Source([]).events())
    with pytest.raises(ResourceExhausted, match="'greedy' has 2 .* of 3") as caught:
        generations.register("greedy 2", greedy, Source([]).events())
    assert caught.value.retry_seconds is not None
    generations.register("other", other, Source([]).events())
    with pytest.raises(ResourceExhausted, match="3 resumable generations exist"):
        generations.register("other 1", other, Source([]).events())
    await generations.cancel("greedy 0")
    generations.register("greedy 2", greedy, Source([]).events())


async def test_tenant_is_limited_to_its_share_for_all_clients() -> None:
    generations = ResumableGenerations(Timers(), max_resumable=4, tenant_share=1 / 2)
    requested = Generate(input="x", sampling=SamplingParams(), resume_seconds=30.0, tenant="acme")
    for client in ("a", "b"):
        generations.register(client, replace(requested, client=client), Source([]).events())
    with pytest.raises(ResourceExhausted, match="tenant acme has 2 .* of 4"):
        generations.register("c", replace(requested, client="c"), Source([]).events())
    generations.register("d", replace(requested, tenant="bolt"), Source([]).events())


async def test_number_of_retained_generations_is_bounded() -> None:
    generations = ResumableGenerations(Timers(), max_resumable=1)
    generations.register("id", replace(REQUEST, client="another"), Source([]).events())
    with pytest.raises(ResourceExhausted) as caught:
        generations.register("other", REQUEST, Source([]).events())
    assert caught.value.retry_seconds is not None
