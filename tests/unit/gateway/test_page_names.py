"""The names and titles that the web page proposes for files, tested in Node."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from longleaf.documents.names import context_name

PAGE = Path(__file__).parents[3] / "gateway" / "page"
pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


def evaluate(expression: str) -> Any:
    """The value of an expression that uses the functions of files.js."""
    script = f"import * as files from '{PAGE.as_uri()}/files.js'; console.log(JSON.stringify({expression}));"
    done = subprocess.run(["node", "--input-type=module", "-e", script], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("taken", "proposed"),
    [
        ([], "report-2024"),
        (["report-2024"], "report-2024-2"),
        (["report-2024", "report"], "report-2024-2"),
        (["report-2024", "report-2024-2"], "report-2024-3"),
    ],
)
def test_taken_name_with_a_year_keeps_it(taken: list[str], proposed: str) -> None:
    name = context_name("Report 2024.pdf")
    assert evaluate(f"files.freeName('{name}', new Set({json.dumps(taken)}))") == proposed


@pytest.mark.parametrize(
    ("name", "taken", "proposed"),
    [
        ("notes", ["notes"], "notes-2"),
        ("notes-2", ["notes", "notes-2"], "notes-3"),
        ("chapter-12", ["chapter-12"], "chapter-12-2"),
        ("2024", ["2024"], "2024-2"),
    ],
)
def test_proposed_number_increases(name: str, taken: list[str], proposed: str) -> None:
    assert evaluate(f"files.freeName('{name}', new Set({json.dumps(taken)}))") == proposed


@pytest.mark.parametrize(
    ("file", "title"),
    [
        ("Report 2024.pdf", "Report 2024"),
        ("Minutes.2024", "Minutes.2024"),
        ("backup.2024.tar.gz", "backup.2024"),
        ("main.py", "main.py"),
        ("A.TXT", "A"),
    ],
)
def test_title_keeps_all_but_the_suffix_of_a_document(file: str, title: str) -> None:
    assert evaluate(f"files.stemOf({json.dumps(file)})") == title
