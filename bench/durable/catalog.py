"""The catalog and the journal, without a service."""

import asyncio
import tempfile
import time
from array import array
from pathlib import Path
from statistics import median, quantiles

from bench.durable.contexts import Row
from coordinator.catalog.catalog import DATABASE, Catalog
from coordinator.catalog.records import Change, ContextRecord, SegmentRecord

NUM_COMMITS = 200
SMALL, LARGE = 1_000, 1_000_000
NUM_CONTEXTS, IN_EACH = 100, 50_000


def catalog() -> Row:
    """Commits and the load at a start."""
    return asyncio.run(_catalog())


async def _catalog() -> Row:
    with tempfile.TemporaryDirectory() as folder:
        opened = await Catalog.open(Path(folder, DATABASE))
        small = [await commit(opened, number, SMALL) for number in range(NUM_COMMITS)]
        large = [await commit(opened, NUM_COMMITS + number, LARGE) for number in range(5)]
        await opened.close()
    with tempfile.TemporaryDirectory() as folder:
        opened = await Catalog.open(Path(folder, DATABASE))
        for number in range(NUM_CONTEXTS):
            await commit(opened, number, IN_EACH)
        await opened.close()
        opened = await Catalog.open(Path(folder, DATABASE))
        began = time.perf_counter()
        await opened.load()
        loaded = time.perf_counter() - began
        await opened.close()
    row: Row = {"commit_ms": round(1e3 * median(small), 2), "commit_ms_p95": round(1e3 * quantiles(small, n=20)[-1], 2)}
    row |= {"commit_million_ms": round(1e3 * median(large), 1)}
    return row | {"load_ms": round(1e3 * loaded, 1), "loaded_tokens": NUM_CONTEXTS * IN_EACH}


async def commit(opened: Catalog, number: int, num_ids: int) -> float:
    """Seconds of one context."""
    segment = SegmentRecord(id=number, token_ids=array("I", range(num_ids)))
    context = ContextRecord(
        id=f"context-{number}",
        segment=number,
        num_tokens=num_ids,
        ends=(num_ids,),
        capacity=num_ids,
        created=1.0,
        updated=1.0,
        last_used=1.0,
    )
    began = time.perf_counter()
    await opened.commit(Change(segments=(segment,), contexts=(context,)))
    return time.perf_counter() - began
