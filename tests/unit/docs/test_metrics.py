"""The metrics page, the dashboard and the alerts cover exactly the exported metrics."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace as changed
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families

from coordinator.engine_messages import Admitted, Ended, Tokens
from coordinator.telemetry.collector import Gauges
from coordinator.telemetry.counters import Counts
from coordinator.telemetry.metric_sources import MetricSources
from coordinator.telemetry.observers import CallRecord
from coordinator.telemetry.request_metrics import RequestMetrics
from gateway.metrics import GatewayMetrics
from longleaf.rank_protocol.group_messages import MergeTiming
from longleaf.sampling import Token
from tests.support.service import FakeEngine

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "operations.md").read_text()
DASHBOARD = json.loads((ROOT / "ops" / "grafana" / "longleaf.json").read_text())
RULES = yaml.safe_load((ROOT / "ops" / "prometheus" / "rules.yml").read_text())
SUFFIX = re.compile(r"_(bucket|sum|count)$")


def exported() -> dict[str, Metric]:
    """All metrics that a service may export, by their names in Prometheus without those of a histogram's parts."""
    registry, counts = CollectorRegistry(), Counts(snapshot_bytes=1)
    observer = RequestMetrics(registry, "m")
    with observer.observe_call(CallRecord("/longleaf.v1.GenerationService/Generate", "", {})):
        pass
    with observer.observe_generation("r", "acme") as emit:
        emit(Admitted(1, 0))
        emit(Tokens(0, (Token(1),)))
        emit(Tokens(1, (Token(1),)))
        emit(Ended("length", 1, 0, 2, 0.0, 0.0, 0.0))
    counts.add_step("decode", 1.0, 8)
    sources = MetricSources(
        cluster=lambda: changed(
            FakeEngine().cluster(), merge_timings=(MergeTiming(1, "gather", {"gather": 1.0}),), max_states=1
        ),
        counts=lambda: counts,
        ranks_lost=lambda: 0,
        refused_credentials=lambda: 0,
        rejected_connections=lambda: 0,
        failed_reloads={"credentials": lambda: 0},
        unusable_files={"credentials": lambda: False},
        certificate_expiry=lambda: 1.0,
    )
    gauges = Gauges(sources, "m", {"version": "1", "torch": "2", "launcher": "local"})
    registry.register(gauges)
    gauges.refresh()
    families = list(registry.collect())
    return {family.name + ("_total" if family.type == "counter" else ""): family for family in families}


async def gateway_metrics() -> dict[str, Metric]:
    """All metrics that a gateway exports, by name."""

    async def ignore(*_: object) -> None: ...

    metrics = GatewayMetrics(ignore)
    await metrics({"type": "http", "method": "GET"}, ignore, ignore)
    families = list(text_string_to_metric_families((await metrics.render()).decode()))
    return {family.name + ("_total" if family.type == "counter" else ""): family for family in families}


EXPORTED = exported()


def rows(title: str) -> list[list[str]]:
    """The cells of the table of a section of the page, without its head."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines[2:]]


def named(expression: str) -> set[str]:
    """The metrics that an expression uses."""
    return {SUFFIX.sub("", name) for name in re.findall(r"\blongleaf_\w+", expression)}


def expressions() -> list[str]:
    targets = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    variables = [each["query"]["query"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
    return targets + variables + [rule["expr"] for rule in alerts()]


def alerts() -> list[dict[str, Any]]:
    return [rule for group in RULES["groups"] for rule in group["rules"]]


def test_page_lists_exactly_the_exported_metrics() -> None:
    reported = [row[0].strip("`") for row in rows("Metrics")]
    assert len(reported) == len(set(reported))
    assert set(reported) == set(EXPORTED)


@pytest.mark.parametrize("row", rows("Metrics"), ids=lambda row: row[0])
def test_row_has_type_and_labels_of_its_metric(row: list[str]) -> None:
    name, kind, labels, meaning, _ = row
    family = EXPORTED[name.strip("`")]
    assert kind == family.type
    assert meaning
    found = {label for sample in family.samples for label in sample.labels if not sample.name.endswith("_created")}
    assert set(labels.split(", ")) == found - {"le"}


async def test_page_lists_all_metrics_of_a_gateway() -> None:
    found = await gateway_metrics()
    assert {row[0].strip("`") for row in rows("Metrics of a gateway")} == set(found)
    for name, kind, labels, meaning in rows("Metrics of a gateway"):
        family = found[name.strip("`")]
        assert (kind, set(filter(None, labels.split(", ")))) == (family.type, set(family.samples[0].labels))
        assert meaning and family.documentation.endswith(".")


def test_names_are_prefixed_and_have_units_and_no_colons() -> None:
    for name, family in EXPORTED.items():
        assert re.fullmatch(r"longleaf_[a-z0-9_]+", name)
        assert family.documentation.endswith(".")


@pytest.mark.parametrize("expression", expressions())
def test_metrics_of_dashboard_and_alerts_are_exported(expression: str) -> None:
    assert (names := named(expression))
    assert names <= set(EXPORTED)


def test_dashboard_shows_every_metric() -> None:
    shown = set[str]().union(*map(named, expressions()))
    assert shown == set(EXPORTED)


def test_page_gives_an_action_for_every_alert() -> None:
    assert [row[0].strip("`") for row in rows("Alerts")] == [rule["alert"] for rule in alerts()]
    assert all(len(row) == 3 and all(row) for row in rows("Alerts"))


def test_dashboard_can_be_imported() -> None:
    kinds = {each["name"]: each["type"] for each in DASHBOARD["templating"]["list"]}
    assert kinds == {"datasource": "datasource", "model": "query", "tenant": "query"}
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set[tuple[int, int]]()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        for target in panel.get("targets", ()):
            assert panel["datasource"]["uid"] == target["datasource"]["uid"] == "${datasource}"


def test_each_alert_has_a_firing_and_a_silent_case() -> None:
    tests = yaml.safe_load((ROOT / "ops" / "prometheus" / "rules.test.yml").read_text())["tests"]
    tried = {name: list[bool]() for name in (rule["alert"] for rule in alerts())}
    for test in tests:
        for case in test["alert_rule_test"]:
            tried[case["alertname"]].append(bool(case["exp_alerts"]))
    assert all(set(found) == {True, False} for found in tried.values()), tried
