"""The operators' page: the tests that it names as proofs exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command

from bench import recover
from bench.durable import __main__ as durable
from longleaf.cli.app import app

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "operations.md").read_text()
COLUMNS = ["what happens", "streams", "contexts", "what the client sees", "how long", "proven by"]


def rows() -> list[list[str]]:
    """The cells of the first table, which stands right below the title."""
    _title, empty, heads, rule, *lines = PAGE.splitlines()
    table = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines[: lines.index("")]]
    assert (empty, [cell.strip() for cell in heads[1:-1].split("|")], set(rule)) == ("", COLUMNS, set("| -"))
    return table


@cache
def names_in(path: Path) -> frozenset[str]:
    """The tests of a file: functions, and classes."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return frozenset(node.name for node in ast.parse(path.read_text()).body if isinstance(node, kinds))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_every_row_names_its_tests(row: list[str]) -> None:
    assert len(row) == len(COLUMNS)
    assert re.fullmatch(r"(`[^`]+\.py::[^`]+` ?)+", row[-1])


@pytest.mark.parametrize("message", sorted(set(re.findall(r"`([^`]+\.py::[^`]+)`", PAGE))))
def test_named_proofs_are_tests(message: str) -> None:
    file, _, name = message.partition("::")
    assert name.lower().startswith("test")
    assert name in names_in(ROOT / "tests" / file)


def test_measured_values_are_those_of_the_measurement() -> None:
    reported = set(re.findall(r"`(\w+_s)`", PAGE))
    assert reported
    measured = set(re.findall(r"^    (\w+_s) ", str(recover.__doc__), re.MULTILINE))
    assert reported <= measured | set(re.findall(r"\b\w+_s\b", str(durable.__doc__)))


def test_options_exist_in_the_service() -> None:
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    table = PAGE.partition("## What to set")[2].partition("\n## ")[0]
    assert (reported := set(re.findall(r"^\| `(--[a-z-]+)", table, re.MULTILINE)))
    assert reported <= {name for option in serve.params for name in option.opts}
