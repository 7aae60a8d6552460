"""How often concurrent work changes a sampled answer with a fixed seed.

Random numbers depend only on the seed and the index of the token, but the last bits of logits depend on the rows that
are computed together. Each answer is generated separately, then with all others at once; the random float32 models of
`zoo` are nearly indifferent between their tokens, so that more draws are close to the edge of a token than with trained
models. Usage:

    python -m bench.seeds --json
    python -m bench.seeds --answers 64 --tokens 32 --vocabularies 512
"""

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.harness.arguments import log, unwind_on_terminate
from bench.harness.engine import Generations, running
from bench.harness.machine import describe
from longleaf.config import EngineConfig
from longleaf.sampling import Sampling
from zoo.checkpoints import make_checkpoint

TEMPERATURE = 1.0
PROMPT_TOKENS = range(4, 60)
Answers = Sequence[tuple[int, ...]]


def main() -> None:
    unwind_on_terminate()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[512, 8192], metavar="TOKENS")
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[1], metavar="RANKS")
    parser.add_argument("--answers", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--together", type=int, default=32, help="answers that run at once")
    options = parser.parse_args()
    rows = [
        measure(vocabulary, world_size, options)
        for vocabulary in options.vocabularies
        for world_size in options.world_sizes
    ]
    print(json.dumps(rows, indent=2) if options.json else "\n".join(map(text, rows)))


def measure(vocabulary: int, world_size: int, options: argparse.Namespace) -> dict[str, object]:
    """One row: a model of so many tokens on so many ranks."""
    with TemporaryDirectory(prefix="longleaf-bench-") as folder:
        made = make_checkpoint(Path(folder), "llama", vocab_size=vocabulary)
        config = EngineConfig(model=str(made), world_size=world_size, max_sequences=options.together)
        alone, again, together = asyncio.run(generate(config, options))
    differing = first_differences(alone, together)
    num_compared = sum(len(answer) for answer in alone) - sum(options.tokens - 1 - index for index in differing)
    row: dict[str, object] = {
        "bench": "seeds",
        "vocabulary": vocabulary,
        "world_size": world_size,
        "temperature": TEMPERATURE,
        "answers": options.answers,
        "tokens": options.tokens,
        "together": options.together,
        "differing_when_alone_again": len(first_differences(alone, again)),
        "differing_under_load": len(differing),
        "tokens_compared": num_compared,
        "tokens_per_difference": round(num_compared / len(differing)) if differing else None,
        "machine": describe(),
    }
    log(text(row))
    return row


async def generate(config: EngineConfig, options: argparse.Namespace) -> tuple[Answers, Answers, Answers]:
    """The answers one after another, twice, and all at once."""
    numbers = random.Random(0)
    prompts = [tuple(numbers.choices(range(3, 500), k=numbers.choice(PROMPT_TOKENS))) for _ in range(options.answers)]

    async def answer(generations: Generations, number: int) -> tuple[int, ...]:
        sampling = Sampling(max_tokens=options.tokens, temperature=TEMPERATURE, seed=number, ignore_end_token=True)
        return await generations.answer(prompts[number], sampling)

    async with running(config) as generations:
        sides: list[Answers] = []
        for turn in ("one by one", "one by one again"):
            log(f"{options.answers} answers, {turn}")
            sides.append([await answer(generations, number) for number in range(options.answers)])
        log(f"{options.together} at once")
        places = asyncio.Semaphore(options.together)

        async def in_turn(number: int) -> tuple[int, ...]:
            async with places:
                return await answer(generations, number)

        sides.append(await asyncio.gather(*map(in_turn, range(options.answers))))
    return sides[0], sides[1], sides[2]


def first_differences(some: Answers, others: Answers) -> list[int]:
    """The index of the first difference, for each answer that differs."""
    pairs = zip(some, others, strict=True)
    return [
        next(i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b) for pair in pairs if pair[0] != pair[1]
    ]


def text(row: dict[str, object]) -> str:
    name = f"{row['vocabulary']} tokens, {row['world_size']} ranks, {row['answers']} answers"
    counts = f"{row['differing_under_load']} differ under load, {row['differing_when_alone_again']} when repeated"
    return f"{name}: {counts}; one difference in {row['tokens_per_difference']} tokens"


if __name__ == "__main__":
    main()
