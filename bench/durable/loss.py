"""A rank is lost under a live stream: how long until all is held again, from a snapshot and by reading it again."""

import asyncio
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from bench.durable.asking import ingest
from bench.durable.options import Goal, Options, Row, result
from bench.durable.service import MODES, Snapshots, TimedService, command
from bench.durable.snapshots import SnapshotFolder
from bench.harness.arguments import log
from bench.harness.service import START_SECONDS
from bench.harness.subjects import EMBEDDED, Subject, subject
from bench.recover import CONTEXT, SIGNALS, Measured, ProcessHurt, lose_in_turns, summary
from longleaf.client import AsyncClient
from longleaf.errors import NotFound

MOST = 0.3
WARM_UP = 2048
INGESTS = 3
SHOWN = ("full_ingest_s", "recovery_s", "noticed_s", "formed_s", "stall_s", "lost_tokens", "equal_streams", "kills")


def measure(options: Options) -> Row:
    """One service after the other: without snapshots, and with them."""
    with subject(EMBEDDED) as measured:
        found = {mode: summary(_lose(measured, options, mode)) for mode in MODES}
    figures = {f"{mode}_{name}": row[name] for mode, row in found.items() for name in SHOWN}
    figures["ratio_reread"] = found["off"]["ratio"]
    goals = [Goal("ratio_snapshot", float(str(found["seal"]["ratio"])), MOST)]
    return result(options, figures, goals)


def _lose(measured: Subject, options: Options, mode: Snapshots) -> Measured:
    with TemporaryDirectory(prefix="longleaf-bench-") as place:
        data_dir = Path(place) / "data"
        line = command(measured.folder, data_dir, world_size=options.world_size, snapshots=mode)
        with TimedService(line) as service:
            address = service.wait_ready(START_SECONDS)
            folder = SnapshotFolder(data_dir) if mode == "seal" else None
            return asyncio.run(_read_and_lose(address, measured, options, folder))


async def _read_and_lose(address: str, measured: Subject, options: Options, folder: SnapshotFolder | None) -> Measured:
    """Ranks are lost once the document has its snapshot, if it gets one in `folder`."""
    document, times = tuple(measured.tokens(options.tokens)), list[float]()
    async with AsyncClient(address) as client:
        await _read(client, "warm-up", tuple(measured.tokens(WARM_UP, seed=1)), folder)
        for _ in range(INGESTS):
            times.append(await _read(client, CONTEXT, document, folder))
        log(f"{options.tokens:,} tokens are read in {median(times):.2f} s")
        return await lose_in_turns(client, median(times), options.repeats, ProcessHurt(SIGNALS["killed"]))


async def _read(client: AsyncClient, context: str, ids: tuple[int, ...], folder: SnapshotFolder | None) -> float:
    """Seconds to ingest a context after deleting it. Returns when its snapshot is complete."""
    before = folder.manifests if folder is not None else frozenset[Path]()
    with suppress(NotFound):
        await client.delete_context(context)
    seconds = await ingest(client, context, ids)
    if folder is not None:
        await asyncio.to_thread(folder.wait_new, before)
    return seconds
