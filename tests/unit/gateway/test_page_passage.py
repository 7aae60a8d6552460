"""The division of a document's text around a source on the web page, tested in Node."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[3] / "gateway" / "page"
SCRIPT = """
import { around, divide } from "%s/passage.js";
const { divisions, ranges } = %s;
const parts = ({ before, source, after }) => [before, source, after];
console.log(JSON.stringify({
  divisions: divisions.map(([found, source]) => parts(divide(found, source))),
  ranges: ranges.map((range) => around(...range)),
}));
"""
TEXT = "\ufeffÜber <b>Äpfel</b> und 🍏🍎."
START = 100


def found(start: int | None = START, template: str = "") -> dict[str, Any]:
    end = None if start is None else start + len(TEXT.encode())
    return {"text": template + TEXT, "byte_start": start, "byte_end": end}


def byte_range(part: str) -> list[int]:
    first = TEXT.encode().index(part.encode())
    return [START + first, START + first + len(part.encode())]


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_text_is_divided_at_the_bytes_of_the_source() -> None:
    divisions = [
        [found(), {"bytes": byte_range("Äpfel"), "text": "other"}],
        [found(), {"bytes": byte_range("🍏🍎.")}],
        [found(), {"bytes": byte_range(TEXT)}],
        [found(None), {"bytes": byte_range("Äpfel"), "text": "und"}],
        [found(), {"bytes": None, "text": "und"}],
        [found(0, "<system>ä"), {"bytes": [each - START for each in byte_range("Äpfel")]}],
        [found(0, "<system>ä"), {"bytes": None, "text": "und"}],
        [found(), {"bytes": [0, 9]}],
        [found(), {"bytes": [START, 9_999], "text": "absent"}],
    ]
    ranges = [[[5, 9], 3, 3, 20], [[2, 9], 3, 3, 10], [[2, 9], 0, 0, 4]]
    script = SCRIPT % (PAGE.as_uri(), json.dumps({"divisions": divisions, "ranges": ranges}))
    done = subprocess.run(["node", "--input-type=module", "-e", script], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["divisions"] == [
        ["\ufeffÜber <b>", "Äpfel", "</b> und 🍏🍎."],
        ["\ufeffÜber <b>Äpfel</b> und ", "🍏🍎.", ""],
        ["", TEXT, ""],
        ["\ufeffÜber <b>Äpfel</b> ", "und", " 🍏🍎."],
        ["\ufeffÜber <b>Äpfel</b> ", "und", " 🍏🍎."],
        ["\ufeffÜber <b>", "Äpfel", "</b> und 🍏🍎."],
        ["\ufeffÜber <b>Äpfel</b> ", "und", " 🍏🍎."],
        ["", TEXT, ""],
        ["", TEXT, ""],
    ]
    assert result["ranges"] == [[2, 12], [0, 10], [2, 9]]
