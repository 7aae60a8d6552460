"""Runs the measurements of speed, and writes their rows to bench/results/*.json and a page to bench/results/README.md.

The page includes the results of `bench.needle`, which takes hours and resumes. Its last section, on surprises and
missed goals, is written by hand in surprises.md beside the page. Usage:

    python -m bench.report                       # runs all and writes
    python -m bench.report --only shared fair    # runs some; the page shows the existing rows of the others
    python -m bench.report --page                # runs nothing, writes the page
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.harness.arguments import RESULTS
from bench.pages.rendering import render

BENCHES = (
    "decode ingest shared overhead fair scaling serve prefill windows sampling constraints seeds key_types hostile "
    "bare recover durable metrics production gateway draft threads weights quantized hybrid"
).split()
TARGETS = {
    ("decode", 8000, 1, 1): 1.5,
    ("decode", 8000, 8, 8): 3.0,
    ("decode", 8000, 8, 1): 6.0,
    ("decode", 64000, 1, 1): 3.0,
    ("ingest", 4000, 1, 1): 0.9,
    ("ingest", 8000, 1, 1): 0.9,
    ("ingest", 16000, 1, 1): 0.9,
}
"""Smallest ratio wanted for the random Llama, by context tokens, batch and number of contexts."""


def main() -> None:
    RESULTS.mkdir(exist_ok=True)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=BENCHES, help="measurements to run")
    parser.add_argument("--page", action="store_true", help="run nothing")
    options = parser.parse_args()
    for name in () if options.page else options.only:
        run(name)
    (RESULTS / "README.md").write_text(page(read_results()))


def file(name: str) -> Path:
    return RESULTS / f"{name}.json"


def run(name: str) -> None:
    """Measures in a separate process, so that one measurement does not affect the next."""
    command = [sys.executable, "-m", f"bench.{name}", "--json"]
    output = subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True).stdout
    file(name).write_text(output)


def read_results() -> dict[str, Any]:
    """All measurements, new and earlier, and the notes on surprising ones."""
    found = {
        name: json.loads(file(name).read_text())
        for name in (*BENCHES, "needle", "provenance", "provenance_smollm2", "small", "conversation")
        if file(name).is_file()
    }
    surprises = RESULTS / "surprises.md"
    return found | ({"surprises": surprises.read_text()} if surprises.is_file() else {})


def page(found: dict[str, Any]) -> str:
    """The page; missing measurements are omitted."""
    return render("results", **found, target=target)


def target(row: dict[str, Any]) -> float | str:
    """The smallest ratio wanted; nothing where none was set."""
    kind = (row["bench"], row["context_tokens"], row["batch"], row.get("contexts", 1))
    return TARGETS.get(kind, "") if row["model"] == "random-llama" else ""


if __name__ == "__main__":
    main()
