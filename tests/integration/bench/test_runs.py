"""Each benchmark runs once, small, and returns rows."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.harness.hosts import obstacle
from longleaf.merge import MERGES


def run_benchmark(name: str, *arguments: str, timeout_s: float = 280) -> Any:
    """JSON output of a benchmark."""
    command = [sys.executable, "-m", name, "--json", *arguments]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=timeout_s).stdout)


@pytest.mark.bench
def test_bench_merge_counts_sent_bytes(tmp_path):
    rows = run_benchmark(
        "bench.merge", "--world-size", "2", "--nodes", "1", "--batch", "8", "--repeats", "5", "--out", str(tmp_path)
    )
    assert json.loads((tmp_path / "merge.json").read_text())["rows"] == rows
    by_name = {(row["transport"], row["merge"]): row for row in rows}
    assert {name for transport, name in by_name if transport == "gloo"} == set(MERGES)
    payload = 8 * 16 * 129 * 4
    assert [by_name["gloo", name]["collectives"] for name in ("paper", "packed", "gather")] == [3, 2, 1]
    gather = by_name["gloo", "gather"]
    assert gather["is_network_private"] is (obstacle() is None)
    most = 1.3 * payload if gather["is_network_private"] else math.inf  # other traffic of this machine also counts
    assert payload <= gather["bytes_sent_per_rank"] < most


@pytest.mark.bench
def test_bench_draft_has_a_row_for_each_number_of_rows():
    size = ("--context", "300", "--world-size", "2", "--repeats", "1", "--model", "embedded")
    rows = run_benchmark("bench.draft", *size)
    assert [(row["kv_dtype"], row["rows"]) for row in rows] == [
        (kind, count) for kind in ("float32", "int8") for count in (1, 2, 4, 8, 16)
    ]
    assert all(row["ratio"] == 1 for row in rows if row["rows"] == 1)


@pytest.mark.bench
@pytest.mark.parametrize("part", ["decode", "decode_8", "prefill", "restart"])
def test_bench_hybrid_has_a_row_for_each_part(part):
    size = ("--context", "256", "--batch-context", "64", "--document", "512", "--tokens", "4", "--repeats", "1")
    [row] = run_benchmark("bench.hybrid", "--only", part, *size)["rows"]
    assert row["part"] == part
    assert row.get("same_tokens", 4) == 4
    assert row.get("equal_answers", 1) == 1


@pytest.mark.bench
@pytest.mark.parametrize(
    ("part", "tokens"),
    [
        ("restart", 8192),
        ("loss", 16_384),
        ("evicted", 16_384),
        ("ingest", 16_384),
        ("storage", 16_384),
        ("journal", 2048),
    ],
)
def test_bench_durable_has_a_row_for_each_part(part, tokens):
    [row] = run_benchmark("bench.durable", "--only", part, "--tokens", str(tokens), "--repeats", "1")["rows"]
    assert (row["part"], row["context_tokens"], row["repeats"]) == (part, tokens, 1)
    assert all(value > 0 for name, value in row.items() if isinstance(value, float) and name != "empty_back_s")


@pytest.mark.bench
def test_bench_hostile_attacks_a_real_service():
    [row] = run_benchmark("bench.hostile", "--attacks", "watchers", "--repeats", "1", "--seconds", "0.3")
    assert (row["attack"], row["died"], row["unanswered"], row["honest_errors"]) == ("watchers", 0, 0, {})


@pytest.mark.bench
def test_bench_production_measures_real_services():
    cost, rotation, flood = run_benchmark("bench.production", "--repeats", "1", "--seconds", "0.3")["rows"]
    assert cost["ratio"] > 0 and cost["on_cpu_us_per_token"] > 0
    assert 0 < rotation["shown_s_max"] < 30 and not rotation["streams_broken"]
    assert flood["wrong_alone_per_s"] > 0 and not flood["streams_broken"]


@pytest.mark.bench
def test_bench_attention_runs_on_both_networks(tmp_path: Path):
    arguments = ("--world-size", "2", "--length", "1000", "--repeats", "3", "--seconds", "1", "--out", str(tmp_path))
    rows = run_benchmark("bench.attention", *arguments)
    assert {row["network"] for row in rows} == {"loopback"} if obstacle() else {"loopback", "two-tier 10/1"}
    assert (tmp_path / "attention.png").is_file()
