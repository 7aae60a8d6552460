"""The state that an engine saves, and the state that its successor restores."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from coordinator.cluster.ports import Formation
from coordinator.engine.engine import Engine
from coordinator.engine_messages import DocumentPrompt, Prompt, Tokens
from coordinator.recovery.epochs import FIRST_EPOCH
from longleaf.config import EngineConfig
from longleaf.errors import AlreadyExists, NotFound, ResourceExhausted, StorageUnavailable
from longleaf.sampling import SamplingParams
from longleaf.types import ContextSettings, Recovering
from tests.support.fakes.ranks import FakeRanks
from tests.support.gated import comes_to
from tests.support.lasting import MemoryLasting
from tests.support.running import running as run

pytestmark = pytest.mark.timeout(60)

CONFIG = EngineConfig(model="none", world_size=2, chunk_size=32, block_size=4, replicate_below=8)


@asynccontextmanager
async def running(
    persistence: MemoryLasting, ranks: FakeRanks | None = None, wall_clock: Callable[[], float] = lambda: 12.0
) -> AsyncIterator[Engine]:
    engine = Engine(ranks or FakeRanks(2, 100), CONFIG, 3000, durability=persistence, wall_clock=wall_clock)
    async with run(engine) as found:
        yield found.engine


async def ingest(engine: Engine, context: str, count: int, append: bool = False, first: int = 0) -> None:
    ids = list(range(first, first + count))
    async for _ in engine.ingest(DocumentPrompt(context=context, token_ids=ids, append=append)):
        pass


async def ask(engine: Engine, context: str, count: int = 3) -> tuple[list[int], bool]:
    """The answer, and whether the context had to be restored for it."""
    prompt = Prompt(context=context, token_ids=tuple(range(count)), sampling=SamplingParams(max_tokens=4))
    events = [event async for event in engine.submit(prompt)]
    tokens = [token for event in events if isinstance(event, Tokens) for token in event.token_ids]
    return tokens, any(isinstance(event, Recovering) for event in events)


async def test_contexts_are_restored_with_equal_answers() -> None:
    persistence = MemoryLasting()
    async with running(persistence) as engine:
        await ingest(engine, "book", 50)
        await ingest(engine, "book", 21, append=True)
        await engine.fork_context("book", "twig", 33)
        await engine.update_context("twig", ContextSettings(display_name="a twig", is_pinned=True))
        await ingest(engine, "twig", 9, append=True)
        before = {view.id: view for view in engine.list_contexts()}
        answers = {name: await ask(engine, name) for name in before}
    async with running(persistence) as engine:
        found = {view.id: view for view in engine.list_contexts()}
        assert found.keys() == before.keys() == {"book", "twig"}
        for name, view in found.items():
            assert (view.state, view.kv_bytes, view.storage_bytes > 0) == ("evicted", 0, True)
            assert (view.tokens, view.display_name, view.is_pinned) == (
                before[name].tokens,
                before[name].display_name,
                before[name].is_pinned,
            )
            assert await ask(engine, name) == (answers[name][0], True)
            assert await ask(engine, name) == (answers[name][0], False)
            assert engine.get_context(name).state == "resident"
        engine.audit()


async def test_epoch_and_segment_numbers_continue() -> None:
    persistence = MemoryLasting()
    async with running(persistence) as engine:
        await ingest(engine, "a", 8)
        epoch = engine.cluster().epoch
        await engine.delete_context("a")
    assert not persistence.contents.segments
    ranks = FakeRanks(2, 100)
    async with running(persistence, ranks) as engine:
        assert engine.cluster().epoch == epoch + 1
        await ingest(engine, "a", 8)
        ranks.lose(1, "is gone")
        await comes_to(engine, lambda: engine.cluster().epoch == epoch + 2)
    assert persistence.contents.epoch == epoch + 2
    assert min(segment.id for segment in persistence.contents.segments) > 0


class SlowRendezvousRanks(FakeRanks):
    """Ranks whose rendezvous succeeds at the third attempt."""

    async def form(self, epoch: int) -> Formation:
        return await super().form(epoch + 2 if epoch > FIRST_EPOCH else epoch)


async def test_epoch_numbers_continue_after_several_attempts() -> None:
    persistence, ranks = MemoryLasting(), SlowRendezvousRanks(2, 100)
    async with running(persistence, ranks) as engine:
        epoch = engine.cluster().epoch
        ranks.lose(1, "is gone")
        await comes_to(engine, lambda: engine.cluster().epoch == epoch + 3)
    assert persistence.contents.epoch == epoch + 3


async def test_changes_are_acknowledged_only_after_they_are_written() -> None:
    persistence = MemoryLasting()
    async with running(persistence) as engine:
        persistence.catalog.hold()
        reading = asyncio.create_task(ingest(engine, "book", 40))
        await comes_to(engine, lambda: engine.cluster().running == 1 and engine.cluster().workers[0].tokens > 0)
        await asyncio.sleep(0)
        with pytest.raises(NotFound):
            engine.get_context("book")
        with pytest.raises(AlreadyExists):
            await ingest(engine, "book", 4)
        assert (await ask_alone(engine)) and not reading.done(), "steps continue meanwhile"
        persistence.catalog.release()
        await reading
        assert engine.get_context("book").tokens == 40


async def ask_alone(engine: Engine) -> list[int]:
    prompt = Prompt(context=None, token_ids=(1, 2), sampling=SamplingParams(max_tokens=4))
    events = [event async for event in engine.submit(prompt)]
    return [token for event in events if isinstance(event, Tokens) for token in event.token_ids]


async def test_changes_that_cannot_be_written_are_refused() -> None:
    persistence = MemoryLasting()
    async with running(persistence) as engine:
        await ingest(engine, "book", 40)
        before = engine.get_context("book")
        persistence.catalog.failures += [StorageUnavailable("the disk is full")] * 5
        with pytest.raises(StorageUnavailable):
            await ingest(engine, "other", 8)
        with pytest.raises(StorageUnavailable):
            await ingest(engine, "book", 8, append=True)
        with pytest.raises(StorageUnavailable):
            await engine.fork_context("book", "twig")
        with pytest.raises(StorageUnavailable):
            await engine.update_context("book", ContextSettings(display_name="x", is_pinned=True, ttl=3.0))
        assert engine.list_contexts() == [before]
        with pytest.raises(StorageUnavailable):
            await engine.delete_context("book")
        (view,) = engine.list_contexts()
        assert (view.id, view.tokens, view.state) == ("book", 40, "evicted")
        assert not persistence.journal.forgotten
        engine.audit()
        assert not persistence.catalog.failures
        assert (await ask(engine, "book"))[1]
        await engine.fork_context("book", "twig")
        await engine.delete_context("book")
        assert persistence.journal.forgotten == ["book"]
    assert list(persistence.contexts) == ["twig"]


@pytest.mark.parametrize("name", ["waits", "is written"])
async def test_changes_complete_after_the_client_disconnects(name: str) -> None:
    """A client that disconnects or times out asks again, and then gets the true state, also from the next service."""
    persistence = MemoryLasting()
    async with running(persistence) as engine:
        for context in ("book", "other", "third"):
            await ingest(engine, context, 8)
        persistence.catalog.hold()
        first = asyncio.create_task(engine.update_context("third", ContextSettings(display_name="before the others")))
        if name == "is written":
            await asyncio.sleep(0)
        calls = [
            asyncio.create_task(engine.fork_context("book", "twig")),
            asyncio.create_task(engine.delete_context("other")),
            asyncio.create_task(engine.update_context("book", ContextSettings(display_name="a name"))),
        ]
        await asyncio.sleep(0)
        for call in (*calls, first):
            call.cancel()
        await asyncio.gather(*calls, first, return_exceptions=True)
        persistence.catalog.release()
        with pytest.raises(NotFound):
            await engine.delete_context("other")
        with pytest.raises(AlreadyExists):
            await engine.fork_context("book", "twig")
    async with running(persistence) as engine:
        found = {view.id: view.display_name for view in engine.list_contexts()}
        assert found == {"book": "a name", "twig": "", "third": "before the others"}


async def test_context_deleted_during_a_write_is_absent() -> None:
    persistence = MemoryLasting()
    async with running(persistence) as engine:
        await ingest(engine, "book", 8)
        persistence.catalog.hold()
        calls = [
            asyncio.create_task(engine.update_context("book", ContextSettings(display_name="a name"))),
            asyncio.create_task(engine.fork_context("book", "twig")),
        ]
        await asyncio.sleep(0)
        calls += [asyncio.create_task(engine.delete_context(name)) for name in ("book", "twig")]
        await asyncio.sleep(0)
        persistence.catalog.release()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(one) for one in outcomes] == [NotFound, NotFound, type(None), type(None)]
    assert not persistence.contexts


async def test_deleted_context_stays_deleted_if_its_journal_remains() -> None:
    persistence = MemoryLasting()
    async with running(persistence) as engine:
        await ingest(engine, "book", 8)
        await ingest(engine, "other", 8)
        persistence.journal.failures = [StorageUnavailable("input/output error")]
        await engine.delete_context("book")
        assert ([view.id for view in engine.list_contexts()], list(persistence.contexts)) == (["other"], ["other"])
        await engine.delete_context("other")
        assert sorted(persistence.journal.forgotten) == ["book", "other"]


async def test_failed_write_of_a_use_is_retried() -> None:
    persistence, times = MemoryLasting(), itertools.count(10.0)
    async with running(persistence, wall_clock=lambda: next(times)) as engine:
        await ingest(engine, "book", 8)
        await ask(engine, "book")
        persistence.catalog.failures = [StorageUnavailable("the disk is full")]
        await engine._store._save_uses()
        (record,) = persistence.contents.contexts
        assert record.num_hits == 0
        await engine._store._save_uses()
        (record,) = persistence.contents.contexts
        assert record.num_hits == 1


async def test_cancelled_ingest_is_absent_after_its_write() -> None:
    persistence = MemoryLasting()
    async with running(persistence) as engine:
        await ingest(engine, "book", 8)
        persistence.catalog.hold()
        for document in (
            DocumentPrompt(context="new", token_ids=[1, 2, 3]),
            DocumentPrompt(context="book", token_ids=[1, 2, 3], append=True),
        ):
            stream = engine.ingest(document)
            await comes_to(engine, lambda: unsealed_streams(engine) == [False])
            stream.cancel()
        persistence.catalog.release()
        await engine.update_context("book", ContextSettings(display_name="changes are written in order"))
        assert [view.tokens for view in engine.list_contexts()] == [8]
    assert persistence.contexts == {"book": 8}


def unsealed_streams(engine: Engine) -> list[bool]:
    """For each open request, whether its segment is not sealed yet."""
    scheduler = engine._scheduler
    assert scheduler is not None
    return [not job.prefill.is_over for job in scheduler._requests.jobs()]


async def test_concurrent_changes_are_all_written() -> None:
    persistence = MemoryLasting()
    async with running(persistence) as engine:
        await ingest(engine, "book", 8)
        persistence.catalog.hold()
        reading = asyncio.create_task(ingest(engine, "book", 9, append=True))
        await comes_to(engine, lambda: unsealed_streams(engine) == [False])
        changing = asyncio.create_task(engine.update_context("book", ContextSettings(display_name="a name")))
        forking = asyncio.create_task(engine.fork_context("book", "twig"))
        await asyncio.sleep(0)
        persistence.catalog.release()
        await asyncio.gather(reading, changing, forking)
    async with running(persistence) as engine:
        found = {view.id: (view.tokens, view.display_name) for view in engine.list_contexts()}
        assert found == {"book": (17, "a name"), "twig": (8, "")}


async def test_idle_contexts_are_evicted_for_space() -> None:
    persistence = MemoryLasting()
    ranks = FakeRanks(2, 12)  # 96 tokens
    async with running(persistence, ranks) as engine:
        for name in ("a", "b", "c"):
            await ingest(engine, name, 40)
        states = {view.id: view.state for view in engine.list_contexts()}
        assert states == {"a": "evicted", "b": "resident", "c": "resident"}
        _, was_restored = await ask(engine, "a")
        assert was_restored
        assert {view.id: view.state for view in engine.list_contexts()} == {
            "a": "resident",
            "b": "evicted",
            "c": "resident",
        }
        await engine.update_context("a", ContextSettings(is_pinned=True))
        await engine.update_context("c", ContextSettings(is_pinned=True))
        with pytest.raises(ResourceExhausted, match="pool"):
            await ask(engine, "b")
        assert {view.id: view.state for view in engine.list_contexts()} == {
            "a": "resident",
            "b": "evicted",
            "c": "resident",
        }
        await engine.update_context("c", ContextSettings(is_pinned=False))
        assert (await ask(engine, "b"))[1]
        assert {view.id: view.state for view in engine.list_contexts()} == {
            "a": "resident",
            "b": "resident",
            "c": "evicted",
        }
        engine.audit()


async def test_concurrent_requests_restore_a_context_once() -> None:
    persistence = MemoryLasting()
    async with running(persistence) as engine:
        await ingest(engine, "book", 200)
    ranks = FakeRanks(2, 100)
    async with running(persistence, ranks) as engine:
        answers = await asyncio.gather(*(ask(engine, "book", count) for count in range(1, 21)))
        assert all(was_restored for _, was_restored in answers)
    read = [len(plan.work.token_ids) for plan in ranks.plans if hasattr(plan.work, "pieces")]
    assert sum(read) < 200 + 20 * 21


async def test_contexts_are_preloaded_while_there_is_space() -> None:
    persistence, times = MemoryLasting(), itertools.count(10.0)
    async with running(persistence, wall_clock=lambda: next(times)) as engine:
        for name in ("a", "b", "c"):
            await ingest(engine, name, 40)
        await ask(engine, "a")
    async with running(persistence, FakeRanks(2, 12)) as engine:
        engine.preload()
        await comes_to(engine, lambda: engine.cluster().workers[0].tokens + engine.cluster().workers[1].tokens == 80)
        states = {view.id: view.state for view in engine.list_contexts()}
        assert states == {"a": "resident", "b": "evicted", "c": "resident"}


async def test_use_of_contexts_is_written() -> None:
    persistence = MemoryLasting()
    async with running(persistence) as engine:
        await ingest(engine, "book", 8)
        for _ in range(3):
            await ask(engine, "book")
        assert engine.get_context("book").hits == 3
        probe = Prompt(
            context="book", token_ids=(1, 2), sampling=SamplingParams(max_tokens=1), is_probe=True, num_scored=1
        )
        assert [event async for event in engine.submit(probe)]  # a probe does not count as a use
        assert engine.get_context("book").hits == 3
    async with running(persistence) as engine:
        view = engine.get_context("book")
        assert (view.hits, view.used) == (3, 12.0)


async def test_fewer_ranks_evict_contexts_that_do_not_fit() -> None:
    persistence = MemoryLasting()
    ranks = FakeRanks(2, 12)
    async with running(persistence, ranks) as engine:
        await ingest(engine, "a", 40)
        await ingest(engine, "b", 40)
        ranks.lose(1, "is gone")
        await comes_to(engine, lambda: engine.cluster().world_size == 1)
        await comes_to(engine, lambda: "restoring" not in {view.state for view in engine.list_contexts()})
        assert {view.id: view.state for view in engine.list_contexts()} == {"a": "evicted", "b": "resident"}
        tokens, was_restored = await ask(engine, "a")
        assert tokens and was_restored
        engine.audit()
