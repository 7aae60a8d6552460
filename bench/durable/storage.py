"""Throughput of storage in both directions compared with a plain copy of the same bytes: for single objects, and for
snapshots of a service.
"""

import asyncio
import os
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from bench.durable.options import Goal, Options, Row, result
from bench.durable.parked import CONTEXTS, ask_evicted, fill, host
from bench.durable.room import token_bytes
from bench.durable.snapshots import plain_copy
from bench.harness.arguments import log
from bench.harness.subjects import EMBEDDED, Subject, subject
from longleaf.storage.store import Store

LEAST = 0.5
OBJECT_BYTES = 16 << 20
"""About the size of a piece of a snapshot."""
MIB = 1 << 20


class Turn(NamedTuple):
    """Seconds of writing bytes, of reading them again, and of copying them as they lie there."""

    save_s: float
    restore_s: float
    copy_s: float


def measure(options: Options) -> Row:
    """Objects, and then a service, whose documents have as many bytes."""
    with subject(EMBEDDED) as measured, TemporaryDirectory(prefix="longleaf-bench-") as place:
        num_bytes = options.tokens * token_bytes(measured.folder)
        turns = [objects(Path(place) / f"{turn}", num_bytes) for turn in range(options.repeats + 1)][1:]
        figures, goals = summarize("store", num_bytes, turns)
        num_bytes, turns = _service(measured, Path(place) / "data", options)
        more, further = summarize("service", num_bytes, turns)
        figures, goals = figures | more, goals + further
    return result(options, figures, goals)


def objects(folder: Path, num_bytes: int) -> Turn:
    """Objects of a storage that is a folder, one after the other."""
    store, content = Store.open(str(folder)), os.urandom(min(num_bytes, OBJECT_BYTES))
    names = [f"objects/{number:05}" for number in range(-(-num_bytes // len(content)))]
    began = time.perf_counter()
    digests = [store.put(name, [content]).digest for name in names]
    written = time.perf_counter()
    for name, digest in zip(names, digests, strict=True):
        store.get(name, digest)
    read = time.perf_counter()
    copied = plain_copy([folder / name for name in names], folder / "copy")
    store.delete(names)
    turn = Turn(written - began, read - written, copied)
    log(f"objects: saved in {turn.save_s:.2f} s, read in {turn.restore_s:.2f} s, copied in {turn.copy_s:.2f} s")
    return turn


def _service(measured: Subject, data_dir: Path, options: Options) -> tuple[int, list[Turn]]:
    """Bytes of a snapshot, and turns. A document is saved once, so that there are two saves."""
    with ExitStack() as stack:
        address = host(stack, measured, data_dir, options, "seal")
        return asyncio.run(_save_and_restore(measured, data_dir, options, address))


async def _save_and_restore(
    measured: Subject, data_dir: Path, options: Options, address: str
) -> tuple[int, list[Turn]]:
    served = await fill(measured, options, "seal", address, data_dir)
    turns = list[Turn]()
    for number in range(options.repeats):
        which = number % len(CONTEXTS)
        restored = (await ask_evicted(served.client, CONTEXTS[which])).first_token_s
        saved = served.saved_s[which]
        turns.append(Turn(saved, restored, plain_copy(served.snapshots[which].files, data_dir / "copy")))
        log(f"service: saved in {saved:.2f} s, there again in {restored:.2f} s, copied in {turns[-1].copy_s:.2f} s")
    await served.client.close()
    return served.snapshots[0].num_bytes, turns


def summarize(name: str, num_bytes: int, turns: list[Turn]) -> tuple[Row, list[Goal]]:
    """MiB per second, and ratios within one turn; above 1 the plain copy is slower."""
    rates = {"save": "save_s", "restore": "restore_s", "copy": "copy_s"}
    figures: Row = {f"{name}_mib": round(num_bytes / MIB, 1)}
    for what, field in rates.items():
        seconds = median(getattr(turn, field) for turn in turns)
        figures[f"{name}_{what}_mib_per_s"] = round(num_bytes / MIB / seconds, 1)
    saved = median(turn.copy_s / turn.save_s for turn in turns)
    restored = median(turn.copy_s / turn.restore_s for turn in turns)
    goals = [Goal(f"{name}_save_ratio", saved, LEAST, is_least=True)]
    return figures, [*goals, Goal(f"{name}_restore_ratio", restored, LEAST, is_least=True)]
