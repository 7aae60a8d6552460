"""The whole service is killed and restarted: the time until a context answers as before, by phase."""

import asyncio
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from bench.durable.asking import Answered, ask, ingest
from bench.durable.options import Goal, Options, Row, medians, result, spread
from bench.durable.service import TimedService, command, free_port, start_delay
from bench.durable.snapshots import SnapshotFolder
from bench.harness.arguments import log
from bench.harness.service import START_SECONDS
from bench.harness.subjects import EMBEDDED, Subject, subject
from longleaf.client import AsyncClient
from longleaf.config import LOOPBACK

CONTEXT = "document"
MOST = 0.2
"""The maximum extra time of a start over one with an empty folder, as a fraction of a full ingest."""
WARM_UP = 2048
LOOK_SECONDS = 0.005


class FolderContent(NamedTuple):
    """The content of a data folder."""

    full_ingest_s: float
    snapshot_bytes: int
    answer: tuple[int, ...]


class Start(NamedTuple):
    """Seconds, one part after the other."""

    imports_s: float
    """Until the port is open."""
    catalog_s: float
    """Until the ranks' processes are started: the tokenizer, and loading the folder's catalog."""
    ranks_s: float
    """Until requests are welcome: the ranks' imports, their model, and their group."""
    back_s: float
    """From the question until all keys are there again."""
    first_token_s: float
    answer_s: float
    """From the first token to the end of the answer."""

    @property
    def total_s(self) -> float:
        return sum(self)


def measure(options: Options) -> Row:
    """Starts with the saved data and with an empty folder, alternately."""
    with subject(EMBEDDED) as measured, TemporaryDirectory(prefix="longleaf-bench-") as place:
        folder = Path(place)
        retained = keep(measured, folder / "kept", options)
        empty, again = list[Start](), list[Start]()
        num_equal = 0
        for turn in range(options.repeats):
            empty.append(start(measured, folder / f"empty-{turn}", options, None)[0])
            shutil.rmtree(folder / f"empty-{turn}")
            started, answered = start(measured, folder / "kept", options, CONTEXT)
            again.append(started)
            num_equal += answered.token_ids == retained.answer
            log(f"turn {turn + 1}: {started.total_s:.2f} s, with an empty folder {empty[-1].total_s:.2f} s")
    return result(options, figures(retained, empty, again, num_equal), [goal(retained, empty, again)])


def keep(measured: Subject, data_dir: Path, options: Options) -> FolderContent:
    """Reads a document into a folder, asks it, and kills the service once its snapshot is complete."""
    with _serving(measured, data_dir, options) as (service, _):
        address = service.wait_ready(START_SECONDS)
        retained = asyncio.run(_keep(address, measured, data_dir, options.tokens))
        log(f"{options.tokens:,} tokens are read in {retained.full_ingest_s:.2f} s")
        service.kill()
    return retained


async def _keep(address: str, measured: Subject, data_dir: Path, num_tokens: int) -> FolderContent:
    folder = SnapshotFolder(data_dir)
    async with AsyncClient(address) as client:
        await ingest(client, "warm-up", tuple(measured.tokens(WARM_UP, seed=1)))
        folder.wait_new(frozenset())
        before = folder.manifests
        seconds = await ingest(client, CONTEXT, tuple(measured.tokens(num_tokens)))
        num_bytes = folder.wait_new(before).num_bytes
        return FolderContent(seconds, num_bytes, (await ask(client, CONTEXT)).token_ids)


def start(measured: Subject, data_dir: Path, options: Options, context: str | None) -> tuple[Start, Answered]:
    """From nothing to the answer to a question, after which all is killed again."""
    with _serving(measured, data_dir, options) as (service, port):
        _wait_open(port)
        opened = time.perf_counter() - service.began
        address = service.wait_ready(START_SECONDS)
        ready = time.perf_counter() - service.began
        answered, ranks = asyncio.run(_ask(address, service.pid, context))
        service.kill()
    return parts(opened, ranks, ready, answered), answered


def parts(opened: float, ranks: float, ready: float, answered: Answered) -> Start:
    """`opened`, `ranks` and `ready` are seconds since the start of the service."""
    ranks = min(max(opened, ranks), ready)  # it is reported in hundredths
    first, back = answered.first_token_s, answered.back_s
    return Start(opened, ranks - opened, ready - ranks, back, first - back, answered.total_s - first)


async def _ask(address: str, pid: int, context: str | None) -> tuple[Answered, float]:
    """The answer, and how long after the service the first rank's process was started."""
    async with AsyncClient(address) as client:
        answered = await ask(client, context)
        workers = (await client.cluster()).workers
        return answered, min(start_delay(worker.pid, of=pid) for worker in workers)


@contextmanager
def _serving(measured: Subject, data_dir: Path, options: Options) -> Iterator[tuple[TimedService, int]]:
    """A service that is not ready yet, and its port."""
    port = free_port()
    with TimedService(command(measured.folder, data_dir, world_size=options.world_size, port=port)) as service:
        yield service, port


def _wait_open(port: int) -> None:
    """Returns when the port is open or the start timeout has passed."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((LOOPBACK, port)):
            return
        time.sleep(LOOK_SECONDS)


def figures(content: FolderContent, empty: list[Start], again: list[Start], num_equal: int) -> Row:
    restarts, empties = ([one.total_s for one in starts] for starts in (again, empty))
    found: Row = {"snapshots": "seal", "snapshot_bytes": content.snapshot_bytes}
    found |= {"full_ingest_s": round(content.full_ingest_s, 3)}
    found |= {"restart_s": round(median(restarts), 3), **spread("restart_s", restarts)}
    found |= {f"restart_{name}": value for name, value in medians([one._asdict() for one in again]).items()}
    found |= {"empty_start_s": round(median(empties), 3), **spread("empty_start_s", empties)}
    found |= {f"empty_{name}": value for name, value in medians([one._asdict() for one in empty]).items()}
    return found | {"equal_answers": num_equal}


def goal(content: FolderContent, empty: list[Start], again: list[Start]) -> Goal:
    more = median(one.total_s for one in again) - median(one.total_s for one in empty)
    return Goal("restart_ratio", more / content.full_ingest_s, MOST)
