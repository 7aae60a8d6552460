"""The cost of a lost rank: one of four ranks is killed under a live stream, repeatedly.

The service is started and watched with the public commands. Usage:

    python -m bench.recover --json
    python -m bench.recover --model embedded --tokens 65536 --repeats 2 --losses 0

Per model, medians over the kills, in seconds from the kill:

    noticed_s         until the service detected it
    formed_s          from there until the others were a group again
    recovery_s        until all keys that were lost are recovered
    stall_s           the longest time without a token of the stream, from the kill on
    restored_world_s  until there are as many ranks as before
    full_ingest_s     duration of the ingest of the whole document, in the same run
    ratio             recovery_s over full_ingest_s; the worst of the models is printed first

The stream's tokens are compared with those of an undisturbed stream; `near_ties` of these were chosen by less than
0.0001, and may differ after a loss. Then a service with few keys loses many ranks, to measure the detection time:
killed, with either launcher; stopped, which is detected by silence; and lost with their Ray node.
"""

import argparse
import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import NamedTuple, Protocol

from bench.harness.arguments import log, unwind_on_terminate
from bench.harness.machine import describe
from bench.harness.ray_nodes import RayNodes, ray_nodes
from bench.harness.service import START_SECONDS
from bench.harness.subjects import EMBEDDED, NAMES, RANDOM_LLAMA, Subject, subject
from longleaf.client import AsyncClient
from longleaf.config import EngineConfig, Launcher
from longleaf.errors import NotFound
from longleaf.launch import ServiceProcess, coordinator_command
from longleaf.service_settings import ServiceConfig
from longleaf.types import Cluster, Delta

WORLD_SIZE = 4
TARGET = 0.45
"""Largest ratio wanted."""
CONTEXT = "recover"
TOKENS = {EMBEDDED: 262_144, RANDOM_LLAMA: 32_768}
LITTLE = 4096
"""Tokens that are held where it is measured how losses are noticed."""
STREAMED = 96
"""Tokens of the stream."""
BEFORE = 16
"""Tokens of it that have come when a rank is killed."""
NEAR_TIE = 1e-4
QUESTION = (65, 66, 67)
HEAL_SECONDS = 600.0
LOOK_SECONDS = 0.01
NODE = "with their node"
"""How those ranks are lost that a Ray node takes with it."""
WAYS: tuple[tuple[Launcher, str], ...] = (("local", "killed"), ("ray", "killed"), ("local", "stopped"), ("ray", NODE))
"""The launchers of the ranks, and the kinds of loss for which the time to detection is measured."""
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


@dataclass(frozen=True, slots=True)
class Kill:
    """Measurements of one loss; times in seconds."""

    noticed_s: float
    formed_s: float
    recovery_s: float
    stall_s: float
    restored_world_s: float
    lost_tokens: int
    recomputed_tokens: int
    is_equal: bool


class Measured(NamedTuple):
    """Losses of one service."""

    full_ingest_s: float
    near_ties: int
    kills: list[Kill]


class StreamToken(NamedTuple):
    """A token of a stream, when it came, and by how much it was chosen."""

    time: float
    token: int
    margin: float


def main() -> None:
    unwind_on_terminate()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--model", dest="models", nargs="+", choices=NAMES, default=[EMBEDDED, RANDOM_LLAMA])
    parser.add_argument("--tokens", type=int, help="tokens of the document; by default as many as were published")
    parser.add_argument("--repeats", type=int, default=5, help="losses per model")
    parser.add_argument("--losses", type=int, default=20, help="per way in which they are noticed; 0: none")
    given = parser.parse_args()
    if given.repeats < 1:
        parser.error("--repeats: nothing is measured without a loss")
    rows = [measure_model(name, given) for name in given.models]
    noticed = [measure_way(launcher, how, given.losses) for launcher, how in WAYS if given.losses]
    worst = max(float(str(row["ratio"])) for row in rows)
    found = {"bench": "recover", "ratio": worst, "target": TARGET, "rows": rows, "noticed": noticed}
    found["machine"] = describe()
    print(json.dumps(found, indent=2) if given.json else table(rows, noticed))


