"""What it costs that a rank dies: one of four ranks is killed under a live stream, again and again.

The service is started as a user would start it, and watched as a user would watch it. Usage:

    python -m bench.recover --json
    python -m bench.recover --model embedded --tokens 65536 --repeats 2
    python -m bench.recover --model embedded --tokens 4096 --repeats 20 --signal stop

Per model, medians over the kills, in seconds from the kill:

    noticed_s         until the service knew it
    formed_s          from there until the others were a group again
    recovery_s        until all keys that were lost are held again
    stall_s           until the stream's next token
    restored_world_s  until there are as many ranks as before
    full_ingest_s     what reading the whole document takes, in the same run
    ratio             recovery_s over full_ingest_s; the worst of the models is told on top

`--signal stop` stops the process instead of killing it: then it is noticed by its silence. The stream's tokens are held
against those of a stream that nothing disturbed.
"""

import argparse
import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from statistics import median, quantiles

from bench.harness.arguments import tell, unwind_on_terminate
from bench.harness.machine import describe
from bench.harness.service import START_SECONDS
from bench.harness.subjects import EMBEDDED, NAMES, RANDOM_LLAMA, Subject, subject
from longleaf.client import AsyncClient
from longleaf.config import EngineConfig
from longleaf.errors import NotFound
from longleaf.launch import ServiceProcess, coordinator_command
from longleaf.messages import Cluster, Delta

WORLD_SIZE = 4
CONTEXT = "recover"
TOKENS = {EMBEDDED: 262_144, RANDOM_LLAMA: 32_768}
STREAMED = 96
"""Tokens of the stream."""
BEFORE = 16
"""Tokens of it that have come when a rank is killed."""
QUESTION = (65, 66, 67)
HEAL_SECONDS = 300.0
LOOK_SECONDS = 0.01
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass(frozen=True, slots=True)
class Kill:
    """What one loss took; times in seconds."""

    noticed_s: float
    formed_s: float
    recovery_s: float
    stall_s: float
    restored_world_s: float
    lost_tokens: int
    reingested_tokens: int
    is_equal: bool


def main() -> None:
    unwind_on_terminate()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--model", dest="models", nargs="+", choices=NAMES, default=[EMBEDDED, RANDOM_LLAMA])
    parser.add_argument("--tokens", type=int, help="of the document; by default as many as were published")
    parser.add_argument("--repeats", type=int, default=5, help="losses")
    parser.add_argument("--signal", choices=SIGNALS, default="kill")
    given = parser.parse_args()
    rows = [measure_model(name, given) for name in given.models]
    worst = max(float(str(row["ratio"])) for row in rows)
    found = {"bench": "recover", "ratio": worst, "rows": rows, "machine": describe()}
    print(json.dumps(found, indent=2) if given.json else table(rows))


def measure_model(name: str, given: argparse.Namespace) -> dict[str, object]:
    """The row of one model."""
    with subject(name) as measured:
        tokens = given.tokens or TOKENS[name]
        config = EngineConfig(
            model=str(measured.folder), world_size=WORLD_SIZE, max_losses_per_minute=given.repeats + 60
        )
        command = coordinator_command(config, host="127.0.0.1", port=0, launcher="local")
        with ServiceProcess(command) as process:
            address = process.wait_ready(START_SECONDS)
            full, kills = asyncio.run(measure(address, measured, tokens, given.repeats, SIGNALS[given.signal]))
    return {"model": name, "context_tokens": tokens, "world_size": WORLD_SIZE, **summary(full, kills)}


def summary(full_seconds: float, kills: list[Kill]) -> dict[str, object]:
    """Medians, and 95th percentiles of what has limits."""
    columns = {field: [asdict(kill)[field] for kill in kills] for field in asdict(kills[0])}
    equal = columns.pop("is_equal")
    medians = {field: round(median(values), 3) for field, values in columns.items()}
    high = {f"{field}_p95": round(percentile(columns[field]), 3) for field in ("noticed_s", "formed_s")}
    ratio = round(medians["recovery_s"] / full_seconds, 3)
    told = {"full_ingest_s": round(full_seconds, 3), "kills": len(kills), "equal_streams": sum(equal)}
    return medians | high | told | {"ratio": ratio}


