"""Benchmarks of several parts, each of which makes a row of one result."""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from bench.durable.options import Row
from bench.durable.table import table
from bench.harness.machine import describe


def parser_of(bench: str, description: str | None, parts: Iterable[str]) -> argparse.ArgumentParser:
    """The options that all such benchmarks have."""
    parser = argparse.ArgumentParser(
        f"python -m bench.{bench}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--only", nargs="+", choices=list(parts), default=list(parts), help="what to measure")
    parser.add_argument("--into", type=Path, metavar="FILE", help="a result whose other parts stay as they are")
    return parser


def run_parts(bench: str, parts: Iterable[str], given: argparse.Namespace, measure: Callable[[str], Row]) -> None:
    """Measures what was asked for, and writes and prints it beside what the file has had."""
    rows = _read(given.into) if given.into is not None else list[Row]()
    for name in given.only:
        rows = joined(parts, rows, {"part": name, **measure(name), "machine": describe()})
        if given.into is not None:  # at once: a part that fails shall not cost the others
            given.into.write_text(_told(bench, rows) + "\n")
    print(_told(bench, rows) if given.json else table(rows))


def joined(parts: Iterable[str], before: list[Row], row: Row) -> list[Row]:
    """Rows in the order of the parts, the new one instead of an old one."""
    by_part = {found["part"]: found for found in (*before, row)}
    return [by_part[name] for name in parts if name in by_part]


def _read(file: Path) -> list[Row]:
    """The rows of a result; none where there is none."""
    return json.loads(file.read_text())["rows"] if file.is_file() else []


def _told(bench: str, rows: list[Row]) -> str:
    return json.dumps({"bench": bench, "rows": rows}, indent=2)
