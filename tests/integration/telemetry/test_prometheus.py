"""Metrics, dashboard and alerts as a real Prometheus sees them."""

import asyncio
import json
import math
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.measured import Measured, measured
from tests.support.prometheus import Prometheus, scraping
from tests.support.tenants import ACME
from tests.support.tools import tool

pytestmark = pytest.mark.timeout(120)
OPS = Path(__file__).parents[3] / "ops"
RULES = OPS / "prometheus" / "rules.yml"
NOT_HERE = {
    "longleaf_certificate_expiry_timestamp_seconds": "the service has no TLS",
    "longleaf_merge_seconds": "ranks that compute nothing merge nothing",
}


def panels() -> dict[str, str]:
    """Queries of the dashboard by panel, with all variables set to everything."""
    found = dict[str, str]()
    for panel in json.loads((OPS / "grafana" / "longleaf.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            requested = re.sub(r"\$(model|tenant)\b", ".*", target["expr"]).replace("$__rate_interval", "30s")
            found[f"{panel['title']} {target['refId']}"] = requested
    return found


def alerts() -> dict[str, str]:
    rules = yaml.safe_load(RULES.read_text())
    return {rule["alert"]: rule["expr"] for group in rules["groups"] for rule in group["rules"]}


def can_be_here(expression: str) -> bool:
    return not any(name in expression for name in NOT_HERE)


async def load_twice(service: Measured, prometheus: Prometheus) -> None:
    """Prometheus must scrape every counter before it grows, otherwise it does not know the increase."""
    for count in (1, 2):
        await service.load(f"play-{count}")
        await prometheus.comes(f"sum(longleaf_refused_credentials_total) == {count}")


async def test_every_dashboard_query_returns_data(tmp_path: Path) -> None:
    async with measured(tmp_path) as service, scraping(service.url, RULES, tmp_path / "prometheus") as prometheus:
        await service.ingest(ACME, "other")
        await load_twice(service, prometheus)
        for title, requested in panels().items():
            found = await prometheus.query(requested)
            assert bool(found) == can_be_here(requested), (title, requested)
            if found and "rate(" in requested and "_bucket" in requested and "step" not in requested:
                assert not math.isnan(float(found[0]["value"][1])), (title, requested)
        for title, requested in alerts().items():
            await prometheus.query(requested)
            for name in re.findall(r"longleaf_\w+", requested):
                assert bool(await prometheus.query(name)) == can_be_here(name), (title, name)
        [target] = (await prometheus.get("targets"))["activeTargets"]
        assert target["lastError"] == ""
        groups = (await prometheus.get("rules"))["groups"]
        assert {rule["name"] for group in groups for rule in group["rules"]} == set(alerts())
        values = {
            'sum(longleaf_generated_tokens_total{tenant="acme"})': 64,
            "sum(longleaf_ranks)": 2,
            'sum(longleaf_requests_total{kind="Generate", code="OK"})': 14,
        }
        assert {requested: await prometheus.value(requested) for requested in values} == values


async def test_metrics_pass_the_checks_of_prometheus(tmp_path: Path) -> None:
    program = tool("promtool")
    async with measured(tmp_path) as service:
        await service.load()
        text = (await service.scrape()).text
    process = await asyncio.create_subprocess_exec(
        program, "check", "metrics", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output, _ = await process.communicate(text.encode())
    assert (process.returncode, output) == (0, b"")


@pytest.mark.parametrize("check", [("check", "rules", "rules.yml"), ("test", "rules", "rules.test.yml")])
def test_alerts_fire_when_they_should(check: tuple[str, ...]) -> None:
    *command, file = check
    done = subprocess.run(
        [tool("promtool"), *command, str(RULES.with_name(file))], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
