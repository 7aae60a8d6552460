"""Decode steps with several rows of one sequence, at successive positions, as steps that verify drafts have them.

Ranks compute on one thread each, over random keys. Steps of each number of rows take turns, and a turn lasts as long as
its slowest rank; `ratio` is how many times as long as one row so many rows take, in medians. Usage:

    python -m bench.draft --json
    python -m bench.draft --model embedded --context 64000 --kv-dtype int8 --world-size 1 --repeats 20
"""

import argparse
import json

from bench.draft.rows import KV_DTYPES, Case, measure
from bench.harness.arguments import tell, unwind_on_terminate
from bench.harness.machine import describe
from bench.harness.subjects import NAMES, is_there, subject

CONTEXTS = (8_000, 64_000, 256_000)


def main() -> None:
    unwind_on_terminate()
    options = parse()
    rows: list[dict[str, object]] = []
    for name in filter(is_there, options.models):
        with subject(name) as measured:
            for case in cases(options):
                tell(f"{name}, {case.context_tokens:,} tokens, {case.kv_dtype}, world size {case.world_size}")
                rows += [{**row, "machine": describe()} for row in measure(measured, case, options.repeats)]
    print(json.dumps(rows, indent=2) if options.json else "\n".join(map(line, rows)))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench.draft", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print a list of rows as JSON")
    parser.add_argument("--model", dest="models", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--context", dest="contexts", nargs="+", type=int, default=CONTEXTS, metavar="TOKENS")
    parser.add_argument("--world-size", dest="world_sizes", nargs="+", type=int, default=(1, 2), metavar="RANKS")
    parser.add_argument("--kv-dtype", dest="kv_dtypes", nargs="+", choices=KV_DTYPES, default=KV_DTYPES)
    parser.add_argument("--repeats", type=int, default=30, help="timed turns of each number of rows")
    options = parser.parse_args(arguments)
    if min(options.repeats, *options.contexts, *options.world_sizes) < 1:
        parser.error("--context, --world-size and --repeats: at least 1")
    return options


def cases(options: argparse.Namespace) -> list[Case]:
    """All that are asked for, the shortest contexts first."""
    return [
        Case(tokens, kv_dtype, world_size)
        for tokens in sorted(options.contexts)
        for kv_dtype in options.kv_dtypes
        for world_size in options.world_sizes
    ]


def line(row: dict[str, object]) -> str:
    return (
        f"{row['model']:13} {row['context_tokens']:>7} tokens  {row['kv_dtype']:8} world size {row['world_size']}  "
        f"{row['rows']:>2} rows  ratio {row['ratio']:>6}  ({row['step_ms']} ms)"
    )


if __name__ == "__main__":
    main()
