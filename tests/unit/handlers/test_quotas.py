"""Quotas of tenants in long calls: unfinished objects count, and a refused request evicts nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from coordinator.auth.caller import CALLER, Caller
from coordinator.auth.quotas import QuotaEnforcer
from coordinator.auth.tenant_usage import TenantUsage
from coordinator.handlers.application import Application
from coordinator.handlers.prompt_encoder import Prompts
from coordinator.handlers.transfer.imports import ImportSessions
from longleaf.credentials import Quotas
from longleaf.errors import ResourceExhausted
from longleaf.sampling import SamplingParams
from longleaf.types import Generate, ImportHeader, ImportProgress, IngestHeader, IngestPiece
from tests.support.archives import packable
from tests.support.service import FakeEngine, load_tokenizer, write_model
from tests.support.transfer_engines import empty_transfer_engine, sending

pytestmark = pytest.mark.timeout(60)
MOBY = packable()
WHOLE = MOBY.packed()


class Importer:
    """Imports into an engine, and a ledger of the expected quota use."""

    def __init__(self, **quotas: int) -> None:
        self.quotas, self.engine = Quotas(**quotas), empty_transfer_engine()
        self.enforcer = QuotaEnforcer(self._usage, lambda: 0.0, lambda tenant: self.imports.num_of(tenant))
        self.imports = ImportSessions(
            self.engine, 1 << 17, wall_clock=lambda: 10.0, quotas=self.enforcer, max_imports=2
        )

    def _usage(self, _: str) -> TenantUsage:
        contexts = [stored.context for stored in self.engine.contexts.values()]
        return TenantUsage(contexts=len(contexts), tokens=sum(context.num_tokens for context in contexts))

    async def arrive(self, name: str, upload_id: str = "", end: int | None = None) -> list[ImportProgress]:
        CALLER.set(Caller(tenant="acme", quotas=self.quotas))
        header = ImportHeader(context=name, upload_id=upload_id, tenant="acme")
        async with aclosing(self.imports.run(sending(header, WHOLE, end=end))) as reports:
            return [report async for report in reports]


async def test_concurrent_imports_respect_the_context_quota() -> None:
    importer = Importer(contexts=1)
    found = await asyncio.gather(importer.arrive("one"), importer.arrive("two"), return_exceptions=True)
    refused = [each for each in found if isinstance(each, ResourceExhausted)]
    assert ["quotas/contexts" in str(each) for each in refused] == [True]
    assert len(importer.engine.contexts) == 1
    await importer.imports.close()
    assert importer.engine.num_imports == 0


async def test_imported_tokens_count_towards_the_rate() -> None:
    importer = Importer(tokens_in_per_minute=MOBY.head.num_tokens - 1)
    await importer.arrive("one")
    with pytest.raises(ResourceExhausted, match="quotas/tokens_in_per_minute"):
        await importer.arrive("two")
    await importer.imports.close()


async def test_refused_upload_evicts_no_other() -> None:
    importer = Importer(uploads=1)
    CALLER.set(Caller(tenant="bolt"))
    retained = importer.imports.run(sending(ImportHeader(context="kept", upload_id="kept", tenant="bolt"), WHOLE))
    await anext(retained)
    await retained.aclose()
    listening = importer.imports.run(sending(ImportHeader(context="open", tenant="acme"), WHOLE))
    CALLER.set(Caller(tenant="acme", quotas=importer.quotas))
    await anext(listening)
    with pytest.raises(ResourceExhausted, match="quotas/uploads"):
        await importer.arrive("third")
    assert importer.imports.num_of("bolt") == 1, "its resumable import is still there"
    await listening.aclose()
    await importer.imports.close()


@pytest.fixture
async def application(tmp_path: Path) -> AsyncIterator[tuple[FakeEngine, Application]]:
    engine, transfer = FakeEngine(), empty_transfer_engine()
    tokenizer = load_tokenizer(write_model(tmp_path))
    application = Application(engine, tokenizer, engine.describe, transfers=transfer)
    yield engine, application
    await application.close()


async def ending(*pieces: IngestPiece) -> AsyncIterator[IngestPiece]:
    for piece in pieces:
        yield piece


async def silent(*pieces: IngestPiece) -> AsyncIterator[IngestPiece]:
    for piece in pieces:
        yield piece
    await asyncio.Event().wait()


async def test_ingests_and_imports_share_the_quota(application: tuple[FakeEngine, Application]) -> None:
    _, calls = application
    CALLER.set(Caller(tenant="acme", quotas=Quotas(uploads=2)))
    ingest = calls.ingest.run(silent(IngestHeader("acme/one", tenant="acme")))
    await anext(ingest)
    importing = calls.imports.run(sending(ImportHeader(context="acme/two", tenant="acme"), WHOLE))
    await anext(importing)
    with pytest.raises(ResourceExhausted, match="quotas/uploads"):
        await anext(calls.ingest.run(silent(IngestHeader("acme/three", tenant="acme"))))
    with pytest.raises(ResourceExhausted, match="quotas/uploads"):
        await anext(calls.imports.run(sending(ImportHeader(context="acme/four", tenant="acme"), WHOLE)))
    await ingest.aclose()
    await importing.aclose()


@pytest.mark.parametrize("is_alone", [True, False])
async def test_scheduling_params_mark_a_caller_that_is_the_only_tenant(
    application: tuple[FakeEngine, Application], is_alone: bool
) -> None:
    engine, calls = application
    CALLER.set(Caller(tenant="acme", is_alone=is_alone))
    generation = calls.generation.run(
        Generate(context=None, input=(1, 2), sampling=SamplingParams(max_tokens=2), tenant="acme")
    )
    await anext(generation)
    await generation.aclose()
    ingest = calls.ingest.run(ending(IngestHeader("acme/one", tenant="acme"), (1, 2)))
    assert [report async for report in ingest][-1].context
    assert [engine.prompts[-1].scheduling.is_alone, engine.schedulings[-1].is_alone] == [is_alone] * 2


async def test_recomputed_contexts_count_towards_the_quota(application: tuple[FakeEngine, Application]) -> None:
    engine, calls = application
    engine.earlier = {f"acme/{name}": [1, 2, 3] for name in ("one", "two", "three")}
    CALLER.set(Caller(tenant="acme", quotas=Quotas(tokens=7)))
    found = await calls.recompute_contexts("acme")
    assert [each.id for each in found.contexts] == ["acme/one", "acme/three"]
    assert [(each.name, "quotas/tokens" in each.reason) for each in found.skipped] == [("acme/two", True)]
    with pytest.raises(ResourceExhausted, match="quotas/tokens"):
        await calls.recompute_context("acme/two")
    engine.contexts.clear()
    outcomes = await asyncio.gather(*map(calls.recompute_context, engine.earlier), return_exceptions=True)
    assert sum(isinstance(each, ResourceExhausted) for each in outcomes) == 1


@pytest.mark.parametrize("quotas", [{"generations": 0}, {"tokens_out_per_minute": 0}, {"tokens_in_per_minute": 0}])
async def test_prompt_refused_by_quotas_is_not_encoded(
    quotas: dict[str, int], application: tuple[FakeEngine, Application], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ids_of(*_: object) -> None:
        raise AssertionError("a conversation of megabytes would be rendered and encoded")

    monkeypatch.setattr(Prompts, "ids_of", ids_of)
    _, calls = application
    CALLER.set(Caller(tenant="acme", quotas=Quotas(**quotas)))
    generation = calls.generation.run(
        Generate(context=None, input="x", sampling=SamplingParams(max_tokens=2), tenant="acme")
    )
    with pytest.raises(ResourceExhausted, match=f"quotas/{next(iter(quotas))}"):
        await anext(generation)
