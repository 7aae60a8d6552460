"""The cost of steps that verify several tokens of a sequence, and the speed-up of answers that use drafts.

rows: decode steps with several rows of one sequence, at successive positions. Ranks compute on one thread each, over
random keys. Steps of each number of rows take turns, and a turn lasts as long as its slowest rank; `ratio` is the
median duration of a step over that of a step with one row.

answers: questions to a service, each without and with drafts, by turns. `demo` are facts like the demo's with short
values, `long` have values of many words, `random` is a random model whose text is not predictable; `ratio` is the
speed-up of answers with drafts, the median over pairs, and `equal` the number of pairs with the same text. Usage:

    python -m bench.draft --json
    python -m bench.draft --only rows --model embedded --context 64000 --kv-dtype int8 --world-size 1 --repeats 20
    python -m bench.draft --only answers --into bench/results/draft.json
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from bench.draft import answers
from bench.draft.rows import KV_DTYPES, Case, measure
from bench.durable.options import Row
from bench.harness.arguments import log, unwind_on_terminate
from bench.harness.machine import describe
from bench.harness.parts import gathered
from bench.harness.service import client_of
from bench.harness.subjects import EMBEDDED, NAMES, RANDOM_LLAMA, is_there, subject
from longleaf.config import EngineConfig

CONTEXTS = (8_000, 64_000, 256_000)
PARTS = ("rows", "answers")
MEASURED = ("part", "model", "context_tokens", "kv_dtype", "world_size", "kind")
"""Keys that identify a row."""
KINDS = {EMBEDDED: ("demo", "long"), RANDOM_LLAMA: ("random",)}
ANSWERS_TOKENS = 64_000


def main() -> None:
    unwind_on_terminate()
    options = parse()
    gathered("draft", measure_all(options), options, MEASURED, line)


def measure_all(options: argparse.Namespace) -> Iterator[Row]:
    for name in filter(is_there, options.models):
        for part, each in (("rows", steps), ("answers", measure_answers)):
            if part in options.only:
                for row in each(name, options):
                    yield {"part": part, "kind": "", **row, "machine": describe()}


def steps(name: str, options: argparse.Namespace) -> Iterator[Row]:
    with subject(name) as measured:
        for case in cases(options):
            log(f"{name}, {case.context_tokens:,} tokens, {case.kv_dtype}, world size {case.world_size}")
            yield from measure(measured, case, options.repeats)


def measure_answers(name: str, options: argparse.Namespace) -> Iterator[Row]:
    for kind in KINDS[name]:
        with subject(name) as measured:
            config = EngineConfig(model=str(measured.folder))
            with client_of(None, config, "local") as client:
                row = answers.measure(client, measured, kind, ANSWERS_TOKENS, options.rounds)
        yield {"model": name, "kv_dtype": "float32", "world_size": 1} | row


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench.draft", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    parser.add_argument("--into", type=Path, metavar="FILE", help="a result whose other rows stay as they are")
    parser.add_argument("--rounds", type=int, default=5, help="times that all questions are asked in each way")
    parser.add_argument("--model", dest="models", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--context", dest="contexts", nargs="+", type=int, default=CONTEXTS, metavar="TOKENS")
    parser.add_argument("--world-size", dest="world_sizes", nargs="+", type=int, default=(1, 2), metavar="RANKS")
    parser.add_argument("--kv-dtype", dest="kv_dtypes", nargs="+", choices=KV_DTYPES, default=KV_DTYPES)
    parser.add_argument("--repeats", type=int, default=30, help="timed turns of each number of rows")
    options = parser.parse_args(arguments)
    if min(options.repeats, options.rounds, *options.contexts, *options.world_sizes) < 1:
        parser.error("--context, --world-size, --repeats and --rounds: at least 1")
    return options


def cases(options: argparse.Namespace) -> list[Case]:
    """All that are asked for, the shortest contexts first."""
    return [
        Case(tokens, kv_dtype, world_size)
        for tokens in sorted(options.contexts)
        for kv_dtype in options.kv_dtypes
        for world_size in options.world_sizes
    ]


def line(row: Row) -> str:
    what = f"{row['model']:13} {row['context_tokens']:>7} tokens  {row['kv_dtype']:8} world size {row['world_size']}"
    if row["part"] == "answers":
        speeds = f"{row['off_tokens_per_s']} and {row['on_tokens_per_s']} tokens/s"
        return f"{what}  {row['kind']:7} ratio {row['ratio']:>6}  ({speeds}; {row['equal']} of {row['answers']} equal)"
    return f"{what}  {row['rows']:>2} rows  ratio {row['ratio']:>6}  ({row['step_ms']} ms)"


if __name__ == "__main__":
    main()
