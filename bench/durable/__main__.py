"""What it costs that contexts outlive everything, and what that saves. Services are started as a user would start them.

python -m bench.durable --json
python -m bench.durable --only restart parked --tokens 100000

restart   everything is killed: to the first answered question, beside the start of an empty service
loss      a rank is killed: until all is held again, with a snapshot
parked    a parked context is asked: to the first token, from storage and read again
ingest    to the acknowledgement, with snapshots and without; from there to the manifest, beside a copy with fsync
beside    another stream's tokens per second while a document is saved
storage   objects in a folder beside plain copies with fsync
catalog   commits, and the load at a start
"""

import argparse
import json
from collections.abc import Callable

from bench.durable import contexts, saving
from bench.durable.catalog import catalog
from bench.harness.arguments import unwind_on_terminate
from bench.harness.machine import describe
from bench.harness.subjects import EMBEDDED, Subject, subject

TOKENS = {"restart": 1_000_000, "loss": 256_000, "parked": 256_000, "ingest": 128_000, "beside": 128_000}
Part = Callable[[], contexts.Row]


def main() -> None:
    unwind_on_terminate()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--only", nargs="+", choices=[*TOKENS, "storage", "catalog"], help="some of the parts")
    parser.add_argument("--tokens", type=int, help="of the document; by default as many as were published")
    parser.add_argument("--repeats", type=int, default=3, help="of what is repeated")
    given = parser.parse_args()
    if given.repeats < 1:
        parser.error("--repeats: nothing is measured without one")
    with subject(EMBEDDED) as measured:
        parts = parts_of(measured, given)
        rows = {name: parts[name]() for name in given.only or parts}
    found = {"bench": "durable", "rows": rows, "machine": describe()}
    print(json.dumps(found, indent=2) if given.json else table(rows))


def parts_of(measured: Subject, given: argparse.Namespace) -> dict[str, Part]:
    """What can be measured, by name."""
    size, repeats = {name: given.tokens or tokens for name, tokens in TOKENS.items()}, given.repeats
    return {
        "restart": lambda: contexts.restart(measured, size["restart"], min(repeats, 2)),
        "loss": lambda: contexts.loss(measured, size["loss"], repeats),
        "parked": lambda: contexts.parked(measured, size["parked"], repeats),
        "ingest": lambda: saving.ingest(measured, size["ingest"], repeats),
        "beside": lambda: saving.beside(measured, size["beside"]),
        "storage": lambda: saving.storage(repeats),
        "catalog": catalog,
    }


def table(rows: dict[str, contexts.Row]) -> str:
    """For people."""
    return "\n".join(
        f"{name:8} {', '.join(f'{key} {value}' for key, value in row.items())}" for name, row in rows.items()
    )


if __name__ == "__main__":
    main()
