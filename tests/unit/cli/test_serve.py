"""`longleaf serve`: the choices that it announces, and the settings of the service that it becomes."""

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from longleaf import weights_choice
from longleaf.cli import serve
from longleaf.cli.app import app
from longleaf.resources import Memory
from longleaf.service_settings import ServiceConfig
from tests.support.small_weights import write_tensors

SHARDED = "weights: sharded, about 1.5 KiB on each of 2 ranks: all 3.0 KiB do not fit into the 2.0 KiB of a rank"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with 3 KiB of weights."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    (tmp_path / "tokenizer.json").write_text("{}")
    write_tensors(tmp_path / "model.safetensors", {"a": ("BF16", [3, 512])})
    return tmp_path


@pytest.mark.parametrize(
    ("free", "options", "weights", "notes"),
    [
        (4096, [], "sharded", [SHARDED]),
        (8192, [], "whole", []),
        (4096, ["--weights", "whole"], "whole", []),
        (8192, ["--weights", "sharded"], "sharded", []),
        (4096, ["--log-format", "json"], "sharded", None),
    ],
)
def test_the_choice_of_weights_is_announced(folder, monkeypatch, free, options, weights, notes):
    commands = list[list[str]]()
    monkeypatch.setattr(serve, "exec_command", commands.append)
    monkeypatch.setattr(weights_choice, "memory", lambda: Memory(1 << 40, free))
    given = ["serve", "--model", str(folder), "--world-size", "2", "--device", "cpu", "--launcher", "local", *options]
    result = CliRunner().invoke(app, given, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    config = msgspec.json.decode(commands[0][-1], type=ServiceConfig)
    assert config.engine.weights == weights
    lines = [] if notes is None else [*notes, "starting 2 ranks (local) …"]
    assert result.stderr.splitlines() == lines
