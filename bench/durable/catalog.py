"""How long the catalog takes to keep a context, and to read many at the start."""

import asyncio
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

from bench.durable.options import Options, Row, latency, result
from bench.harness.arguments import log
from coordinator.persistence.catalog.catalog import Catalog
from coordinator.persistence.catalog.records import Change
from longleaf.storage.context_record import ContextRecord
from longleaf.storage.segment_record import SegmentRecord

SMALL = 1000
"""Token ids of a small context."""
COMMITS_PER_REPEAT = 100
LARGE_PER_REPEAT = 2
CONTEXTS = 100
"""That a service finds when it starts."""
IDS_PER_CONTEXT = 50_000
WARM_UP = 5


def measure(options: Options) -> Row:
    """Measures commits of small contexts and of contexts of `tokens` ids, and loads of many."""
    with TemporaryDirectory(prefix="longleaf-bench-") as folder:
        return asyncio.run(_measure(Path(folder), options))


async def _measure(folder: Path, options: Options) -> Row:
    repeats = options.repeats
    small = await commits(folder / "small.db", SMALL, COMMITS_PER_REPEAT * repeats)
    log(f"commit of {SMALL:,} ids: {median(small) * 1e3:.2f} ms")
    large = await commits(folder / "large.db", options.tokens, LARGE_PER_REPEAT * repeats)
    log(f"commit of {options.tokens:,} ids: {median(large) * 1e3:.2f} ms")
    await commits(folder / "many.db", IDS_PER_CONTEXT, CONTEXTS - WARM_UP)
    loads = [await load(folder / "many.db", CONTEXTS) for _ in range(repeats + 1)][1:]
    log(f"load of {CONTEXTS} contexts: {median(loads) * 1e3:.1f} ms")
    figures: Row = {"small_ids": SMALL, "num_commits": len(small), **latency("commit", small)}
    figures |= latency("large_commit", large)
    figures |= {"contexts": CONTEXTS, "loaded_ids": CONTEXTS * IDS_PER_CONTEXT}
    return result(options, figures | latency("load", loads), [])


async def commits(path: Path, num_ids: int, number: int) -> list[float]:
    """Seconds of each commit of a new context, after a few more for warming up."""
    catalog, seconds = await Catalog.open(path), list[float]()
    try:
        for change in new_contexts(_ids(num_ids), WARM_UP + number):
            began = time.perf_counter()
            await catalog.commit(change)
            seconds.append(time.perf_counter() - began)
    finally:
        await catalog.close()
    return seconds[WARM_UP:]


async def load(path: Path, num_contexts: int) -> float:
    """Seconds of opening a catalog and reading all that it keeps."""
    began = time.perf_counter()
    catalog = await Catalog.open(path)
    try:
        retained = await catalog.load()
        seconds = time.perf_counter() - began
    finally:
        await catalog.close()
    assert len(retained.contexts) == num_contexts and not retained.damaged
    return seconds


def _ids(number: int) -> "array[int]":
    return array("I", Random(number).choices(range(256), k=number))


def new_contexts(ids: "array[int]", number: int, tenant: str = "") -> Iterator[Change]:
    """Changes that each create a context of these token ids; `tenant` is the prefix of their ids."""
    for i in range(number):
        segment = SegmentRecord(id=i, token_ids=ids)
        context = ContextRecord(
            id=f"{tenant}context-{i}",
            segment=i,
            num_tokens=len(ids),
            ends=(len(ids),),
            capacity=len(ids),
            created=float(i),
            updated=float(i),
            last_used=float(i),
        )
        yield Change(segments=(segment,), contexts=(context,))
