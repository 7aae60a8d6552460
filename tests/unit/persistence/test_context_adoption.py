"""Imported contexts that an engine adopts."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from msgspec.structs import replace

from coordinator.engine.engine import Engine
from coordinator.engine_messages import DocumentPrompt, Prompt, Tokens
from coordinator.persistence.catalog.records import SnapshotRecord
from coordinator.persistence.context_store import renumbered
from longleaf.config import EngineConfig
from longleaf.errors import AlreadyExists, NotFound, StorageUnavailable
from longleaf.positions import Rope
from longleaf.sampling import SamplingParams
from longleaf.storage.segment_record import SegmentRecord
from tests.support.catalog import context, segment
from tests.support.fakes.ranks import FakeRanks
from tests.support.gated import GatedRanks
from tests.support.lasting import MemoryLasting
from tests.support.running import running as run

pytestmark = pytest.mark.timeout(60)

CONFIG = EngineConfig(model="none", world_size=2, chunk_size=32, block_size=4, replicate_below=8)
PATH = (
    SegmentRecord(id=7, token_ids=array("I", range(30))),
    SegmentRecord(id=9, parent=7, start=20, token_ids=array("I", range(100, 125))),
)
"""The path of a context of 40 tokens that was forked at 20 and continued; its last segment has five unused tokens."""
BOOK = context("book", 9, 40, ends=(20, 40), display_name="a book", num_hits=3, capacity=2_000)


@asynccontextmanager
async def running(persistence: MemoryLasting | None, ranks: FakeRanks | None = None) -> AsyncIterator[Engine]:
    engine = Engine(ranks or FakeRanks(2, 100), CONFIG, 3000, durability=persistence, wall_clock=lambda: 12.0)
    async with run(engine) as found:
        yield found.engine


async def ingest(engine: Engine, name: str, ids: list[int]) -> None:
    async for _ in engine.ingest(DocumentPrompt(context=name, token_ids=ids)):
        pass


async def ask(engine: Engine, name: str) -> list[int]:
    prompt = Prompt(context=name, token_ids=(1, 2), sampling=SamplingParams(max_tokens=4))
    events = [event async for event in engine.submit(prompt)]
    return [token for event in events if isinstance(event, Tokens) for token in event.token_ids]


def test_segments_are_numbered_along_the_path() -> None:
    rope = Rope(4096, True)
    path = (segment(5, 30, rope=rope), segment(2, 9, parent=5, start=20, rope=rope), segment(8, 4, 2, 29, rope))
    snapshot = SnapshotRecord(segment=2, manifest="m", form="f", num_bytes=3)
    change = renumbered(context("a", 8, 31), path, (snapshot,), 40)
    assert [(each.id, each.parent, each.start, each.rope) for each in change.segments] == [
        (40, None, 0, rope),
        (41, 40, 20, rope),
        (42, 41, 29, rope),
    ]
    assert [each.token_ids for each in change.segments] == [each.token_ids for each in path]
    assert change.contexts == (context("a", 42, 31),)
    assert change.snapshots == (SnapshotRecord(segment=41, manifest="m", form="f", num_bytes=3),)


@pytest.mark.parametrize("is_durable", [True, False])
async def test_adopted_context_is_evicted_and_answers_like_an_ingested_one(is_durable: bool) -> None:
    persistence = MemoryLasting() if is_durable else None
    async with running(persistence) as engine:
        await ingest(engine, "other", list(range(8)))
        await engine._store.adopt(BOOK, PATH)
        view = engine.get_context("book")
        assert (view.tokens, view.state, view.display_name, view.hits) == (40, "evicted", "a book", 3)
        assert view.positions.capacity == 2_000
        await ingest(engine, "same", [*range(20), *range(100, 120)])
        assert await ask(engine, "book") == await ask(engine, "same")
        engine.audit()
    if persistence is not None:
        async with running(persistence) as engine:
            assert engine.get_context("book").tokens == 40
            (record,) = [each for each in persistence.contents.contexts if each.id == "book"]
            assert {each.id for each in persistence.contents.path(record)}.isdisjoint({7, 9, 0})
            assert len(await ask(engine, "book")) == 4
            engine.audit()


async def test_existing_name_is_refused_and_nothing_is_written() -> None:
    persistence = MemoryLasting()
    async with running(persistence) as engine:
        await ingest(engine, "book", [1, 2, 3])
        num_changes = len(persistence.catalog.changes)
        with pytest.raises(AlreadyExists, match="contexts/book"):
            await engine._store.adopt(BOOK, PATH)
        assert len(persistence.catalog.changes) == num_changes
        assert engine.get_context("book").tokens == 3


async def test_context_is_absent_if_it_cannot_be_written() -> None:
    persistence = MemoryLasting()
    async with running(persistence) as engine:
        persistence.catalog.failures.append(StorageUnavailable("the disk is full"))
        with pytest.raises(StorageUnavailable):
            await engine._store.adopt(BOOK, PATH)
        with pytest.raises(NotFound):
            engine.get_context("book")
        assert not persistence.contents.contexts
        engine.audit()
        await engine._store.adopt(BOOK, PATH)
        assert persistence.contexts == {"book": 40}


@pytest.mark.parametrize("is_fork", [True, False])
async def test_name_taken_during_adoption_stays_with_its_owner(is_fork: bool) -> None:
    persistence = MemoryLasting()
    async with running(persistence) as engine:
        await ingest(engine, "source", [1, 2, 3])
        persistence.catalog.hold()
        adopting = asyncio.create_task(engine._store.adopt(BOOK, PATH))
        await asyncio.sleep(0)  # it has begun
        await asyncio.sleep(0)
        taking = asyncio.create_task(_take(engine, is_fork))
        await _soon(lambda: _is_taken(engine))
        persistence.catalog.release()
        with pytest.raises(AlreadyExists):
            await adopting
        await taking
        assert engine.get_context("book").tokens == 3
        assert persistence.contexts == {"book": 3, "source": 3}
        engine.audit()


async def _soon(is_so: Callable[[], object]) -> None:
    """Runs the event loop until the condition holds."""
    for _ in range(1_000):
        if is_so():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")


async def _take(engine: Engine, is_fork: bool) -> None:
    if is_fork:
        await engine.fork_context("source", "book")
    else:
        await ingest(engine, "book", [1, 2, 3])


def _is_taken(engine: Engine) -> bool:
    try:
        engine._store.check_free("book")
    except AlreadyExists:
        return True
    return False


async def test_failed_ingest_of_the_same_name_leaves_nothing() -> None:
    persistence = MemoryLasting()
    async with running(persistence, GatedRanks()) as engine:  # they compute no step
        persistence.catalog.hold()
        adopting = asyncio.create_task(engine._store.adopt(BOOK, PATH))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        stream = engine.ingest(DocumentPrompt(context="book", token_ids=[1, 2, 3]))
        persistence.catalog.release()
        with pytest.raises(AlreadyExists):
            await adopting
        stream.cancel()
        assert len(persistence.catalog.changes) == 2
    assert not persistence.contents.contexts


async def test_adoption_completes_after_a_disconnect() -> None:
    persistence = MemoryLasting()
    async with running(persistence) as engine:
        persistence.catalog.hold()
        adopting = asyncio.create_task(engine._store.adopt(BOOK, PATH))
        await asyncio.sleep(0)
        adopting.cancel()
        with suppress(asyncio.CancelledError):
            await adopting
        persistence.catalog.release()
        await _soon(lambda: _is_taken(engine))
        assert engine.get_context("book").tokens == 40
    assert persistence.contexts == {"book": 40}


async def test_adopted_contexts_expire() -> None:
    persistence = MemoryLasting()
    async with running(persistence) as engine:
        await engine._store.adopt(replace(BOOK, expires=11.0), PATH)
        assert not engine.list_contexts()
        await _soon(lambda: not persistence.contexts)
