"""The demo and the evaluation with the model in the package, as users run them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_line import CLI, Served


def demo(*options: str) -> dict:
    command = [*CLI, "demo", "--json", *options]
    found = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def test_the_demo_finds_its_facts():
    report = demo("--tokens", "16000", "--world-size", "2", "--launcher", "local")
    assert report["document_tokens"] == pytest.approx(16_000, rel=0.01)
    assert len(report["questions"]) == 6
    assert sum(question["correct"] for question in report["questions"]) >= 5
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert sum(rank["tokens"] for rank in report["ranks"]) == report["document_tokens"]
    assert report["restart"]["question"] == report["questions"][0]


@pytest.mark.slow
@pytest.mark.ray
def test_the_demo_as_it_is_by_default():
    report = demo()
    assert report["document_tokens"] >= 199_000
    assert report["world_size"] == 4
    assert sum(question["correct"] for question in report["questions"]) >= 5


@pytest.mark.bench
def test_needles_are_measured_on_any_served_model_and_go_on_where_they_stopped(served: Served, tmp_path: Path):
    command = [sys.executable, "-m", "bench.needle", "--json", "--server", served.address, "--out", str(tmp_path)]
    options = ["--lengths", "3000", "--questions", "2", "--max-tokens", "4"]
    first = subprocess.run(
        [*command, *options, "--tasks", "absent", "append"], capture_output=True, text=True, check=True
    )
    answers = (tmp_path / "needle.jsonl").read_text().splitlines()
    assert len(answers) == 4
    second = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    assert (tmp_path / "needle.jsonl").read_text().splitlines()[:4] == answers
    tasks = [{row["task"] for row in json.loads(found.stdout)} for found in (first, second)]
    assert tasks[0] == {"absent", "append"} < tasks[1]
    assert len(tasks[1]) == 8
    assert (tmp_path / "needle.png").is_file()
