"""What it takes that contexts last: services over a data folder that are killed, run out of room, and save.

All is measured with the embedded model and real services, started as a user would start them; what is held against each
other takes turns in the same run, after a warm-up, and medians count. Usage:

    python -m bench.durable --json                                # all parts; takes half an hour
    python -m bench.durable --only restart --tokens 65536         # some, smaller
    python -m bench.durable --only journal --into durable.json    # puts one part into a file with those of before

restart    everything is killed and started again, up to the answer to a question: restart_s, and empty_start_s with an
           empty folder. Parts of both: imports_s until the port is open, catalog_s until the ranks' processes are
           started, ranks_s until requests are welcome, back_s from the question until its keys are there again,
           first_token_s and answer_s from there. restart_ratio: what a restart takes more, of full_ingest_s
loss       ranks are killed one after the other, as in bench.recover, with snapshots (seal_) and without (off_):
           recovery_s until all is held again. ratio_snapshot and ratio_reread: of full_ingest_s
parked     first_token_s of a context whose keys and values were given up for another one, from a snapshot (seal_) and
           read again (off_)
ingest     acknowledged_s of a document with snapshots (seal_) and without (off_); from there saved_s until the snapshot
           is complete, beside copy_s of a plain copy of its files with fsync; tokens per second of another stream
           meanwhile, beside those before the document and after the snapshot, and how long saving took then
journal    64 generations are held: append_us, what it takes to write down the tokens of a step, of step_ms
storage    bytes per second to storage and back, of objects (store_) and of snapshots (service_; back until the first
           token), beside a plain copy of the same files with fsync
catalog    how long it takes to keep a context of 1,000 ids (commit), one of `--tokens` (large_commit), and to open a
           catalog and read 100 contexts (load)

A version of the service without snapshots measures what can be had without them. The kernel may have files in memory
that were written just before: so it is after a kill, and not after the machine was started anew.
"""

import argparse
from collections.abc import Callable
from typing import NamedTuple

from bench.durable import catalog, journal, loss, parked, restart, saving, storage
from bench.durable.options import Options, Row
from bench.harness.arguments import tell, unwind_on_terminate
from bench.harness.parts import parser_of, run_parts


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
    run_parts("durable", PARTS, given, lambda name: measure(name, given))


def parse() -> argparse.Namespace:
    parser = parser_of("durable", __doc__, PARTS)
    parser.add_argument("--tokens", type=int, help="of the context; by default each part's own number")
    parser.add_argument("--repeats", type=int, help="timed turns of each side; by default each part's own number")
    parser.add_argument("--world-size", type=int, help="ranks of the services; by default 2")
    given = parser.parse_args()
    for name in ("tokens", "repeats", "world_size"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: too few to measure")
    return given


def measure(name: str, given: argparse.Namespace) -> Row:
    """The results of a part."""
    part = PARTS[name]
    options = Options(
        tokens=given.tokens or part.tokens,
        repeats=given.repeats or part.repeats,
        world_size=given.world_size or part.world_size,
    )
    tell(f"{name}: {options.tokens:,} tokens")
    return part.measure(options)


if __name__ == "__main__":
    main()
