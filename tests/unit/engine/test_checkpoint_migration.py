"""Contexts of an earlier checkpoint are recomputed for the served checkpoint."""

import asyncio
import threading
from array import array
from contextlib import AbstractContextManager, nullcontext

import pytest
from msgspec.structs import replace

from coordinator.engine.checkpoint_migration import anew
from coordinator.kv_cache.positions import Positions
from coordinator.persistence.catalog.records import CatalogContents, SegmentRecord
from coordinator.persistence.catalog.stale_contexts import StaleContext
from longleaf.errors import AlreadyExists, CheckpointChanged, DataLoss, NotFound, ResourceExhausted
from longleaf.positions import Rope, Rotary
from tests.support.catalog import context
from tests.support.lasting import MemoryLasting
from tests.unit.engine.test_adopting import ask, ingest, running

VOCABULARY = 200
SEGMENTS = (
    SegmentRecord(id=7, token_ids=array("I", range(30))),
    SegmentRecord(id=9, parent=7, start=20, token_ids=array("I", range(100, 125))),
)
BOOK = context("book", 9, 40, ends=(20, 40), display_name="a book", capacity=2_000)
TWIG = context("twig", 7, 12)
KEPT = CatalogContents(service_id="0" * 32, segments=SEGMENTS, contexts=(BOOK, TWIG))
POSITIONS = Positions(Rotary(), 3_000)


def earlier(record=BOOK, *differing: str, kept: CatalogContents = KEPT) -> StaleContext:
    return StaleContext(record=record, kept=kept, model="/model", differing=differing or ("model.safetensors",))


def of(*found: StaleContext) -> MemoryLasting:
    persistence = MemoryLasting()
    persistence.earlier = {each.record.id: each for each in found}
    return persistence


async def test_its_tokens_and_settings_are_there_and_are_read_when_it_is_asked() -> None:
    persistence = of(earlier())
    async with running(persistence) as engine:
        with pytest.raises(CheckpointChanged, match=r"model.safetensors in /model changed .*longleaf contexts reread"):
            await ask(engine, "book")
        view = await engine.reread_context("book", VOCABULARY)
        assert (view.id, view.tokens, view.state, view.display_name) == ("book", 40, "parked", "a book")
        assert view.positions.capacity == 2_000
        await ingest(engine, "same", [*range(20), *range(100, 120)])
        assert await ask(engine, "book") == await ask(engine, "same")
        with pytest.raises(AlreadyExists):
            await engine.reread_context("book", VOCABULARY)
        await engine.delete_context("book")
        with pytest.raises(NotFound):
            engine.get_context("book")
        engine.audit()
    assert [len(each.token_ids) for change in persistence.catalog.changes[:3] for each in change.segments][:2] == [
        20,
        20,
    ]


async def test_all_are_made_anew_but_those_that_cannot_be() -> None:
    lost = context("lost", 8, 5)
    persistence = of(earlier(), earlier(TWIG), earlier(lost), earlier(context("other", 7, 9), "tokenizer.json"))
    persistence.earlier["taken"] = earlier(context("taken", 7, 9))
    async with running(persistence) as engine:
        await ingest(engine, "taken", [1, 2])
        found = await engine.reread_contexts(VOCABULARY)
        assert [(each.id, each.tokens) for each in found.contexts] == [("book", 40), ("twig", 12)]
        reported = {each.name: each.reason for each in found.left_out}
        assert list(reported) == ["lost", "other", "taken"]
        assert "segment 8 is missing" in reported["lost"]
        assert "ingest the text again" in reported["other"]
        assert "already exists" in reported["taken"]
        engine.audit()
    async with running(persistence) as engine:
        assert [each.id for each in engine.list_contexts()] == ["book", "taken", "twig"]


async def test_none_is_made_anew_for_which_its_tenant_has_no_room() -> None:
    requested = list[int]()

    def room(num_tokens: int) -> AbstractContextManager[None]:
        requested.append(num_tokens)
        if num_tokens > 20:
            raise ResourceExhausted("quotas/tokens", "no more")
        return nullcontext()

    async with running(of(earlier(), earlier(TWIG))) as engine:
        with pytest.raises(ResourceExhausted):
            await engine.reread_context("book", VOCABULARY, room)
        found = await engine.reread_contexts(VOCABULARY, room=room)
        assert [each.id for each in found.contexts] == ["twig"]
        assert [(each.name, "quotas/tokens" in each.reason) for each in found.left_out] == [("book", True)]
        assert [each.id for each in engine.list_contexts()] == ["twig"]
        engine.audit()
    assert requested == [40, 40, 12]


