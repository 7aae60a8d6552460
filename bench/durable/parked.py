"""Time to the first token of an evicted context, restored from a snapshot and recomputed.

A service with room for one and a half documents answers questions about two in turns: each question evicts the other
document.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from bench.durable.asking import ask, ingest
from bench.durable.options import Goal, Options, Row, result, spread
from bench.durable.room import kv_bytes
from bench.durable.service import MODES, Snapshots, TimedService, command
from bench.durable.snapshots import Snapshot, SnapshotFolder
from bench.harness.arguments import log
from bench.harness.service import START_SECONDS
from bench.harness.subjects import EMBEDDED, Subject, subject
from longleaf.client import AsyncClient

MOST = 0.25
ROOM = 1.5
"""In documents."""
CONTEXTS = ("first", "second")
WARM_UP = 2048


class Turn(NamedTuple):
    """One question to a parked context; seconds from the call."""

    back_s: float
    first_token_s: float


class Served(NamedTuple):
    """A service with two documents, of which it holds one."""

    mode: Snapshots
    client: AsyncClient
    ingest_s: list[float]
    saved_s: list[float]
    """From the acknowledgement until a snapshot is complete."""
    snapshots: list[Snapshot]


def measure(options: Options) -> Row:
    """Both services are there all the time, and take turns."""
    with subject(EMBEDDED) as measured, TemporaryDirectory(prefix="longleaf-bench-") as place, ExitStack() as stack:
        folders: dict[Snapshots, Path] = {mode: Path(place) / mode for mode in MODES}
        addresses: dict[Snapshots, str] = {
            mode: host(stack, measured, folders[mode], options, mode) for mode in folders
        }
        served, turns = asyncio.run(_measure(measured, options, addresses, folders))
    return row(options, served, turns)


def host(stack: ExitStack, measured: Subject, data_dir: Path, options: Options, mode: Snapshots) -> str:
    """The address of a service with room for one and a half documents."""
    room = kv_bytes(measured.folder, int(ROOM * options.tokens), options.world_size)
    line = command(measured.folder, data_dir, world_size=options.world_size, snapshots=mode, kv_bytes=room)
    return stack.enter_context(TimedService(line)).wait_ready(START_SECONDS)


async def _measure(
    measured: Subject, options: Options, addresses: dict[Snapshots, str], folders: dict[Snapshots, Path]
) -> tuple[list[Served], dict[Snapshots, list[Turn]]]:
    turns: dict[Snapshots, list[Turn]] = {mode: [] for mode in addresses}
    served = [await fill(measured, options, mode, addresses[mode], folders[mode]) for mode in addresses]
    for number in range(options.repeats):
        for one in served:
            turn = await ask_evicted(one.client, CONTEXTS[number % len(CONTEXTS)])
            turns[one.mode].append(turn)
            log(f"{one.mode}: parked, the first token comes after {turn.first_token_s:.2f} s")
    for one in served:
        await one.client.close()
    return served, turns


async def fill(measured: Subject, options: Options, mode: Snapshots, address: str, data_dir: Path) -> Served:
    """Reads both documents, the second one in the place of the first."""
    client, folder = AsyncClient(address), SnapshotFolder(data_dir)
    served = Served(mode, client, [], [], [])
    await ingest(client, "warm-up", tuple(measured.tokens(WARM_UP, seed=99)))
    if mode == "seal":
        await asyncio.to_thread(folder.wait_new, frozenset[Path]())
    for seed, context in enumerate(CONTEXTS):
        before = folder.manifests
        served.ingest_s.append(await ingest(client, context, tuple(measured.tokens(options.tokens, seed=seed))))
        acknowledged = time.time()
        if mode == "seal":
            found = await asyncio.to_thread(folder.wait_new, before)
            served.snapshots.append(found)
            served.saved_s.append(found.time - acknowledged)
    return served


async def ask_evicted(client: AsyncClient, context: str) -> Turn:
    """Raises RuntimeError if no keys were missing."""
    state = (await client.get_context(context)).state
    answered = await ask(client, context)
    if state != "parked" or not answered.lost_tokens:
        raise RuntimeError(f"{context} was {state}, and {answered.lost_tokens:,} of its tokens were missing")
    return Turn(answered.back_s, answered.first_token_s)


def row(options: Options, served: Sequence[Served], turns: dict[Snapshots, list[Turn]]) -> Row:
    first = {mode: [turn.first_token_s for turn in found] for mode, found in turns.items()}
    figures: Row = {}
    for one in served:
        figures |= {f"{one.mode}_full_ingest_s": round(median(one.ingest_s), 3)}
        figures |= {f"{one.mode}_first_token_s": round(median(first[one.mode]), 3)}
        figures |= spread(f"{one.mode}_first_token_s", first[one.mode])
    goals = [Goal("parked_ratio", median(first["seal"]) / median(first["off"]), MOST)] if "seal" in first else []
    return result(options, figures, goals)
