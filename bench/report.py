"""Runs the measurements of speed, and writes their rows to bench/results/*.json and a page to bench/results/README.md.

What `bench.needle` measured (it takes hours, and goes on where it stopped) is shown on the page as well. What surprised
and what was missed is written by hand, in surprises.md beside the page, and becomes its last section. Usage:

    python -m bench.report                       # runs all and writes
    python -m bench.report --only shared fair    # runs some; of the others the page shows the rows that are there
    python -m bench.report --page                # runs nothing, writes the page
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench import users_page
from bench.harness.arguments import RESULTS

SPEED = ("decode", "ingest")
BENCHES = (*SPEED, *users_page.SECTIONS)
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

WHAT = {
    "decode": "Tokens per second after contexts that both hold. `generate` uses its default cache; above 16,384 "
    "tokens that is filled with random keys. A batch asks as many contexts as it has generations, or one.",
    "ingest": "Tokens per second of reading a context; plain forward passes with a cache, in chunks of the same size. "
    "The service stops at the last layer's keys, which saves most where this layer costs most.",
}

Row = dict[str, Any]


def main() -> None:
    RESULTS.mkdir(exist_ok=True)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=BENCHES, help="what to run")
    parser.add_argument("--page", action="store_true", help="run nothing")
    options = parser.parse_args()
    for name in () if options.page else options.only:
        run(name)
    found = {name: json.loads(file(name).read_text()) for name in BENCHES if file(name).is_file()}
    lines = page({name: found[name] for name in SPEED if name in found})
    for name, section in users_page.SECTIONS.items():
        if name in found:
            rows = found[name] if isinstance(found[name], list) else [found[name]]
            lines += [f"## {name}", "", f"`python -m bench.{name}`", "", *section(found[name]), ""]
            lines += [f"- {text}" for text in sorted({machine(row["machine"]) for row in rows})] + [""]
    if file("needle").is_file():
        lines += needles(json.loads(file("needle").read_text()))
    surprises = RESULTS / "surprises.md"
    if surprises.is_file():
        lines += ["## what surprised, and what was missed", "", surprises.read_text()]
    (RESULTS / "README.md").write_text("\n".join(lines))


def file(name: str) -> Path:
    return RESULTS / f"{name}.json"


def run(name: str) -> None:
    """Measures in a process of its own, so that one measurement leaves nothing behind for the next."""
    command = [sys.executable, "-m", f"bench.{name}", "--json"]
    output = subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True).stdout
    file(name).write_text(output)


def page(found: dict[str, list[Row]]) -> list[str]:
    """The rows of speed as lines of markdown."""
    lines = ["# Results", "", "Written by `python -m bench.report`; the rows are in the JSON files beside this page."]
    lines += ["Service (world size 1, over gRPC) and transformers take turns on one thread each; medians."]
    lines += ["`load` is the machine's load average in the end: well above 1, other work ran beside.", ""]
    for name, rows in found.items():
        lines += [f"## {name}", "", WHAT[name], "", *table(rows), ""]
        lines += [f"- {text}" for text in sorted({machine(row["machine"]) for row in rows})] + [""]
    return lines


def needles(found: Row) -> list[str]:
    """What was found in long documents, as lines of markdown: a row per task, a column per length."""
    rows = [row for row in found["rows"] if row["depth"] is None]
    lengths = sorted({row["context_tokens"] for row in rows})
    by_cell = {(row["task"], row["context_tokens"]): row for row in rows}
    lines = [
        "## needle",
        "",
        "Right answers of the embedded model over the service, in percent (95 % interval) and of how",
    ]
    lines += ["many, by task and tokens of context. `python -m bench.needle`", ""]
    lines += [f"| task | {' | '.join(f'{n:,}' for n in lengths)} |", "|" + " --- |" * (len(lengths) + 1)]
    for task in dict.fromkeys(row["task"] for row in rows):
        lines.append(f"| {task} | {' | '.join(needle_cell(by_cell.get((task, n))) for n in lengths)} |")
    speeds = {n: max(row["ingest_tokens_per_s"] for row in rows if row["context_tokens"] == n) for n in lengths}
    lines.append(f"| ingest, tokens/s | {' | '.join(f'{speeds[n]:,}' for n in lengths)} |")
    return [*lines, "", "![length by depth](needle.png)", "", f"- {machine(found['machine'])}", ""]


def needle_cell(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row['accuracy']:.0%} ({row['low']:.0%} - {row['high']:.0%}) of {row['asked']}"


def table(rows: list[Row]) -> list[str]:
    head = [
        "model",
        "context tokens",
        "batch",
        "contexts",
        "service tok/s",
        "transformers tok/s",
        "ratio",
        "from - to",
        "target",
        "load",
    ]
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    return lines + [f"| {' | '.join(map(str, cells(row)))} |" for row in rows]


def cells(row: Row) -> list[object]:
    kind = (row["bench"], row["context_tokens"], row["batch"], row.get("contexts", 1))
    target = TARGETS.get(kind, "") if row["model"] == "random-llama" else ""
    rates = [row["service_tokens_per_s"], row["baseline_tokens_per_s"]]
    spread = f"{row['ratio_min']} - {row['ratio_max']}"
    return [
        row["model"],
        row["context_tokens"],
        row["batch"],
        row.get("contexts", 1),
        *rates,
        row["ratio"],
        spread,
        target,
        row["machine"]["load_average"],
    ]


def machine(info: Row) -> str:
    """Hardware and versions in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in info["versions"].items())
    return f"{info['cpu']}, {info['logical_cores']} logical cores, Python {info['python']}, {versions}; {info['date']}"


if __name__ == "__main__":
    main()
