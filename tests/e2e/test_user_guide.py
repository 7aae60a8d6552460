"""README.md and docs/user-guide.md: their examples run in order against a service.

Blocks of `sh` and `python` run. Blocks of `bash` start services, install packages or need other machines: the service
starts with the options of the first `longleaf serve`, and every command and option exists.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from typer.main import get_command

from examples.smollm2 import QUESTIONS, first_section
from longleaf.cli.app import app
from tests.support.command_line import CLI, Served, url_of
from tests.support.tools import tool

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```(sh|bash|python)\n(.*?)```", re.DOTALL)
PAGES = ("README.md", "docs/user-guide.md")
OUTPUTS = {
    "README.md": {"amber falcon is 4711": 3},
    "docs/user-guide.md": {
        "amber falcon is 4711": 5,
        '"finish_reason":"end_token"': 1,
        "jade-7 is 0815": 1,
        " tokens from the context": 1,
        '"phase":"ready"': 1,
        "Second copy": 1,
        "on the context": 1,
        "passed": 1,
    },
}
"""Minimum number of times that each text is printed."""


def blocks(page: str) -> list[tuple[str, str]]:
    """Languages and contents of a page's code blocks."""
    return BLOCK.findall((ROOT / page).read_text())


def commands(page: str) -> Iterator[list[str]]:
    """The words of every `longleaf` command of a page."""
    for language, code in blocks(page):
        if language == "python":
            continue
        for line in code.replace("\\\n", " ").splitlines():
            if line.startswith("longleaf "):
                yield shlex.split(line, comments=True)[1:]


def serve_options(page: str) -> list[str]:
    """Options of the first `longleaf serve` of a page that downloads no model, with ports chosen by the system."""
    options = next(words[1:] for words in commands(page) if words[0] == "serve" and "--model" not in words)
    options[options.index("--http") + 1] = "0"
    return options


@pytest.mark.parametrize("page", [PAGES[0], pytest.param(PAGES[1], marks=pytest.mark.extended)])
def test_examples_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tool("curl")
    with Served(*serve_options(page), "--kv-bytes", "100000000") as service:
        url, names, printed = url_of(service), dict[str, object](), ""
        monkeypatch.setenv("LONGLEAF_SERVER", service.address)
        monkeypatch.setenv("PATH", f"{Path(CLI[0]).parent}{os.pathsep}{os.environ['PATH']}")
        for language, example in blocks(page):
            code = example.replace("http://localhost:8000", url).replace("localhost:50051", service.address)
            if language == "python":
                exec(compile(code, page, "exec"), names)
            elif language == "sh":
                found = subprocess.run(["bash", "-ec", code], capture_output=True, text=True, check=False)
                assert found.returncode == 0, found.stderr
                printed += found.stdout + found.stderr
        if "http" in names:
            names["http"].close()  # type: ignore[attr-defined]
    printed += capsys.readouterr().out
    for text, count in OUTPUTS[page].items():
        assert printed.count(text) >= count, f"{text}: {printed}"


@pytest.mark.parametrize("page", [*PAGES, "docs/provenance.md", "ops/README.md"])
def test_commands_and_options_exist(page: str) -> None:
    found = list(commands(page))
    assert found
    for words in found:
        command, arguments = get_command(app), list(words)
        while isinstance(command, click.Group):
            name = arguments.pop(0)
            assert name in command.commands, words
            command = command.commands[name]
        command.make_context(" ".join(words), arguments)


def test_passages_of_make_chat_are_in_the_part_of_the_readme_that_it_reads() -> None:
    text = " ".join(first_section(ROOT / "README.md").split())
    assert all(passage in text for passage in QUESTIONS.values())


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", [*PAGES, "docs/provenance.md", "docs/http.md", "docker/README.md", "ops/README.md"])
def test_links_have_targets(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target
