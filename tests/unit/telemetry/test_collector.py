"""The values that the collector reads from a service for its metrics."""

from dataclasses import replace

from msgspec.structs import replace as changed
from prometheus_client import CollectorRegistry, generate_latest

from coordinator.telemetry.collector import Gauges
from coordinator.telemetry.counters import STEP_SECONDS, Counts
from coordinator.telemetry.metric_sources import MetricSources
from longleaf.errors import Unavailable
from longleaf.rank_protocol.group_messages import MergeTiming
from longleaf.types import Cluster
from tests.support.scraping import Scraped
from tests.support.service import FakeEngine

CLUSTER = FakeEngine().cluster()
SOURCES = MetricSources(cluster=lambda: CLUSTER, counts=Counts, ranks_lost=lambda: 0)


def read(sources: MetricSources) -> Scraped:
    registry, gauges = CollectorRegistry(), Gauges(sources, "lama", {"version": "7", "launcher": "local"})
    registry.register(gauges)
    gauges.refresh()
    return Scraped(generate_latest(registry).decode())


def of(cluster: Cluster) -> Scraped:
    return read(replace(SOURCES, cluster=lambda: cluster))


def test_load_and_ranks() -> None:
    seen = of(changed(CLUSTER, running=5, waiting=4, epoch=9, world_size=6))
    values = [seen.value(f"longleaf_{name}") for name in ("requests_running", "requests_waiting", "epoch", "ranks")]
    assert values == [5, 4, 9, 6]
    assert seen.value("longleaf_build_info", version="7", launcher="local") == 1


def test_pool_of_each_rank() -> None:
    worker = CLUSTER.workers[0]
    ranks = (changed(worker, rank=0, tokens=30, max_tokens=120), changed(worker, rank=3, tokens=0, max_tokens=0))
    seen = of(changed(CLUSTER, workers=ranks))
    assert [seen.value("longleaf_kv_cache_tokens", rank=rank) for rank in "03"] == [30, 0]
    assert [seen.value("longleaf_kv_cache_capacity_tokens", rank=rank) for rank in "03"] == [120, 0]
    assert [seen.value("longleaf_kv_cache_usage_ratio", rank=rank) for rank in "03"] == [0.25, 0]


def test_pool_of_recurrent_states() -> None:
    seen = of(changed(CLUSTER, states=3, max_states=28, state_bytes=500))
    names = ("recurrent_states", "recurrent_state_capacity", "recurrent_state_bytes")
    assert [seen.value(f"longleaf_{name}") for name in names] == [3, 28, 500]
    assert "longleaf_recurrent_states" not in of(CLUSTER).families


def test_metrics_of_an_unavailable_cluster_are_omitted() -> None:
    def refuse() -> Cluster:
        raise Unavailable("loading")

    seen = read(replace(SOURCES, cluster=refuse, ranks_lost=lambda: 2))
    assert seen.value("longleaf_ranks_lost_total") == 2
    assert "longleaf_ranks" not in seen.families


def test_steps_by_kind_of_work() -> None:
    counts = Counts(num_preempted=3, num_recomputed_tokens=70, num_contexts=8)
    for seconds in (STEP_SECONDS[0], STEP_SECONDS[2], STEP_SECONDS[-1] + 40):
        counts.add_step("decode", seconds, 7)
    counts.add_step("prefill", 2.0, 1000)
    seen = read(replace(SOURCES, counts=lambda: counts))
    assert seen.value("longleaf_steps_total", kind="decode") == 3
    assert seen.value("longleaf_steps_total", kind="prefill") == 1
    bucket = "longleaf_step_seconds_bucket"
    bounds = (STEP_SECONDS[0], STEP_SECONDS[1], STEP_SECONDS[2], STEP_SECONDS[-1], "+Inf")
    assert [seen.value(bucket, kind="decode", le=str(bound)) for bound in bounds] == [1, 1, 2, 2, 3]
    assert seen.value("longleaf_step_seconds_count", kind="decode") == 3
    assert seen.value("longleaf_step_seconds_sum", kind="decode") == counts.steps["decode"].seconds
    names = ("merge_bytes_total", "preemptions_total", "recomputed_tokens_total", "contexts")
    assert [seen.value(f"longleaf_{name}") for name in names] == [1021, 3, 70, 8]


def test_draft_acceptance() -> None:
    counts = Counts(num_drafted=70, num_accepted=30, num_sampled=90, num_sequence_steps=60)
    seen = read(replace(SOURCES, counts=lambda: counts))
    names = ("drafted_tokens_total", "accepted_draft_tokens_total", "sampled_tokens_total", "sequence_steps_total")
    assert [seen.value(f"longleaf_{name}") for name in names] == [70, 30, 90, 60]


def test_merge_times_for_the_fewest_rows() -> None:
    timings = (MergeTiming(8, "gather", {"gather": 90.0}), MergeTiming(1, "butterfly", {"gather": 40, "butterfly": 25}))
    seen = of(changed(CLUSTER, merge_timings=timings))
    assert seen.value("longleaf_merge_seconds", kind="butterfly") == 25e-6
    assert seen.value("longleaf_merge_seconds", kind="gather") == 40e-6


def test_metrics_of_unused_features_are_omitted() -> None:
    left_out = {
        "longleaf_refused_credentials",
        "longleaf_rejected_connections",
        "longleaf_reload_failures",
        "longleaf_file_unusable",
        "longleaf_certificate_expiry_timestamp_seconds",
        "longleaf_snapshot_bytes",
        "longleaf_merge_seconds",
    }
    assert not left_out & set(read(SOURCES).families)
    assert not left_out & set(read(replace(SOURCES, certificate_expiry=lambda: None)).families)


def test_metrics_of_used_features_are_exported() -> None:
    seen = read(
        replace(
            SOURCES,
            counts=lambda: Counts(snapshot_bytes=4096),
            refused_credentials=lambda: 5,
            rejected_connections=lambda: 6,
            failed_reloads={"credentials": lambda: 1, "certificates": lambda: 2},
            unusable_files={"credentials": lambda: True, "certificates": lambda: False},
            certificate_expiry=lambda: 1.5e9,
        )
    )
    assert seen.value("longleaf_refused_credentials_total") == 5
    assert seen.value("longleaf_rejected_connections_total") == 6
    assert [seen.value("longleaf_reload_failures_total", file=file) for file in ("credentials", "certificates")] == [
        1,
        2,
    ]
    assert [seen.value("longleaf_file_unusable", file=file) for file in ("credentials", "certificates")] == [1, 0]
    assert seen.value("longleaf_certificate_expiry_timestamp_seconds") == 1.5e9
    assert seen.value("longleaf_snapshot_bytes") == 4096


def test_nothing_is_read_before_a_scrape() -> None:
    requested: list[int] = []

    def cluster() -> Cluster:
        requested.append(1)
        return CLUSTER

    gauges = Gauges(replace(SOURCES, cluster=cluster), "lama", {})
    assert gauges.collect() == []
    assert not requested
    gauges.refresh()
    assert len(requested) == 1
    assert gauges.collect()
