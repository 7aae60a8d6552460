"""The cost of durable contexts: services over a data folder that are killed, run out of room, and save.

All parts use the embedded model and real services, started with the public command. Compared sides take turns in the
same run after a warm-up, and results are medians. Usage:

    python -m bench.durable --json                                # all parts; takes half an hour
    python -m bench.durable --only restart --tokens 65536         # one part, smaller
    python -m bench.durable --only journal --into durable.json    # puts one part into a file with earlier ones

restart    everything is killed and started again, up to the answer to a question: restart_s, and empty_start_s with an
           empty folder. Parts of both: imports_s until the port is open, catalog_s until the ranks' processes are
           started, ranks_s until requests are accepted, back_s from the question until its keys are restored,
           first_token_s and answer_s from there. restart_ratio: the extra time of a restart over full_ingest_s
loss       ranks are killed one after the other, as in bench.recover, with snapshots (seal_) and without (off_):
           recovery_s until all keys are held again. ratio_snapshot and ratio_reread: over full_ingest_s
parked     first_token_s of a context whose keys and values were evicted for another one, from a snapshot (seal_) and
           recomputed (off_)
ingest     acknowledged_s of a document with snapshots (seal_) and without (off_); from there saved_s until the snapshot
           is complete, beside copy_s of a plain copy of its files with fsync; tokens per second of another stream
           meanwhile, beside those before the document and after the snapshot, and the duration of saving then
journal    64 resumable generations: append_us, the time to append the tokens of a step, of step_ms
storage    bytes per second to storage and from it, of objects (store_) and of snapshots (service_; reads until the
           first token), beside a plain copy of the same files with fsync
catalog    time to commit a context of 1,000 ids (commit), one of `--tokens` (large_commit), and to open a catalog and
           read 100 contexts (load)

A version of the service without snapshots measures the parts that need none. The kernel's page cache may hold files
that were just written: this matches a restart after a kill, not one after a reboot.
"""

import argparse
from collections.abc import Callable
from typing import NamedTuple

from bench.durable import catalog, journal, loss, parked, restart, saving, storage
from bench.durable.options import Options, Row
from bench.harness.arguments import log, unwind_on_terminate
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
    parser.add_argument("--tokens", type=int, help="tokens of the context; by default each part's own number")
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
    log(f"{name}: {options.tokens:,} tokens")
    return part.measure(options)


if __name__ == "__main__":
    main()
