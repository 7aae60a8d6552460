"""A service of a small model with recurrent states, used by commands."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command_line import CLI, Served
from zoo.checkpoints import make_checkpoint

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]
TEMPLATE = "{{ bos_token }}{% for m in messages %}<u>{{ m.content }}</u>{% endfor %}"


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hybrid"), "granitemoehybrid", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def served(hybrid: Path) -> Iterator[Served]:
    """Two ranks, each with about twelve states of 32,256 bytes."""
    options = ("--world-size", "2", "--launcher", "local", "--kv-bytes", "8000000", "--state-bytes", "400000")
    with Served("--model", str(hybrid), *options, "--max-sequences", "1", "--json") as service:
        yield service
        assert service.stop() == 0


def test_answers_pass_verification(served: Served):
    found = served.run("verify")
    assert (found.returncode, "passed" in found.stdout.lower()) == (0, True), found.stdout + found.stderr


def test_full_pool_of_states_is_an_error_until_contexts_are_deleted(served: Served, tmp_path: Path):
    document = tmp_path / "document.txt"
    document.write_text("A short text. " * 20)
    assert served.run("ingest", str(document), "--name", "book").returncode == 0
    cluster = served.json("cluster")
    assert (cluster["states"], cluster["max_states"], cluster["state_bytes"]) == (1, 12, 32_256)
    names = list[str]()
    for number in range(20):
        names.append(f"fork-{number}")
        assert served.run("contexts", "fork", "book", names[-1]).returncode == 0, (
            "a fork shares the state of its source"
        )
        grown = served.run("ingest", str(document), "--name", names[-1], "--append")
        if grown.returncode:
            break
    assert "recurrent states are needed, and contexts use too many of 12" in grown.stderr
    refused = served.run("contexts", "fork", "book", "twig", "--tokens", "9", "--recompute")
    assert refused.returncode
    assert "recurrent states are needed" in refused.stderr
    for name in names[:4]:
        assert served.run("contexts", "delete", name).returncode == 0
    assert served.run("ingest", str(document), "--name", names[-1], "--append").returncode == 0
    made = served.json("contexts", "fork", "book", "twig", "--tokens", "9", "--recompute")
    assert (made["tokens"], made["recomputed_tokens"]) == (9, 9)


def test_demo_answers_after_its_restart(hybrid: Path):
    """The answers of random weights are wrong, and the same after the restart."""
    options = ("--model", str(hybrid), "--tokens", "1000", "--world-size", "2", "--launcher", "local", "--json")
    found = subprocess.run([*CLI, "demo", *options], capture_output=True, text=True, timeout=280, check=False)
    assert found.returncode == 1, found.stderr
    report = json.loads(found.stdout)
    assert len(report["questions"]) == 6
    assert report["restart"]["question"]["answer"] == report["questions"][0]["answer"]
