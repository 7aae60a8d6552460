"""The demo and the evaluation with the embedded model, run as commands."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from longleaf.demo.run import DemoSettings, build
from tests.support.command_line import CLI, NAME, Served
from zoo.checkpoints import make_checkpoint


def run(*options: str, code: int = 0) -> str:
    found = subprocess.run([*CLI, "demo", *options], capture_output=True, text=True, timeout=280, check=False)
    assert found.returncode == code, found.stderr
    return found.stdout


def demo(*options: str) -> dict:
    return json.loads(run("--json", *options))


@pytest.mark.extended
def test_demo_finds_its_facts():
    report = demo("--tokens", "16000", "--world-size", "2", "--launcher", "local")
    assert report["document_tokens"] == pytest.approx(16_000, rel=0.01)
    assert len(report["questions"]) == 6
    assert sum(question["correct"] for question in report["questions"]) >= 5
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert sum(rank["tokens"] for rank in report["ranks"]) == report["document_tokens"]
    first, again = report["questions"][0], report["restart"]["question"]
    assert again["answer"] == first["answer"]
    assert again["sources"][0]["token_start"] == first["sources"][0]["token_start"]
    planted = build(DemoSettings(tokens=16_000))
    for question, fact, offset in zip(report["questions"], planted.facts, planted.offsets, strict=False):
        start, end = question["sources"][0]["bytes"]
        assert not question["correct"] or (start < offset + len(fact.sentence.encode()) and offset < end)


@pytest.mark.extended
def test_demo_shows_the_source_text_of_answers() -> None:
    found = run("--tokens", "2000", "--world-size", "1", "--launcher", "local")
    requested = re.split(r"^\? ", found, flags=re.MULTILINE)[1:]
    shown = re.compile(
        r"\n  [^\n]+? is ([^\n]+)   right\n    [\d.]+% of the attention on line [\d,]+: (.+?…)\n\n", re.DOTALL
    )
    reported = [match for each in requested if (match := shown.search(each))]
    assert len(reported) >= 6
    for match in reported:
        answer, text = match.groups()
        assert answer in " ".join(text.split()) or answer == "not found"
    assert all(len(line) <= 80 for line in found.splitlines())


@pytest.mark.extended
def test_demo_omits_sources_without_a_full_attention_layer(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "mistral")
    options = ("--model", str(model), "--tokens", "1000", "--world-size", "1", "--launcher", "local")
    report = json.loads(run("--json", *options, code=1))
    assert [question["sources"] for question in report["questions"]] == [[]] * 6


@pytest.mark.slow
@pytest.mark.ray
def test_demo_runs_with_default_settings():
    report = demo()
    assert report["document_tokens"] >= 199_000
    assert report["world_size"] == 4
    assert sum(question["correct"] for question in report["questions"]) >= 5


@pytest.mark.bench
def test_source_evaluation_of_a_served_model_keeps_earlier_results(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "provenance.json"
    command = [sys.executable, "-m", "bench.provenance", "--server", served.address, "--into", str(file)]
    options = ["--questions", "1", "--repeats", "1", "--lengths"]
    for lengths, costs in (("2000", "3000"), ("3000", "2000")):
        subprocess.run([*command, *options, lengths, "--cost-lengths", costs], capture_output=True, check=True)
    rows = json.loads(file.read_text())["rows"]
    assert {row["model"] for row in rows} == {NAME}
    assert sorted({(row["tokens"], row["task"] == "cost") for row in rows}) == [
        (tokens, is_cost) for tokens in (2000, 3000) for is_cost in (False, True)
    ]
    assert all("machine" in row for row in rows)
    assert file.with_suffix(".png").is_file()


@pytest.mark.bench
def test_needle_evaluation_of_a_served_model_resumes_where_it_stopped(served: Served, tmp_path: Path):
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
