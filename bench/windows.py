"""Windowed layers whose keys lie on every rank against the same keys on one rank each: decode, ingest and room.

The service's engine on real ranks of one machine, without gRPC. Two fleets live at the same time, one for each
`--window-keys`, and take turns; while one works the other waits in a socket. Usage:

    python -m bench.windows --json
    python -m bench.windows --model random-gemma3 --context 4000 --repeats 2
"""

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

from bench.harness.arguments import log, unwind_on_terminate
from bench.harness.engine import Generations, running
from bench.harness.machine import describe
from bench.harness.subjects import EMBEDDED, RANDOM_GEMMA3, Subject, subject
from bench.harness.timing import compare
from bench.shared import CONTEXT, rate
from longleaf.config import EngineConfig, WindowKeys

CHUNK_SIZE = 4096
KV_BYTES = 1 << 30
NAMES = (RANDOM_GEMMA3, EMBEDDED)
WAYS: tuple[WindowKeys, ...] = ("replicated", "sharded")


def main() -> None:
    unwind_on_terminate()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a list of rows as JSON")
    parser.add_argument("--model", dest="models", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--context", type=int, default=8000, metavar="TOKENS")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--generations", dest="batches", nargs="+", type=int, default=(1, 8), help="at once")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each generation, at least 2")
    parser.add_argument("--repeats", type=int, default=5, help="timed turns of each side")
    options = parser.parse_args()
    if min(options.context, options.repeats, options.tokens - 1, options.world_size, *options.batches) < 1:
        parser.error("too little to measure")
    rows: list[dict[str, object]] = []
    for name in options.models:
        with subject(name) as measured:
            rows += asyncio.run(measure(measured, options))
    print(json.dumps(rows, indent=2) if options.json else "\n".join(map(text, rows)))


async def measure(measured: Subject, options: argparse.Namespace) -> list[dict[str, object]]:
    """A row of ingest, and one of decode for each number of generations at once."""
    async with AsyncExitStack() as stack:
        fleets: list[Generations] = []
        for way in WAYS:
            config = EngineConfig(
                model=str(measured.folder),
                world_size=options.world_size,
                chunk_size=CHUNK_SIZE,
                kv_bytes=KV_BYTES,
                window_keys=way,
            )
            fleets.append(await stack.enter_async_context(running(config)))
        document = measured.tokens(options.context)
        log(f"{measured.name}: ingesting {options.context} tokens")
        rates = await alternate(fleets, options.repeats, lambda fleet: ingest_rate(fleet, document))
        found = [{"work": "ingest", "generations": 1, **rates}]
        for fleet in fleets:
            await fleet.ingest(CONTEXT, document)
        for batch in options.batches:
            log(f"{measured.name}: {batch} generations at once")
            questions = [tuple(measured.tokens(4, seed=i + 1)) for i in range(batch)]
            rates = await alternate(fleets, options.repeats, lambda fleet: rate(fleet, questions, options.tokens))  # noqa: B023
            found.append({"work": "decode", "generations": batch, **rates})
        room = {way: fleet.max_tokens for way, fleet in zip(WAYS, fleets, strict=True)}
    common = {
        "model": measured.name,
        "context_tokens": options.context,
        "world_size": options.world_size,
        "kv_bytes_per_rank": KV_BYTES,
        "max_tokens_held": room,
        "repeats": options.repeats,
        "machine": describe(),
    }
    return [{"bench": "windows", **row, **common} for row in found]


async def alternate(
    fleets: Sequence[Generations], repeats: int, turn: Callable[[Generations], Awaitable[float]]
) -> dict[str, float]:
    """Rates of both fleets, which take turns, compared; the first turns do not count."""
    rates = [[await turn(fleet) for fleet in fleets] for _ in range(repeats + 1)]
    replicated, sharded = zip(*rates[1:], strict=True)
    return compare(replicated, sharded)


async def ingest_rate(fleet: Generations, document: Sequence[int]) -> float:
    """Tokens per second."""
    seconds = await fleet.ingest(CONTEXT, document)
    await fleet.delete(CONTEXT)
    return len(document) / seconds


def text(row: dict[str, object]) -> str:
    return (
        f"{row['model']}, {row['work']}, {row['generations']} at once: with windows on every rank {row['ratio']} times "
        f"as fast ({row['service_tokens_per_s']} against {row['baseline_tokens_per_s']} tokens/s); room for "
        f"{row['max_tokens_held']} tokens"
    )


if __name__ == "__main__":
    main()
