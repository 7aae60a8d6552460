"""Generations over one long context: all together against the same ones one after another.

The service's engine on real ranks, without gRPC. Both sides take turns; decode throughput counts the tokens after each
generation's first one. Then so many generations together at a time, for the bytes of keys and values that rank 0 reads
per step. Usage:

    python -m bench.shared --json
    python -m bench.shared --context 8000 --tokens 16 --repeats 2
"""

import argparse
import asyncio
import json
from statistics import median

from bench.harness.arguments import log, unwind_on_terminate
from bench.harness.engine import Generations, running
from bench.harness.machine import describe
from bench.harness.subjects import EMBEDDED, NAMES, Subject, subject
from bench.harness.timing import compare
from longleaf.config import EngineConfig

CHUNK_SIZE = 4096
TARGET = 4.0
CONTEXT = "document"


def main() -> None:
    unwind_on_terminate()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--model", choices=NAMES, default=EMBEDDED)
    parser.add_argument("--context", type=int, default=64000, metavar="TOKENS")
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each generation, at least 2")
    parser.add_argument("--repeats", type=int, default=5, help="timed turns of each side")
    options = parser.parse_args()
    if min(options.context, options.generations, options.repeats, options.tokens - 1) < 1:
        parser.error("too little to measure")
    with subject(options.model) as measured:
        row = asyncio.run(measure(measured, options))
    print(json.dumps(row, indent=2) if options.json else text(row))


async def measure(measured: Subject, options: argparse.Namespace) -> dict[str, object]:
    """The one row of this measurement."""
    config = EngineConfig(model=str(measured.folder), world_size=options.world_size, chunk_size=CHUNK_SIZE)
    async with running(config) as generations:
        log(f"{measured.name}: ingesting {options.context} tokens")
        await generations.ingest(CONTEXT, measured.tokens(options.context))
        questions = [tuple(measured.tokens(4, seed=i + 1)) for i in range(options.generations)]
        together: list[float] = []
        apart: list[float] = []
        for turn in range(options.repeats + 1):
            rates = (
                await rate(generations, questions, options.tokens),
                await rate_apart(generations, questions, options.tokens),
            )
            log(f"  {turn or 'warm-up'}: {rates[0]:.1f} and {rates[1]:.1f} tokens/s")
            if turn:
                together.append(rates[0])
                apart.append(rates[1])
        read = {n: await bytes_read(generations, questions[:n], options.tokens) for n in counts(options.generations)}
    return {
        "bench": "shared",
        "model": measured.name,
        "context_tokens": options.context,
        "generations": options.generations,
        "world_size": options.world_size,
        **compare(together, apart),
        "target": TARGET,
        "kv_bytes_per_step": {str(n): count for n, count in read.items()},
        "kv_bytes_growth": round(read[options.generations] / read[1], 3),
        "new_tokens": options.tokens,
        "repeats": options.repeats,
        "machine": describe(),
    }


async def rate(generations: Generations, questions: list[tuple[int, ...]], num_tokens: int) -> float:
    """Tokens per second of all together, from the first token of the first to the last of the last."""
    found = await asyncio.gather(*(generations.decode(CONTEXT, ids, num_tokens) for ids in questions))
    seconds = max(times[-1] for times in found) - min(times[0] for times in found)
    return sum(len(times) - 1 for times in found) / seconds


async def rate_apart(generations: Generations, questions: list[tuple[int, ...]], num_tokens: int) -> float:
    """Tokens per second of one after another, without the time to each first token."""
    found = [await generations.decode(CONTEXT, ids, num_tokens) for ids in questions]
    return sum(len(times) - 1 for times in found) / sum(times[-1] - times[0] for times in found)


async def bytes_read(generations: Generations, questions: list[tuple[int, ...]], num_tokens: int) -> int:
    """Median bytes per step in which all generations took part."""
    generations.take_steps()
    await rate(generations, questions, num_tokens)
    full = [step for step in generations.take_steps() if step.num_sequences == len(questions)]
    return round(median(step.kv_bytes_read for step in full))


def counts(most: int) -> list[int]:
    """1, 2, 4 ... and `most`."""
    return sorted({most, *(1 << i for i in range(most.bit_length()) if 1 << i <= most)})


def text(row: dict[str, object]) -> str:
    return (
        f"{row['generations']} generations over {row['context_tokens']} tokens: {row['ratio']} times one after another "
        f"({row['service_tokens_per_s']} against {row['baseline_tokens_per_s']} tokens/s), bytes per step "
        f"{row['kv_bytes_per_step']}"
    )


if __name__ == "__main__":
    main()