async def test_who_has_nothing_there_has_nothing_read() -> None:
    """All tenants' contexts are read whole, however many ask at once."""
    persistence = of(earlier())
    async with running(persistence) as engine:
        for _ in range(3):
            assert not (await engine.reread_contexts(VOCABULARY, "acme")).contexts
            with pytest.raises(NotFound):
                await engine.reread_context("acme/book", VOCABULARY)
        assert persistence.num_readings == 0
        found = await asyncio.gather(*(engine.reread_contexts(VOCABULARY) for _ in range(2)))
        assert [len(each.contexts) for each in found] == [1, 0]
        assert [each.name for each in found[1].left_out] == ["book"]
        num_readings = persistence.num_readings
        assert [each.name for each in (await engine.reread_contexts(VOCABULARY)).left_out] == ["book"]
        assert persistence.num_readings == num_readings


async def test_what_is_not_there_or_has_expired_is_not_found() -> None:
    persistence = of(earlier(replace(BOOK, expires=11.0)), earlier(replace(TWIG, expires=11.0, is_pinned=True)))
    async with running(persistence) as engine:
        for name in ("book", "other"):
            with pytest.raises((NotFound, CheckpointChanged)):
                await engine.reread_context(name, VOCABULARY)
        found = await engine.reread_contexts(VOCABULARY)
        assert [each.id for each in found.contexts] == ["twig"]
    async with running(None) as engine:
        with pytest.raises(NotFound):
            await engine.reread_context("book", VOCABULARY)
        assert not (await engine.reread_contexts(VOCABULARY)).contexts


def test_positions_are_those_of_contexts_that_are_made_now() -> None:
    graded = Positions(Rotary(kind="yarn", trained=3_000, scaled_from=1_000, is_graded=True), 3_000)
    record, path = anew(earlier(), graded, VOCABULARY)
    assert record.capacity == 2_000
    assert {segment.rope for segment in path} == {Rope(scaled_for=2_000)}
    record, path = anew(earlier(), Positions(Rotary(), 1_500), VOCABULARY)
    assert record.capacity == 1_500, "what it had is not allowed any more"
    assert replace(record, capacity=2_000) == BOOK
    assert [(segment.start, len(segment.token_ids)) for segment in path] == [(0, 20), (20, 20)]


def test_what_this_checkpoint_cannot_read_is_refused() -> None:
    with pytest.raises(
        CheckpointChanged, match=r"has 40 tokens; this checkpoint allows 39, the length that it was trained for"
    ):
        anew(earlier(), Positions(Rotary(), 39), VOCABULARY)
    with pytest.raises(CheckpointChanged, match="has token 119; this checkpoint has 119 tokens"):
        anew(earlier(), POSITIONS, 119)
    assert anew(earlier(), POSITIONS, 120)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        with pytest.raises(CheckpointChanged, match=rf"config.json, {name} in /model .* ingest the text again"):
            anew(earlier(BOOK, "config.json", name), POSITIONS, VOCABULARY)
    with pytest.raises(DataLoss):
        anew(earlier(context("lost", 8, 5)), POSITIONS, VOCABULARY)


async def test_readings_that_nobody_waits_for_any_more_are_not_begun_anew() -> None:
    """All requests during a running recomputation share its result."""
    persistence, gate = of(earlier()), threading.Event()
    read = persistence.read_earlier

    def slowly() -> dict[str, StaleContext]:
        found = read()
        assert gate.wait(30)
        return found

    persistence.read_earlier = slowly  # type: ignore[method-assign]
    async with running(persistence) as engine:
        for _ in range(5):
            asking = asyncio.create_task(engine.reread_contexts(VOCABULARY))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
        asking = asyncio.create_task(engine.reread_contexts(VOCABULARY))
        gate.set()
        assert len((await asking).contexts) == 1
        assert persistence.num_readings == 1
