"""Contexts of an earlier checkpoint are recomputed for the served checkpoint."""

import asyncio
import threading
from array import array
from contextlib import AbstractContextManager, nullcontext

import pytest
from msgspec.structs import replace

from coordinator.kv_cache.positions import Positions
from coordinator.persistence.catalog.records import CatalogContents
from coordinator.persistence.catalog.stale_contexts import StaleContext
from coordinator.persistence.checkpoint_migration import retokenized
from longleaf.errors import AlreadyExists, CheckpointChanged, DataLoss, NotFound, ResourceExhausted
from longleaf.positions import Rope, Rotary
from longleaf.storage.segment_record import SegmentRecord
from tests.support.catalog import context
from tests.support.lasting import MemoryLasting
from tests.unit.persistence.test_context_adoption import ask, ingest, running

VOCABULARY = 200
SEGMENTS = (
    SegmentRecord(id=7, token_ids=array("I", range(30))),
    SegmentRecord(id=9, parent=7, start=20, token_ids=array("I", range(100, 125))),
)
BOOK = context("book", 9, 40, ends=(20, 40), display_name="a book", capacity=2_000)
TWIG = context("twig", 7, 12)
CATALOG = CatalogContents(service_id="0" * 32, segments=SEGMENTS, contexts=(BOOK, TWIG))
POSITIONS = Positions(Rotary(), 3_000)


def stale(record=BOOK, *differing: str, catalog: CatalogContents = CATALOG) -> StaleContext:
    return StaleContext(record=record, contents=catalog, model="/model", differing=differing or ("model.safetensors",))


def persistence_with(*found: StaleContext) -> MemoryLasting:
    persistence = MemoryLasting()
    persistence.earlier = {each.record.id: each for each in found}
    return persistence


async def test_recomputed_context_keeps_tokens_and_settings() -> None:
    persistence = persistence_with(stale())
    async with running(persistence) as engine:
        with pytest.raises(
            CheckpointChanged, match=r"model.safetensors in /model changed .*longleaf contexts recompute"
        ):
            await ask(engine, "book")
        view = await engine.recompute_context("book", VOCABULARY)
        assert (view.id, view.tokens, view.state, view.display_name) == ("book", 40, "evicted", "a book")
        assert view.positions.capacity == 2_000
        await ingest(engine, "same", [*range(20), *range(100, 120)])
        assert await ask(engine, "book") == await ask(engine, "same")
        with pytest.raises(AlreadyExists):
            await engine.recompute_context("book", VOCABULARY)
        await engine.delete_context("book")
        with pytest.raises(NotFound):
            engine.get_context("book")
        engine.audit()
    assert [len(each.token_ids) for change in persistence.catalog.changes[:3] for each in change.segments][:2] == [
        20,
        20,
    ]


async def test_all_stale_contexts_are_recomputed_if_possible() -> None:
    lost = context("lost", 8, 5)
    persistence = persistence_with(stale(), stale(TWIG), stale(lost), stale(context("other", 7, 9), "tokenizer.json"))
    persistence.earlier["taken"] = stale(context("taken", 7, 9))
    async with running(persistence) as engine:
        await ingest(engine, "taken", [1, 2])
        found = await engine.recompute_contexts(VOCABULARY)
        assert [(each.id, each.tokens) for each in found.contexts] == [("book", 40), ("twig", 12)]
        reported = {each.name: each.reason for each in found.skipped}
        assert list(reported) == ["lost", "other", "taken"]
        assert "segment 8 is missing" in reported["lost"]
        assert "ingest the text again" in reported["other"]
        assert "already exists" in reported["taken"]
        engine.audit()
    async with running(persistence) as engine:
        assert [each.id for each in engine.list_contexts()] == ["book", "taken", "twig"]


async def test_recompute_respects_quotas() -> None:
    requested = list[int]()

    def room(num_tokens: int) -> AbstractContextManager[None]:
        requested.append(num_tokens)
        if num_tokens > 20:
            raise ResourceExhausted("quotas/tokens", "no more")
        return nullcontext()

    async with running(persistence_with(stale(), stale(TWIG))) as engine:
        with pytest.raises(ResourceExhausted):
            await engine.recompute_context("book", VOCABULARY, room)
        found = await engine.recompute_contexts(VOCABULARY, room=room)
        assert [each.id for each in found.contexts] == ["twig"]
        assert [(each.name, "quotas/tokens" in each.reason) for each in found.skipped] == [("book", True)]
        assert [each.id for each in engine.list_contexts()] == ["twig"]
        engine.audit()
    assert requested == [40, 40, 12]


