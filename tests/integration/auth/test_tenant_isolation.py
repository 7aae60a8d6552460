"""Two tenants with the same names: the lists, statuses and tokens of one tenant do not depend on the other."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longleaf.credentials import Quotas
from tests.support import gated
from tests.support.apart import SCRIPT, TEXTS, Responses, Step, generate, ingest, play
from tests.support.fakes.ranks import FakeRanks
from tests.support.tenants import ACME, BOLT, OPS, credentials


async def served(folder: Path, scripts: dict[str, Sequence[Step]], **quotas: Quotas) -> dict[str, Responses]:
    """The results of each tenant when all run their scripts concurrently, and one answer runs at a time."""
    ranks = FakeRanks(2, 400, vocab=gated.VOCAB)
    options: dict[str, Any] = {"chunk_size": 8, "replicate_below": 4, "world_size": 2, "max_sequences": 1}
    async with gated.serving(ranks, folder / "model", authenticator=credentials(folder, **quotas), **options) as (
        _,
        at,
    ):
        found = await asyncio.gather(*(play(at, tenant, script) for tenant, script in scripts.items()))
    return dict(zip(scripts, found, strict=True))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acme=SCRIPT, bolt=SCRIPT, ops=SCRIPT)
def test_each_tenant_gets_the_same_results_as_without_the_other(
    tmp_path: Path, acme: list[Step], bolt: list[Step], ops: list[Step]
) -> None:
    ops = [step for step in ops if step[0] == "Generate"]  # an admin sees how full ranks are
    scripts: dict[str, Sequence[Step]] = {ACME: acme, BOLT: bolt, OPS: ops}
    together = asyncio.run(served(tmp_path, scripts))
    for tenant, script in scripts.items():
        alone = asyncio.run(served(tmp_path, {tenant: script}))
        assert together[tenant] == alone[tenant], tenant


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acme=SCRIPT, bolt=SCRIPT, most=st.integers(0, 2))
def test_quota_of_one_tenant_does_not_affect_the_other(
    tmp_path: Path, acme: list[Step], bolt: list[Step], most: int
) -> None:
    quotas = {BOLT: Quotas(contexts=most, generations=1, waiting=most)}
    together = asyncio.run(served(tmp_path, {ACME: acme, BOLT: bolt}, **quotas))
    assert together[ACME] == asyncio.run(served(tmp_path, {ACME: acme}))[ACME]
    for name, code, _, reported in together[BOLT]:
        if code == StatusCode.RESOURCE_EXHAUSTED:
            assert reported.startswith("quotas/"), (name, reported)


async def test_prefixes_are_shared_between_tenants_only_if_allowed(tmp_path: Path) -> None:
    """Tenant bolt sends the prompt that acme has just sent; the answer reports the number of cached tokens."""
    step = generate(None, TEXTS[0], "one")
    for shares, resident in ((False, 0), (True, len(TEXTS[0]) // 4 * 4)):
        ranks = FakeRanks(1, 400, vocab=gated.VOCAB)
        options: dict[str, Any] = {"chunk_size": 8, "replicate_below": 4, "share_prefixes": shares}
        folder = tmp_path / str(shares)
        async with gated.serving(ranks, folder / "model", authenticator=credentials(folder), **options) as (_, address):
            await play(address, ACME, [step])
            [(_, code, found, _)] = await play(address, BOLT, [step])
            [(_, _, again, _)] = await play(address, BOLT, [generate(None, TEXTS[0], "two")])
        assert code == StatusCode.OK
        cached = [each["started"].get("cachedTokenCount", 0) for each in found if "started" in each]
        assert [bool(count) for count in cached] == [bool(resident)] * len(cached)
        assert any(each["started"].get("cachedTokenCount", 0) for each in again if "started" in each)


@pytest.mark.parametrize("tenant", [ACME, BOLT])
async def test_each_tenant_lists_only_its_own_objects(tmp_path: Path, tenant: str) -> None:
    ingests = {
        who: [("IngestContext", [{"config": {"name": f"contexts/{who}-{i}"}}, {"text": b"x"}]) for i in range(3)]
        for who in (ACME, BOLT)
    }
    scripts = {who: [*steps, ("ListContexts", [{"page_size": 2}])] for who, steps in ingests.items()}
    heard = (await served(tmp_path, scripts))[tenant]
    [page] = heard[-1][2]
    assert [each["name"] for each in page["contexts"]] == [f"contexts/{tenant}-0", f"contexts/{tenant}-1"]


async def test_refusal_for_capacity_contains_no_figures_of_other_tenants(tmp_path: Path) -> None:
    """Bolt gets the same refusal for a document without capacity, with and without contexts of acme."""
    reported = set[str]()
    for size in (400, 900):
        steps = {ACME: ingest("contexts/book", "a" * size), BOLT: ingest("contexts/book", "b" * 2900)}
        ranks = FakeRanks(2, 400, vocab=gated.VOCAB)
        options: dict[str, Any] = {"chunk_size": 8, "replicate_below": 4, "world_size": 2}
        async with gated.serving(
            ranks, tmp_path / "model", authenticator=credentials(tmp_path / str(size)), **options
        ) as (_, address):
            [(_, code, _, _)] = await play(address, ACME, [steps[ACME]])
            assert code == StatusCode.OK
            [(_, code, _, text)] = await play(address, BOLT, [steps[BOLT]])
        assert code == StatusCode.RESOURCE_EXHAUSTED
        reported.add(text)
    assert len(reported) == 1, reported
