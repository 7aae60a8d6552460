"""What it takes that contexts last: services over a data folder that are killed, run out of room, and save.

All is measured with the embedded model and real services, started as a user would start them. Usage:

    python -m bench.durable --json                                # all parts; takes half an hour
    python -m bench.durable --only restart --tokens 65536         # some, smaller
    python -m bench.durable --only journal --into durable.json    # puts one part into a file with those of before

restart    everything is killed and started again, up to the first answered question; in turns with a start with an
           empty folder, and as a share of what reading the document takes
loss       one of two ranks is killed, and comes back from a snapshot: seconds until all is held again over those of
           reading all of the document; beside it the same without snapshots
parked     the first token of a context whose keys and values were given up for another one, from a snapshot and by
           reading it again
ingest     reading with snapshots and without: the acknowledgement, the snapshot beside a plain copy of its bytes, and a
           stream meanwhile
journal    64 generations are held: what it takes to write down the tokens of a step, as a share of the step
storage    bytes per second to storage and back, of objects and of a service's snapshots, beside a plain copy
catalog    how long it takes to keep a context, and to read many at the start
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bench.durable import catalog, journal, loss, parked, restart, saving, storage
from bench.durable.options import Options, Row
from bench.durable.table import table
from bench.harness.arguments import tell, unwind_on_terminate
from bench.harness.machine import describe


class Part(NamedTuple):
    """Something to measure, and how much of it by default."""

    measure: Callable[[Options], Row]
    tokens: int
    repeats: int
    world_size: int = 2


PARTS = {
    "restart": Part(restart.measure, 1_000_000, 3),
    "loss": Part(loss.measure, 262_144, 5),
    "parked": Part(parked.measure, 256_000, 4),
    "ingest": Part(saving.measure, 256_000, 3),
    "journal": Part(journal.measure, 65_536, 3),
    "storage": Part(storage.measure, 256_000, 4),
    "catalog": Part(catalog.measure, 1_000_000, 5),
}


def main() -> None:
    unwind_on_terminate()
    given = parse()
    rows = [run(name, given) for name in given.only]
    if given.into is not None:
        rows = joined(read(given.into), rows)
    found = {"bench": "durable", "rows": rows}
    if given.into is not None:
        given.into.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2) if given.json else table(rows))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench.durable", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument("--tokens", type=int, help="of the context; by default each part's own number")
    parser.add_argument("--repeats", type=int, help="timed turns of each side; by default each part's own number")
    parser.add_argument("--world-size", type=int, help="ranks of the services; by default 2")
    parser.add_argument("--into", type=Path, metavar="FILE", help="a result whose other parts stay as they are")
    given = parser.parse_args()
    for name in ("tokens", "repeats", "world_size"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: too few to measure")
    return given


def run(name: str, given: argparse.Namespace) -> Row:
    """The row of a part."""
    part = PARTS[name]
    options = Options(
        tokens=given.tokens or part.tokens,
        repeats=given.repeats or part.repeats,
        world_size=given.world_size or part.world_size,
    )
    tell(f"{name}: {options.tokens:,} tokens")
    return {"part": name, **part.measure(options), "machine": describe()}


def read(file: Path) -> list[Row]:
    """The rows of a result; none where there is none."""
    return json.loads(file.read_text())["rows"] if file.is_file() else []


def joined(before: list[Row], rows: list[Row]) -> list[Row]:
    """Rows in the order of the parts, new ones instead of old ones."""
    by_part = {row["part"]: row for row in (*before, *rows)}
    return [by_part[name] for name in PARTS if name in by_part]


if __name__ == "__main__":
    main()