def measure_model(name: str, given: argparse.Namespace) -> dict[str, object]:
    """The row of one model."""
    tokens = given.tokens or TOKENS[name]
    found = lose_all(name, tokens, given.repeats, "local", "killed")
    return {"model": name, "context_tokens": tokens, "world_size": WORLD_SIZE, **summary(found)}


def measure_way(launcher: Launcher, how: str, losses: int) -> dict[str, object]:
    """The row of one way to lose a rank."""
    row = summary(lose_all(EMBEDDED, LITTLE, losses, launcher, how))
    times = {name: row[name] for name in ("kills", "noticed_s", "noticed_s_p95", "formed_s", "formed_s_p95")}
    return {"launcher": launcher, "how": how, **times}


def lose_all(name: str, tokens: int, repeats: int, launcher: Launcher, how: str) -> Measured:
    """Starts a service, and loses one of its ranks after the other, or those of a node."""
    with ExitStack() as stack:
        nodes = stack.enter_context(ray_nodes(WORLD_SIZE // 2)) if how == NODE else None
        measured = stack.enter_context(subject(name))
        config = EngineConfig(model=str(measured.folder), world_size=WORLD_SIZE, max_losses_per_minute=2 * repeats + 60)
        ray_address = nodes.address if nodes else None
        command = coordinator_command(ServiceConfig(engine=config, port=0, launcher=launcher, ray_address=ray_address))
        process = stack.enter_context(ServiceProcess(command))
        address = process.wait_ready(START_SECONDS)
        hurt: Hurt = NodeHurt(nodes) if nodes else ProcessHurt(SIGNALS[how])
        return asyncio.run(measure(address, measured, tokens, repeats, hurt))


class Hurt(Protocol):
    """How ranks are lost."""

    def strike(self, cluster: Cluster, turn: int) -> None:
        """Has them lost: others the next time."""
        ...

    def mend(self) -> None:
        """Has others be able to take their place."""
        ...


class ProcessHurt:
    """A signal to the process of a rank."""

    def __init__(self, number: signal.Signals) -> None:
        self._number = number

    def strike(self, cluster: Cluster, turn: int) -> None:
        os.kill(cluster.workers[turn % cluster.world_size].pid, self._number)

    def mend(self) -> None:
        """Nothing is missing."""


class NodeHurt:
    """The end of a Ray node."""

    def __init__(self, nodes: RayNodes) -> None:
        self._nodes = nodes

    def strike(self, cluster: Cluster, turn: int) -> None:
        self._nodes.kill()

    def mend(self) -> None:
        self._nodes.come_back()


def summary(found: Measured) -> dict[str, object]:
    """Medians, and 95th percentiles of the measurements that have limits."""
    columns = {field: [asdict(kill)[field] for kill in found.kills] for field in asdict(found.kills[0])}
    equal = columns.pop("is_equal")
    medians = {field: round(median(values), 3) for field, values in columns.items()}
    high = {f"{field}_p95": round(percentile(columns[field]), 3) for field in ("noticed_s", "formed_s")}
    reported = {"full_ingest_s": round(found.full_ingest_s, 3), "kills": len(found.kills), "equal_streams": sum(equal)}
    ratio = round(medians["recovery_s"] / found.full_ingest_s, 3)
    return medians | high | reported | {"near_ties": found.near_ties, "ratio": ratio}


def percentile(values: list[float]) -> float:
    """The 95th, between the two nearest."""
    return quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


async def measure(address: str, measured: Subject, num_tokens: int, repeats: int, hurt: Hurt) -> Measured:
    """Measures a full ingest of the document, and the losses."""
    async with AsyncClient(address) as client:
        await client.ingest("warm-up", tuple(measured.tokens(2048, seed=1)))
        document, times = tuple(measured.tokens(num_tokens)), list[float]()
        for _ in range(3):
            with suppress(NotFound):
                await client.delete_context(CONTEXT)
            began = time.perf_counter()
            await client.ingest(CONTEXT, document)
            times.append(time.perf_counter() - began)
        log(f"{measured.name}: {num_tokens:,} tokens are read in {median(times):.2f} s")
        return await lose_in_turns(client, median(times), repeats, hurt)


async def lose_in_turns(client: AsyncClient, full_ingest_s: float, repeats: int, hurt: Hurt) -> Measured:
    """The losses of a service that holds the document, each of another rank."""
    expected = [reported async for reported in stream(client)]
    near_ties = sum(reported.margin < NEAR_TIE for reported in expected)
    tokens = [reported.token for reported in expected]
    kills = [await lose(client, turn, hurt, tokens) for turn in range(repeats)]
    return Measured(full_ingest_s, near_ties, kills)


async def stream(client: AsyncClient) -> AsyncIterator[StreamToken]:
    """A greedy answer."""
    requested = client.generate(QUESTION, context=CONTEXT, max_tokens=STREAMED, ignore_end_token=True, num_logprobs=2)
    async for event in requested:
        if isinstance(event, Delta):
            for token, logprobs in zip(event.token_ids, event.logprobs, strict=True):
                best, second = logprobs.top
                yield StreamToken(time.time(), token, best.logprob - second.logprob)


def longest_gap(times: Sequence[float], since: float) -> float:
    """The longest time without a token, among the times after `since`."""
    after = [since, *(at for at in times if at > since)]
    return max((b - a for a, b in pairwise(after)), default=0.0)


class Watch:
    """The reported states of the cluster, and the time at which each was first seen."""

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


async def lose(client: AsyncClient, turn: int, hurt: Hurt, expected: list[int]) -> Kill:
    """Loses ranks under a stream, and waits until everything is as before."""
    before, watch = await client.cluster(), Watch(client)
    tokens, enough = list[StreamToken](), asyncio.Event()

    async def read() -> None:
        async for one in stream(client):
            tokens.append(one)
            if len(tokens) >= BEFORE:
                enough.set()

    reading = asyncio.create_task(read())
    await asyncio.wait([reading, asyncio.create_task(enough.wait())], return_when=asyncio.FIRST_COMPLETED)
    killed = time.time()
    hurt.strike(before, turn)
    async with asyncio.timeout(HEAL_SECONDS):
        formed = await watch.until(lambda found: found.epoch > before.epoch)
        recovered = await watch.until(lambda found: found.recovery is not None and found.recovery.is_done)
        await asyncio.to_thread(hurt.mend)
        restored = await watch.until(lambda found: found.world_size == before.world_size and found.epoch > before.epoch)
        await reading
    recovery = watch.latest.recovery
    noticed = min(loss.time for loss in watch.latest.losses if loss.time > killed)
    assert recovery is not None
    log(f"loss {turn + 1}: all is recovered after {recovered - killed:.2f} s, {recovery.lost_tokens:,} tokens")
    return Kill(
        noticed_s=noticed - killed,
        formed_s=formed - noticed,
        recovery_s=recovered - killed,
        stall_s=longest_gap([one.time for one in tokens], killed),
        restored_world_s=restored - killed,
        lost_tokens=recovery.lost_tokens,
        recomputed_tokens=recovery.recovered_tokens,
        is_equal=[one.token for one in tokens] == expected,
    )


def table(rows: list[dict[str, object]], noticed: list[dict[str, object]]) -> str:
    """For people."""
    models = [
        f"{row['model']:13} {row['context_tokens']:>8} tokens: noticed {row['noticed_s']} s,"
        f" formed {row['formed_s']} s,"
        f" recovered {row['recovery_s']} s of {row['full_ingest_s']} s: ratio {row['ratio']};"
        f" stall {row['stall_s']} s, all ranks again {row['restored_world_s']} s;"
        f" equal streams {row['equal_streams']} of {row['kills']}, {row['near_ties']} near ties"
        for row in rows
    ]
    ways = [
        f"{row['kills']} ranks {row['how']}, launcher {row['launcher']}: noticed {row['noticed_s']} s"
        f" (95 %: {row['noticed_s_p95']}), formed {row['formed_s']} s (95 %: {row['formed_s_p95']})"
        for row in noticed
    ]
    return "\n".join([*models, *ways])


if __name__ == "__main__":
    main()
