"""Services over a data folder, measured with few tokens."""

import json
import subprocess
import sys
from typing import Any

import pytest


def measure(part: str, tokens: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.durable", "--json", "--only", part, "--tokens", str(tokens)]
    output = subprocess.run([*command, "--repeats", "1"], check=True, stdout=subprocess.PIPE, timeout=280).stdout
    [row] = json.loads(output)["rows"]
    assert (row["part"], row["context_tokens"], row["repeats"]) == (part, tokens, 1)
    return row


@pytest.mark.bench
def test_a_restarted_service_answers_as_before():
    row = measure("restart", 8192)
    assert row["equal_answers"] == 1
    assert row["restart_s"] > row["restart_ranks_s"] > 0 and row["restart_back_s"] > 0
    assert row["empty_start_s"] > row["empty_ranks_s"] > 0 and row["empty_back_s"] == 0


@pytest.mark.bench
@pytest.mark.parametrize("part", ["loss", "parked", "ingest", "storage"])
def test_services_with_snapshots_and_without_are_measured(part: str):
    row = measure(part, 16_384)
    assert all(value > 0 for value in row.values() if isinstance(value, float))


@pytest.mark.bench
def test_steps_of_held_generations_are_measured():
    row = measure("journal", 2048)
    assert 0 < row["append_us"] < row["step_ms"] * 1e3
