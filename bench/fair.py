"""The cost of a long ingest to a running stream: time between deltas with and without it, measured at the client.

The service is started with the public command. Usage:

    python -m bench.fair --json
    python -m bench.fair --ingest 20000 --target-itl-ms 50
"""

import argparse
import asyncio
import json
import time
from statistics import quantiles

from bench.harness.arguments import log, unwind_on_terminate
from bench.harness.machine import describe
from bench.harness.service import START_SECONDS
from bench.harness.subjects import EMBEDDED, Subject, subject
from longleaf.client import AsyncClient
from longleaf.config import EngineConfig
from longleaf.launch import ServiceProcess, coordinator_command
from longleaf.service_settings import ServiceConfig
from longleaf.types import Delta

STREAM, DOCUMENT = "fair-stream", "fair-document"
MIN_DELTAS = 20
MAX_TOKENS = 50_000
"""More than come while the document is read."""


def main() -> None:
    unwind_on_terminate()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--context", type=int, default=8000, metavar="TOKENS", help="the subject of the stream")
    parser.add_argument("--ingest", type=int, default=100_000, metavar="TOKENS", help="the document beside it")
    parser.add_argument("--tokens", type=int, default=200, help="tokens that are timed without the ingest")
    parser.add_argument("--target-itl-ms", type=float, default=EngineConfig(model="").target_itl_ms)
    given = parser.parse_args()
    with subject(EMBEDDED) as measured:
        config = EngineConfig(model=str(measured.folder), target_itl_ms=given.target_itl_ms)
        command = coordinator_command(ServiceConfig(engine=config, port=0, launcher="local"))
        with ServiceProcess(command) as process:
            address = process.wait_ready(START_SECONDS)
            found = asyncio.run(measure(address, measured, given.context, given.ingest, given.tokens))
    found = {"bench": "fair", "target_itl_ms": given.target_itl_ms, **found, "machine": describe()}
    print(json.dumps(found, indent=2) if given.json else table(found))


async def measure(
    address: str, measured: Subject, context: int, ingest: int, num_tokens: int
) -> dict[str, dict[str, float]]:
    """Gaps of one stream without and with the ingest, and the speed of the ingest."""
    async with AsyncClient(address) as client:
        log(f"ingesting {context} tokens for the stream")
        await client.ingest(STREAM, tuple(measured.tokens(context)))
        answer = client.generate([65], context=STREAM, max_tokens=MAX_TOKENS, ignore_end_token=True)
        arrivals: list[float] = []
        enough = asyncio.Event()

        async def read() -> None:
            async for event in answer:
                arrivals.extend([time.perf_counter()] if isinstance(event, Delta) else [])
                if len(arrivals) > num_tokens:
                    enough.set()

        reading = asyncio.create_task(read())
        await enough.wait()
        log(f"ingesting {ingest} tokens beside it")
        began = time.perf_counter()
        await client.ingest(DOCUMENT, tuple(measured.tokens(ingest, seed=1)))
        ended = time.perf_counter()
        reading.cancel()
        await asyncio.wait([reading])
    alone = gaps([at for at in arrivals[1:] if at <= began])
    beside = gaps([at for at in arrivals if began <= at <= ended])
    speed = {"tokens": ingest, "tokens_per_s": round(ingest / (ended - began), 1)}
    return {"alone_ms": alone, "beside_ms": beside, "ingest": speed}


def gaps(arrivals: list[float]) -> dict[str, float]:
    """Percentiles of the times between arrivals, in milliseconds."""
    if len(arrivals) < MIN_DELTAS:
        raise SystemExit(f"only {len(arrivals)} deltas came: take a longer ingest or more tokens")
    between = [(b - a) * 1e3 for a, b in zip(arrivals[:-1], arrivals[1:], strict=True)]
    cuts = quantiles(between, n=100, method="inclusive")
    named = {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98], "max": max(between)}
    return {name: round(value, 2) for name, value in named.items()} | {"deltas": len(arrivals)}


def table(found: dict[str, object]) -> str:
    return "\n".join(f"{name}: {found[name]}" for name in ("target_itl_ms", "alone_ms", "beside_ms", "ingest"))


if __name__ == "__main__":
    main()
