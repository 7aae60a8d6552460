"""Two ranks on two cores against one rank on one core, over one long context: ingest and decode.

The service's engine on real ranks, without gRPC, one thread per rank. Both fleets exist at the same time and take
turns; while one works the other waits in a socket. `ceiling` is the gain of as many processes on this machine without a
service. Usage:

    python -m bench.scaling --json
    python -m bench.scaling --context 32000 --repeats 2
"""

import argparse
import asyncio
import json
from contextlib import AsyncExitStack

import psutil

from bench.harness.arguments import log, unwind_on_terminate
from bench.harness.engine import Generations, running
from bench.harness.machine import describe
from bench.harness.subjects import EMBEDDED, NAMES, Subject, subject
from bench.harness.timing import compare
from bench.scaling import ceiling
from longleaf.config import EngineConfig

CHUNK_SIZE = 4096
TARGET = 1.6
CONTEXT = "document"


def main() -> None:
    unwind_on_terminate()
    parser = argparse.ArgumentParser(
        "python -m bench.scaling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print a list of rows as JSON")
    parser.add_argument("--model", choices=NAMES, default=EMBEDDED)
    parser.add_argument("--context", type=int, default=256000, metavar="TOKENS")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate in each turn, at least 2")
    parser.add_argument("--repeats", type=int, default=3, help="timed turns of each side")
    options = parser.parse_args()
    if min(options.context, options.repeats, options.tokens - 1, options.world_size - 1) < 1:
        parser.error("too little to measure")
    with subject(options.model) as measured:
        rows = asyncio.run(measure(measured, options))
    print(json.dumps(rows, indent=2) if options.json else "\n".join(map(text, rows)))


async def measure(measured: Subject, options: argparse.Namespace) -> list[dict[str, object]]:
    """A row of ingest and one of decode."""
    async with AsyncExitStack() as stack:
        fleets: list[Generations] = []
        for world_size in (options.world_size, 1):
            config = EngineConfig(model=str(measured.folder), world_size=world_size, chunk_size=CHUNK_SIZE)
            fleets.append(await stack.enter_async_context(running(config)))
        ingested: list[list[float]] = [[], []]
        decoded: list[list[float]] = [[], []]
        for turn in range(options.repeats + 1):
            document = measured.tokens(options.context, seed=turn)
            for fleet, reading, answering in zip(fleets, ingested, decoded, strict=True):
                seconds = await fleet.ingest(CONTEXT, document)
                times = await fleet.decode(CONTEXT, tuple(document[:4]), options.tokens)
                await fleet.delete(CONTEXT)
                if turn:
                    reading.append(len(document) / seconds)
                    answering.append((len(times) - 1) / (times[-1] - times[0]))
            log(f"{turn or 'warm-up'}: {ingested[0][-1:]} and {ingested[1][-1:]} read, {decoded} answered tokens/s")
    common = {
        "model": measured.name,
        "context_tokens": options.context,
        "world_size": options.world_size,
        "target": TARGET,
        "repeats": options.repeats,
        "physical_cores": psutil.cpu_count(logical=False),
        "machine": describe(),
    }
    sides = {"ingest": (ingested, ceiling.INGEST), "decode": (decoded, ceiling.DECODE)}
    return [
        {
            "bench": "scaling",
            "work": work,
            **compare(*rates),
            "ceiling": ceiling.gain(load, options.world_size),
            **common,
        }
        for work, (rates, load) in sides.items()
    ]


def text(row: dict[str, object]) -> str:
    return (
        f"{row['work']}: {row['world_size']} ranks are {row['ratio']} times as fast as one "
        f"({row['service_tokens_per_s']} against {row['baseline_tokens_per_s']} tokens/s); this machine gives at most "
        f"{row['ceiling']}"
    )


if __name__ == "__main__":
    main()
