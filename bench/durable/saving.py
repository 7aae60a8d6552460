"""Ingest with snapshots and without, in turns: the time to the acknowledgement, the time until storage is complete, and
the slowdown of a concurrent stream.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from bench.durable.asking import QUESTION, ask, ingest
from bench.durable.options import Goal, Options, Row, medians, result, spread
from bench.durable.room import kv_bytes
from bench.durable.service import MODES, Snapshots, TimedService, command
from bench.durable.snapshots import SnapshotFolder, plain_copy
from bench.harness.arguments import log
from bench.harness.service import START_SECONDS
from bench.harness.subjects import EMBEDDED, Subject, subject
from longleaf.client import AsyncClient
from longleaf.types import Delta

MOST_LATER = 1.05
"""Seconds to the acknowledgement with snapshots, over those without."""
MOST_SAVED = 2.0
"""Seconds from there until the snapshot is complete, over those of a plain copy."""
LEAST_RATE = 0.8
"""Of a stream's tokens while a document is saved, over those without that."""
CONTEXT, STREAM = "document", "stream"
STREAM_TOKENS = 8000
"""Tokens of the context that the stream reads."""
LONGEST_STREAM = 20_000
ROOM = 2.2
"""KV pool capacity in documents: one can still be evicted while the next one is ingested."""
ALONE_SECONDS = 2.0
"""How long a stream is watched before the document, and again after it is saved."""


class Saved(NamedTuple):
    """The times of saving one document; seconds."""

    acknowledged_s: float
    saved_s: float
    """From the acknowledgement on."""
    copy_s: float
    """Of a plain copy."""
    num_bytes: int

    @property
    def seconds(self) -> dict[str, float]:
        return {"acknowledged_s": self.acknowledged_s, "saved_s": self.saved_s, "copy_s": self.copy_s}


class Place(NamedTuple):
    """A service, and where it saves."""

    client: AsyncClient
    data_dir: Path


def measure(options: Options) -> Row:
    """Both services are there all the time, and take turns."""
    with subject(EMBEDDED) as measured, TemporaryDirectory(prefix="longleaf-bench-") as place, ExitStack() as stack:
        folders: dict[Snapshots, Path] = {mode: Path(place) / mode for mode in MODES}
        addresses: dict[Snapshots, str] = {
            mode: host(stack, measured, folders[mode], options, mode) for mode in folders
        }
        return asyncio.run(_measure(measured, options, addresses, folders))


def host(stack: ExitStack, measured: Subject, data_dir: Path, options: Options, mode: Snapshots) -> str:
    """The address of a service with room for the document and the stream."""
    num_tokens = int(ROOM * options.tokens) + STREAM_TOKENS + LONGEST_STREAM
    room = kv_bytes(measured.folder, num_tokens, options.world_size)
    line = command(measured.folder, data_dir, world_size=options.world_size, snapshots=mode, kv_bytes=room)
    return stack.enter_context(TimedService(line)).wait_ready(START_SECONDS)


async def _measure(
    measured: Subject, options: Options, addresses: dict[Snapshots, str], folders: dict[Snapshots, Path]
) -> Row:
    plain, saved, streams = list[float](), list[Saved](), list[Beside]()
    async with AsyncExitStack() as stack:
        places = {
            mode: Place(await stack.enter_async_context(AsyncClient(address)), folders[mode])
            for mode, address in addresses.items()
        }
        for place in places.values():
            await ingest(place.client, STREAM, tuple(measured.tokens(STREAM_TOKENS, seed=98)))
            await ask(place.client, STREAM)
        for turn in range(options.repeats + 1):
            ids = tuple(measured.tokens(options.tokens, seed=turn))
            for mode in sorted(places, reverse=bool(turn % 2)):  # neither is always the first
                if mode == "off":
                    plain.append(await read(places[mode].client, ids))
                else:
                    saved.append(await save(places[mode], ids))
            print_turn(plain[-1], saved)
        for turn in range(options.repeats if "seal" in places else 0):
            ids = tuple(measured.tokens(options.tokens, seed=100 + turn))
            streams.append(await save_beside_stream(places["seal"], ids))
            print_stream(streams[-1])
    return row(options, plain[1:], saved[1:], streams)


def print_turn(plain: float, saved: Sequence[Saved]) -> None:
    log(f"acknowledged after {plain:.2f} s without snapshots")
    for one in saved[-1:]:
        log(f"with them after {one.acknowledged_s:.2f} s, saved {one.saved_s:.2f} s later; a copy {one.copy_s:.2f} s")


async def read(client: AsyncClient, ids: tuple[int, ...]) -> float:
    """Seconds to the acknowledgement."""
    seconds = await ingest(client, CONTEXT, ids)
    await client.delete_context(CONTEXT)
    return seconds


