"""Results that are measured piece by piece, and benchmarks of several parts, each of which makes a row."""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.durable.options import Row
from bench.durable.table import table
from bench.harness.arguments import log
from bench.harness.machine import describe


def parser_of(bench: str, description: str | None, parts: Iterable[str]) -> argparse.ArgumentParser:
    """The options that all such benchmarks have."""
    parser = argparse.ArgumentParser(
        f"python -m bench.{bench}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--only", nargs="+", choices=list(parts), default=list(parts), help="parts to measure")
    parser.add_argument("--into", type=Path, metavar="FILE", help="a result whose other parts stay as they are")
    return parser


def run_parts(bench: str, parts: Iterable[str], given: argparse.Namespace, measure: Callable[[str], Row]) -> None:
    """Runs the selected parts, then writes and prints their rows together with the earlier rows of the file."""
    rows = read_rows(given.into)
    for name in given.only:
        rows = joined(parts, rows, {"part": name, **measure(name), "machine": describe()})
        if given.into is not None:  # at once: a part that fails shall not cost the others
            given.into.write_text(to_json(bench, rows) + "\n")
    print(to_json(bench, rows) if given.json else table(rows))


def gathered(
    bench: str,
    measured: Iterable[Row],
    given: argparse.Namespace,
    keys: Sequence[str],
    line: Callable[[Row], str],
    order: Callable[[Row], Any] = lambda _: 0,
) -> list[Row]:
    """Prints and writes each row as soon as it is measured, so that an interrupted run loses none. The file keeps the
    earlier rows of other keys (`beside`), sorted by `order`. Returns all rows.
    """
    before, new = read_rows(given.into), list[Row]()
    rows = before
    for row in measured:
        new.append(row)
        rows = sorted(beside(before, new, keys), key=order)
        if given.into is not None:
            given.into.write_text(to_json(bench, rows) + "\n")
        if given.json:
            log(line(row))
        else:
            print(line(row), flush=True)
    if given.json:
        print(to_json(bench, rows))
    return rows


def joined(parts: Iterable[str], before: list[Row], row: Row) -> list[Row]:
    """Rows in the order of the parts, the new one instead of an old one."""
    by_part = {found["part"]: found for found in beside(before, [row], ("part",))}
    return [by_part[name] for name in parts if name in by_part]


def beside(before: Iterable[Row], measured: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """The earlier rows that differ from every new row in one of the keys, then the new rows."""
    new = {tuple(row[key] for key in keys) for row in measured}
    return [*(row for row in before if tuple(row[key] for key in keys) not in new), *measured]


def read_rows(file: Path | None) -> list[Row]:
    """The rows of a result; none where there is none."""
    return json.loads(file.read_text())["rows"] if file is not None and file.is_file() else []


def to_json(bench: str, rows: Sequence[Row]) -> str:
    """A result as JSON."""
    return json.dumps({"bench": bench, "rows": rows}, indent=2)
