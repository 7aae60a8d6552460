"""Decoding with quantized weights as they are stored, against bfloat16 weights of the same model."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from bench.durable.options import Row
from bench.harness.arguments import log
from bench.harness.engine import Generations, running
from bench.harness.subjects import Subject, subject_of
from bench.shared import CONTEXT, rate
from bench.weights.checkpoints import WIDE, make_llama
from longleaf.checkpoints.quantization import QuantizedKind, quantize
from longleaf.config import EngineConfig
from longleaf.weights_choice import sizes_of

KV_BYTES = 1 << 27
DOCUMENT_TOKENS = 64
KINDS: tuple[QuantizedKind, ...] = ("fp8-block", "int4")
PLAIN = "bfloat16"


@contextmanager
def checkpoints() -> Iterator[dict[str, Subject]]:
    """The model in 16, 8 and 4 bits."""
    with TemporaryDirectory(prefix="longleaf-bench-") as folder:
        plain = make_llama(Path(folder, WIDE), WIDE, is_16_bit=True)
        for kind in KINDS:
            log(f"quantizing to {kind}")
            quantize(plain, Path(folder, kind), kind)
        yield {PLAIN: subject_of(plain), **{kind: subject_of(Path(folder, kind)) for kind in KINDS}}


async def measure(subjects: dict[str, Subject], batches: Sequence[int], num_tokens: int, repeats: int) -> Row:
    """Time per token on one rank and thread relative to bfloat16, for numbers of generations at once. Three engines
    exist at the same time and take turns.
    """
    async with AsyncExitStack() as stack:
        fleets = dict[str, Generations]()
        for name, measured in subjects.items():
            config = EngineConfig(
                model=str(measured.folder),
                dtype="bfloat16",
                weights_dtype="stored",
                kv_bytes=KV_BYTES,
                threads_per_rank=1,
                max_draft_tokens=0,
                verify_model=False,
            )
            fleets[name] = await stack.enter_async_context(running(config))
            await fleets[name].ingest(CONTEXT, measured.tokens(DOCUMENT_TOKENS))
        found: Row = {"model": WIDE, "new_tokens": num_tokens, "repeats": repeats}
        for batch in batches:
            questions = [tuple(subjects[PLAIN].tokens(4, seed=i + 1)) for i in range(batch)]
            found |= await alternate(fleets, questions, num_tokens, repeats)
    return found


async def alternate(
    fleets: dict[str, Generations], questions: list[tuple[int, ...]], num_tokens: int, repeats: int
) -> Row:
    """Times per token relative to bfloat16, as medians over turns. The first turn is not counted."""
    turns = list[dict[str, float]]()
    for turn in range(repeats + 1):
        order = list(fleets) if turn % 2 else list(fleets)[::-1]
        turns.append({name: await rate(fleets[name], questions, num_tokens) for name in order})
        rates = ", ".join(f"{name} {turns[-1][name]:.2f}" for name in fleets)
        log(f"{len(questions)} at once, turn {turn}: tokens/s {rates}")
    found: Row = {}
    for kind in KINDS:
        ratios = [one[PLAIN] / one[kind] for one in turns[1:]]
        name = f"{kind}_rows_{len(questions)}"
        found |= {
            name: round(median(ratios), 3),
            f"{name}_min": round(min(ratios), 3),
            f"{name}_max": round(max(ratios), 3),
        }
    rates = {name: round(median(one[name] for one in turns[1:]), 2) for name in fleets}
    return {**found, f"rows_{len(questions)}_tokens_per_s": rates}


def bytes_in_memory(measured: Subject) -> float:
    """Bytes of the weights of a rank relative to those of the checkpoint."""
    from workers.model.model import load
    from workers.model.stored_layers import weight_bytes

    model = load(str(measured.folder), "bfloat16", "cpu", keeps_stored=True)
    return weight_bytes(model.module) / sizes_of(measured.folder, "bfloat16").stored


def run(batches: Sequence[int], num_tokens: int, repeats: int) -> Row:
    with checkpoints() as subjects:
        memory = {f"{kind}_memory": round(bytes_in_memory(subjects[kind]), 4) for kind in KINDS}
        return {**memory, **asyncio.run(measure(subjects, batches, num_tokens, repeats))}
