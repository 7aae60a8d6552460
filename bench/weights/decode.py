"""Decoding with sharded weights against whole ones."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from statistics import median

from bench.durable.options import Row
from bench.harness.arguments import log
from bench.harness.engine import Generations, running
from bench.harness.subjects import Subject
from bench.shared import CONTEXT, rate
from longleaf.config import EngineConfig, WeightsChoice

KV_BYTES = 1 << 27
DOCUMENT_TOKENS = 256
WAYS: tuple[WeightsChoice, ...] = ("sharded", "whole")


async def measure(measured: Subject, batches: Sequence[int], num_tokens: int, repeats: int) -> Row:
    """Time per token on two ranks relative to that with whole weights, for numbers of generations at once. Two engines
    exist at the same time and take turns; while one works, the other waits in a socket.
    """
    async with AsyncExitStack() as stack:
        fleets = dict[WeightsChoice, Generations]()
        for way in WAYS:
            config = EngineConfig(
                model=str(measured.folder),
                world_size=2,
                weights=way,
                kv_bytes=KV_BYTES,
                max_draft_tokens=0,
                verify_model=False,
            )
            fleets[way] = await stack.enter_async_context(running(config))
            await fleets[way].ingest(CONTEXT, measured.tokens(DOCUMENT_TOKENS))
        found: Row = {"model": measured.name, "ranks": 2, "new_tokens": num_tokens, "repeats": repeats}
        for batch in batches:
            questions = [tuple(measured.tokens(4, seed=i + 1)) for i in range(batch)]
            found |= await alternate(fleets, questions, num_tokens, repeats)
    return found


async def alternate(
    fleets: dict[WeightsChoice, Generations], questions: list[tuple[int, ...]], num_tokens: int, repeats: int
) -> Row:
    """Times per token relative to whole weights, as medians over turns, in elapsed time and in processor time of all
    ranks. Other programs hardly change the latter. The first turn is not counted.
    """
    found = list[Row]()
    for turn in range(repeats + 1):
        order = WAYS if turn % 2 else WAYS[::-1]
        now = {way: await _measured(fleets[way], questions, num_tokens) for way in order}
        (rate_sharded, used_sharded), (rate_whole, used_whole) = (now[way] for way in WAYS)
        log(
            f"{len(questions)} at once, turn {turn}: {rate_sharded:.2f} against {rate_whole:.2f} tokens/s, "
            f"{used_sharded:.2f} against {used_whole:.2f} s of processors"
        )
        one = {"time": rate_whole / rate_sharded, "processors": used_sharded / used_whole}
        found.append({**one, "sharded": rate_sharded, "whole": rate_whole})
    ratios = [one["time"] for one in found[1:]]
    name = f"rows_{len(questions)}"
    return {
        name: round(median(ratios), 3),
        f"{name}_min": round(min(ratios), 3),
        f"{name}_max": round(max(ratios), 3),
        f"{name}_processors": round(median(one["processors"] for one in found[1:]), 3),
        f"{name}_tokens_per_s": [round(median(one[way] for one in found[1:]), 2) for way in WAYS],
    }


async def _measured(fleet: Generations, questions: list[tuple[int, ...]], num_tokens: int) -> tuple[float, float]:
    """Tokens per second, and seconds of processors from the questions to the last tokens."""
    before = fleet.processor_seconds()
    tokens_per_s = await rate(fleet, questions, num_tokens)
    return tokens_per_s, fleet.processor_seconds() - before


def run(measured: Subject, batches: Sequence[int], num_tokens: int, repeats: int) -> Row:
    return asyncio.run(measure(measured, batches, num_tokens, repeats))
