"""Credentials files on the command line: errors in them, and no credential in the output."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from longleaf.cli import app
from longleaf.credentials import new_credential

Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command that is refused; returns its only line."""

    def refused(*arguments: str) -> str:
        with pytest.raises(SystemExit) as left:
            app.main(list(arguments))
        [line] = capsys.readouterr().err.splitlines()
        assert left.value.code == 2, line
        return line

    return refused


def test_errors_in_a_file_name_the_file(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "access.txt"
    assert run("credentials", "check", str(file)) == f"error: FILE: {file}: No such file or directory"
    file.write_text("acme user contexts=3")
    assert run("credentials", "check", str(file)).startswith(f"error: {file}: line 1: acme needs a sha256")


def test_credential_file_must_contain_only_the_credential(run: Run, tmp_path: Path) -> None:
    credential, file = new_credential(), tmp_path / "mine"
    for text in (json.dumps({"credential": credential, "line": "acme user"}), f"credential, shown once: {credential}"):
        file.write_text(text)
        line = run("contexts", "list", "--server", "127.0.0.1:1", "--credential-file", str(file))
        assert line == f"error: --credential-file: {file} must contain only the credential"


def test_credential_in_place_of_a_file_name_is_not_printed(run: Run) -> None:
    credential = new_credential()
    line = run("contexts", "list", "--server", "127.0.0.1:1", "--credential-file", credential)
    assert credential not in line
    assert "looks like a credential: put it in a file" in line