async def save(place: Place, ids: tuple[int, ...]) -> Saved:
    """Waits until the snapshot is complete, copies it, and deletes it."""
    folder = SnapshotFolder(place.data_dir)
    before = folder.manifests
    seconds = await ingest(place.client, CONTEXT, ids)
    acknowledged = time.time()
    found = await asyncio.to_thread(folder.wait_new, before)
    copied = plain_copy(found.files, place.data_dir / "copy")
    saved = Saved(seconds, max(0.0, found.time - acknowledged), copied, found.num_bytes)
    await place.client.delete_context(CONTEXT)
    await asyncio.to_thread(folder.wait_gone, found.manifest)
    return saved


class Beside(NamedTuple):
    """A stream while a document is saved."""

    alone: float
    """Its tokens per second without that."""
    beside: float
    """And with it."""
    saved_s: float
    """From the acknowledgement until the snapshot is complete."""


def print_stream(one: Beside) -> None:
    rates = f"{one.alone:.1f} tokens/s, {one.beside:.1f}"
    log(f"a stream has {rates} beside a document that is saved in {one.saved_s:.2f} s")


class Times:
    """When tokens of a stream came, in seconds since the epoch of the calendar."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._arrivals: list[tuple[float, int]] = []

    def note(self, num_tokens: int) -> None:
        self._arrivals.append((self._clock(), num_tokens))

    def count(self, began: float, ended: float) -> int:
        """Tokens from `began` to `ended`."""
        return sum(number for at, number in self._arrivals if began <= at < ended)


@asynccontextmanager
async def streaming(client: AsyncClient) -> AsyncGenerator[Times, None]:
    """A stream that lasts as long as the block."""
    times, has_begun = Times(), asyncio.Event()
    requested = client.generate(QUESTION, context=STREAM, max_tokens=LONGEST_STREAM, ignore_end_token=True)

    async def watch() -> None:
        async with aclosing(requested):
            async for event in requested:
                if isinstance(event, Delta):
                    times.note(len(event.token_ids))
                    has_begun.set()

    watching = asyncio.create_task(watch())
    try:
        await has_begun.wait()
        yield times
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def save_beside_stream(place: Place, ids: tuple[int, ...]) -> Beside:
    """The stream is watched before the document, while it is saved, and after that."""
    folder, client = SnapshotFolder(place.data_dir), place.client
    async with streaming(client) as times:
        began = time.time()
        await asyncio.sleep(ALONE_SECONDS)
        before, manifests = time.time(), folder.manifests
        await ingest(client, CONTEXT, ids)
        acknowledged = time.time()
        found = await asyncio.to_thread(folder.wait_new, manifests)
        await asyncio.sleep(ALONE_SECONDS)
        ended = time.time()
    alone = times.count(began, before) + times.count(found.time, ended)
    beside = times.count(acknowledged, found.time)
    await client.delete_context(CONTEXT)
    await asyncio.to_thread(folder.wait_gone, found.manifest)
    saved_s = found.time - acknowledged
    return Beside(alone / (before - began + ended - found.time), beside / saved_s, saved_s)


def row(options: Options, plain: Sequence[float], saved: Sequence[Saved], streams: Sequence[Beside]) -> Row:
    """Medians, and the ratios of measurements of the same turn."""
    figures: Row = {"off_acknowledged_s": round(median(plain), 3)}
    if not saved:
        return result(options, figures, [])
    later = [one.acknowledged_s / seconds for one, seconds in zip(saved, plain, strict=True)]
    copy_s = median(one.copy_s for one in saved)
    slower = [one.saved_s / one.copy_s for one in saved]
    slower_beside = [one.saved_s / copy_s for one in streams]
    retained = [one.beside / one.alone for one in streams]
    figures |= {f"seal_{name}": value for name, value in medians([one.seconds for one in saved]).items()}
    figures |= {"snapshot_bytes": saved[-1].num_bytes}
    figures |= {"stream_alone_tokens_per_s": round(median(one.alone for one in streams), 1)}
    figures |= {"stream_beside_tokens_per_s": round(median(one.beside for one in streams), 1)}
    figures |= {"stream_saved_s": round(median(one.saved_s for one in streams), 3)}
    goals = list[Goal]()
    for name, ratios, most in (
        ("acknowledged_ratio", later, MOST_LATER),
        ("saved_ratio", slower, MOST_SAVED),
        ("stream_saved_ratio", slower_beside, MOST_SAVED),
    ):
        figures |= spread(name, ratios)
        goals.append(Goal(name, median(ratios), most))
    figures |= spread("stream_ratio", retained)
    return result(options, figures, [*goals, Goal("stream_ratio", median(retained), LEAST_RATE, is_least=True)])
