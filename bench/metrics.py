"""The cost of metrics: of a scrape, and of counting events.

An engine on ranks without processes holds contexts, and tenants have made calls of several kinds. Measured are the
port's answer to a client on the same machine, the part of it that blocks the event loop (`refresh`), and the observer's
time per event, in loops. Usage:

    python -m bench.metrics --json
    python -m bench.metrics --ranks 8 --tenants 5
"""

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from bench.harness.arguments import unwind_on_terminate
from bench.harness.machine import describe
from bench.harness.timing import percentiles
from coordinator.engine.engine import Engine
from coordinator.engine_messages import Admitted, DocumentPrompt, Ended, Tokens
from coordinator.telemetry.counters import Counts
from coordinator.telemetry.metric_sources import MetricSources
from coordinator.telemetry.metrics import Metrics
from coordinator.telemetry.observers import CallRecord, Observers
from longleaf.config import EngineConfig
from longleaf.sampling import Token
from tests.support.fakes.ranks import FakeRanks

RANKS, TENANTS, CONTEXTS, REPEATS, EVENTS = 64, 20, 500, 50, 100_000
METHODS = ("Generate", "IngestContext", "GetContext", "ListContexts", "DeleteContext")
CODES = ("OK", "CANCELLED", "RESOURCE_EXHAUSTED")
TARGET_MS = 50.0
"""Maximum time of an answer with this many ranks and tenants."""
BLOCK, TOKENS = 16, 1024
"""Tokens per block, and per context."""


def main() -> None:
    unwind_on_terminate()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--tenants", type=int, default=TENANTS)
    parser.add_argument("--contexts", type=int, default=CONTEXTS)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="answers that are timed")
    parser.add_argument("--events", type=int, default=EVENTS, help="timed repetitions of each kind")
    given = parser.parse_args()
    scrape = asyncio.run(scraped(given.ranks, given.tenants, given.contexts, given.repeats))
    found = {"bench": "metrics", "target_ms": TARGET_MS, "scrape": scrape, "event_us": per_event(given.events)}
    found |= {"machine": describe()}
    print(json.dumps(found, indent=2) if given.json else table(found))


async def scraped(num_ranks: int, num_tenants: int, num_contexts: int, repeats: int) -> dict[str, Any]:
    """Answers of the port, in milliseconds, and their size."""
    config = EngineConfig(model="none", world_size=num_ranks, block_size=BLOCK, chunk_size=TOKENS)
    blocks = 2 + num_contexts * TOKENS // BLOCK
    engine = Engine(FakeRanks(num_ranks, blocks), config, max_positions=2 * TOKENS)
    metrics = Metrics("model", "local")
    await engine.start()
    running = asyncio.create_task(engine.run())
    try:
        for number in range(num_contexts):
            document = DocumentPrompt(context=f"tenant-{number % num_tenants}/c{number}", token_ids=range(TOKENS))
            [_ async for _ in engine.ingest(document)]
        for number in range(num_tenants):
            use(metrics, f"tenant-{number}")
        sources = MetricSources(cluster=engine.cluster, counts=lambda: engine.counts, ranks_lost=lambda: 0)
        url = await metrics.start(sources, "127.0.0.1", 0)
        answers = [await timed(int(url.split(":")[2].partition("/")[0])) for _ in range(repeats + 1)][1:]
        resident = [seconds_of(metrics.refresh) for _ in range(repeats)]
    finally:
        await metrics.stop()
        await engine.close()
        await running
    _, text = answers[0]
    sizes = {"ranks": num_ranks, "tenants": num_tenants, "contexts": num_contexts, "bytes": len(text)}
    sizes |= {"series": sum(not line.startswith(b"#") for line in text.splitlines())}
    times = percentiles("ms", [seconds for seconds, _ in answers])
    return sizes | times | {"event_loop_ms": round(median(resident) * 1e3, 3)}


def use(metrics: Metrics, tenant: str) -> None:
    """Calls of all kinds, which leave a series each, and a generation."""
    for method in METHODS:
        for code in CODES:
            record = CallRecord(f"/longleaf.v1.SomeService/{method}", "", {})
            with metrics.observer.observe_call(record):
                record.tenant, record.code = tenant, code
    with metrics.observer.observe_generation("", tenant) as emit:
        emit(Admitted(10, 5))
        for index in range(10):
            emit(Tokens(index, (Token(1),)))


async def timed(port: int) -> tuple[float, bytes]:
    """Seconds of one answer, and its body."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
    answer = await reader.read()
    seconds = time.perf_counter() - began
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    return seconds, body


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def per_event(count: int) -> dict[str, float]:
    """Microseconds of one event of each kind; of tokens also without metrics, for comparison."""
    observer, counts = Metrics("model", "local").observer, Counts()
    tokens, record = Tokens(0, (Token(1),)), CallRecord("/a/Generate", "", {}, tenant="acme", code="OK")

    def call() -> None:
        with observer.observe_call(record):
            pass

    def generation() -> None:
        with observer.observe_generation("", "acme") as emit:
            emit(Admitted(10, 5))
            emit(Ended("length", 10, 5, 1, 0.0, 0.0, 0.0))

    with (
        Observers([observer]).observe_generation("", "acme") as emit,
        Observers().observe_generation("", "acme") as unseen,
    ):
        kinds: dict[str, Callable[[], object]] = {
            "token": lambda: emit(tokens),
            "token_without_metrics": lambda: unseen(tokens),
            "call": call,
            "generation": generation,
            "step": lambda: counts.add_step("decode", 0.01, 4096),
        }
        return {name: round(min(_loop(work, count) for _ in range(3)) / count * 1e6, 3) for name, work in kinds.items()}


def _loop(work: Callable[[], object], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        work()
    return time.perf_counter() - began


def table(found: dict[str, Any]) -> str:
    return "\n".join(f"{name}: {value}" for part in ("scrape", "event_us") for name, value in found[part].items())


if __name__ == "__main__":
    main()