def percentile(values: list[float]) -> float:
    """The 95th, between the two nearest."""
    return quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


async def measure(
    address: str, measured: Subject, num_tokens: int, repeats: int, number: signal.Signals
) -> tuple[float, list[Kill]]:
    """What reading all of the document takes, and the losses, each of another rank."""
    async with AsyncClient(address) as client:
        await client.ingest("warm-up", tuple(measured.tokens(2048, seed=1)))
        document, times = tuple(measured.tokens(num_tokens)), list[float]()
        for _ in range(3):
            with suppress(NotFound):
                await client.delete_context(CONTEXT)
            began = time.perf_counter()
            await client.ingest(CONTEXT, document)
            times.append(time.perf_counter() - began)
        tell(f"{measured.name}: {num_tokens:,} tokens are read in {median(times):.2f} s")
        expected = [token async for _, token in stream(client)]
        kills = [await lose(client, turn % WORLD_SIZE, number, expected) for turn in range(repeats)]
        return median(times), kills


async def stream(client: AsyncClient):
    """When each token of a greedy answer came, and which it is."""
    async for event in client.generate(QUESTION, context=CONTEXT, max_tokens=STREAMED, ignore_end_token=True):
        if isinstance(event, Delta):
            for token in event.token_ids:
                yield time.time(), token


class Watch:
    """The cluster as it is told, and when it was seen so first."""

    def __init__(self, client: AsyncClient) -> None:
        self._changes = client.watch_cluster(min_interval=LOOK_SECONDS)
        self.latest: Cluster

    async def until(self, is_so: Callable[[Cluster], bool]) -> float:
        """Waits for it; seconds since the epoch of the calendar."""
        async for found in self._changes:
            self.latest = found
            if is_so(found):
                return time.time()
        raise RuntimeError("the service has ended")


async def lose(client: AsyncClient, rank: int, number: signal.Signals, expected: list[int]) -> Kill:
    """Loses a rank under a stream, and waits until everything is as before."""
    before, watch = await client.cluster(), Watch(client)
    told, enough = list[tuple[float, int]](), asyncio.Event()

    async def read() -> None:
        async for at, token in stream(client):
            told.append((at, token))
            if len(told) >= BEFORE:
                enough.set()

    reading = asyncio.create_task(read())
    await asyncio.wait([reading, asyncio.create_task(enough.wait())], return_when=asyncio.FIRST_COMPLETED)
    killed = time.time()
    os.kill(before.workers[rank].pid, number)
    async with asyncio.timeout(HEAL_SECONDS):
        formed = await watch.until(lambda found: found.epoch > before.epoch)
        recovered = await watch.until(lambda found: found.recovery is not None and found.recovery.is_over)
        restored = await watch.until(lambda found: found.world_size == before.world_size and found.epoch > before.epoch)
        await reading
    loss, recovery = watch.latest.losses[-1], watch.latest.recovery
    assert recovery is not None
    tell(f"rank {rank} lost: all is held again after {recovered - killed:.2f} s, {recovery.lost_tokens:,} tokens")
    return Kill(
        noticed_s=loss.time - killed,
        formed_s=formed - loss.time,
        recovery_s=recovered - killed,
        stall_s=min(at for at, _ in told if at > killed) - killed,
        restored_world_s=restored - killed,
        lost_tokens=recovery.lost_tokens,
        reingested_tokens=recovery.recovered_tokens,
        is_equal=[token for _, token in told] == expected,
    )


def table(rows: list[dict[str, object]]) -> str:
    """For people."""
    return "\n".join(
        f"{row['model']:13} {row['context_tokens']:>8} tokens: noticed {row['noticed_s']} s,"
        f" formed {row['formed_s']} s,"
        f" recovered {row['recovery_s']} s of {row['full_ingest_s']} s: ratio {row['ratio']};"
        f" stall {row['stall_s']} s, all ranks again {row['restored_world_s']} s;"
        f" equal streams {row['equal_streams']} of {row['kills']}"
        for row in rows
    )


if __name__ == "__main__":
    main()