async def test_tenant_without_stale_contexts_causes_no_read() -> None:
    """The contexts of all tenants are read completely; concurrent requests share the read."""
    persistence = persistence_with(stale())
    async with running(persistence) as engine:
        for _ in range(3):
            assert not (await engine.recompute_contexts(VOCABULARY, "acme")).contexts
            with pytest.raises(NotFound):
                await engine.recompute_context("acme/book", VOCABULARY)
        assert persistence.num_readings == 0
        found = await asyncio.gather(*(engine.recompute_contexts(VOCABULARY) for _ in range(2)))
        assert [len(each.contexts) for each in found] == [1, 0]
        assert [each.name for each in found[1].skipped] == ["book"]
        num_readings = persistence.num_readings
        assert [each.name for each in (await engine.recompute_contexts(VOCABULARY)).skipped] == ["book"]
        assert persistence.num_readings == num_readings


async def test_missing_or_expired_context_is_not_found() -> None:
    persistence = persistence_with(
        stale(replace(BOOK, expires=11.0)), stale(replace(TWIG, expires=11.0, is_pinned=True))
    )
    async with running(persistence) as engine:
        for name in ("book", "other"):
            with pytest.raises((NotFound, CheckpointChanged)):
                await engine.recompute_context(name, VOCABULARY)
        found = await engine.recompute_contexts(VOCABULARY)
        assert [each.id for each in found.contexts] == ["twig"]
    async with running(None) as engine:
        with pytest.raises(NotFound):
            await engine.recompute_context("book", VOCABULARY)
        assert not (await engine.recompute_contexts(VOCABULARY)).contexts


def test_recomputed_contexts_use_current_positions() -> None:
    graded = Positions(Rotary(kind="yarn", trained=3_000, scaled_from=1_000, is_graded=True), 3_000)
    record, path = retokenized(stale(), graded, VOCABULARY)
    assert record.capacity == 2_000
    assert {segment.rope for segment in path} == {Rope(scaled_for=2_000)}
    record, path = retokenized(stale(), Positions(Rotary(), 1_500), VOCABULARY)
    assert record.capacity == 1_500, "the earlier capacity is no longer allowed"
    assert replace(record, capacity=2_000) == BOOK
    assert [(segment.start, len(segment.token_ids)) for segment in path] == [(0, 20), (20, 20)]


def test_incompatible_contexts_are_refused() -> None:
    with pytest.raises(
        CheckpointChanged, match=r"has 40 tokens; this checkpoint allows 39, the length that it was trained for"
    ):
        retokenized(stale(), Positions(Rotary(), 39), VOCABULARY)
    with pytest.raises(CheckpointChanged, match="has token 119; this checkpoint has 119 tokens"):
        retokenized(stale(), POSITIONS, 119)
    assert retokenized(stale(), POSITIONS, 120)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        with pytest.raises(CheckpointChanged, match=rf"config.json, {name} in /model .* ingest the text again"):
            retokenized(stale(BOOK, "config.json", name), POSITIONS, VOCABULARY)
    with pytest.raises(DataLoss):
        retokenized(stale(context("lost", 8, 5)), POSITIONS, VOCABULARY)


async def test_abandoned_recomputation_is_not_restarted() -> None:
    """All requests during a running recomputation share its result."""
    persistence, gate = persistence_with(stale()), threading.Event()
    read = persistence.read

    def read_slowly() -> dict[str, StaleContext]:
        found = read()
        assert gate.wait(30)
        return found

    persistence.read = read_slowly  # type: ignore[method-assign]
    async with running(persistence) as engine:
        for _ in range(5):
            asking = asyncio.create_task(engine.recompute_contexts(VOCABULARY))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
        asking = asyncio.create_task(engine.recompute_contexts(VOCABULARY))
        gate.set()
        assert len((await asking).contexts) == 1
        assert persistence.num_readings == 1
