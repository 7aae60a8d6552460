"""Weights divided over ranks (`--weights sharded`) against whole weights on each rank, and quantized weights as stored
against bfloat16.

Other processes on the machine change all times, so both sides take turns and only their ratios count. Usage:

    python -m bench.weights --into bench/results/weights.json
    python -m bench.weights --only decode
    python -m bench.weights --only large           # serves 6 GB on four ranks: 14 GB of memory, 6 GB of disk, minutes
    python -m bench.weights --only large_loss      # the same with --spare-ranks 1, and a rank is killed
    python -m bench.weights --only large_replaced  # without spare ranks: the replacement reads the lost share
"""

from collections.abc import Iterable

from bench.durable.options import Goal, Row
from bench.harness.arguments import unwind_on_terminate
from bench.harness.parts import parser_of, run_parts
from bench.weights import decode, exchanges, large, loading, stored
from bench.weights.checkpoints import LARGE, SMALL, random_llama

COUNTS = (2, 3, 4)
LOADED_COUNTS = (2, 4)
MAX_EXCESS, MAX_CACHED, MAX_LOAD = 0.02, 1.35, 1.2
MAX_DECODE = {(LARGE, 1): 0.85, (LARGE, 8): 0.7, (SMALL, 1): 1.6, (SMALL, 8): 1.6}
"""Largest time per token relative to whole weights, by model and generations at once."""
MAX_STORED, MAX_STORED_BYTES = {"fp8-block": 0.7, "int4": 0.5}, 1.03
"""Largest time per token relative to bfloat16, and bytes of weights in memory relative to the checkpoint."""


def bytes_of_shares() -> Row:
    """Bytes held, read, cached and allocated, for several numbers of ranks."""
    with random_llama(LARGE) as measured:
        found = {count: loading.measure_bytes(measured.folder, count) for count in COUNTS}
    goals = list[Goal]()
    for count, row in found.items():
        goals += [
            Goal(f"held, {count} ranks", row["held_of_whole"], round(1 / count + MAX_EXCESS, 4)),
            Goal(f"read, {count} ranks", row["read_of_whole"], round(1 / count + MAX_EXCESS, 4)),
            Goal(f"cached, {count} ranks", row["cached_of_held"], MAX_CACHED),
            Goal(f"anonymous, {count} ranks", row["anonymous_of_allowed"], 1.0),
        ]
    return {"model": LARGE, "shares": list(found.values()), **met(goals)}


def load_times() -> Row:
    with random_llama(LARGE) as measured:
        found = loading.measure_time(measured.folder, LOADED_COUNTS, repeats=7)
    goals = [Goal(f"load, {count} ranks", found[f"share_of_{count}"], MAX_LOAD) for count in LOADED_COUNTS]
    return {"model": LARGE, **found, **met(goals)}


def decode_of(name: str, num_tokens: int) -> Row:
    with random_llama(name) as measured:
        found = decode.run(measured, (1, 8), num_tokens, repeats=7)
    goals = [Goal(f"{batch} rows", found[f"rows_{batch}"], MAX_DECODE[name, batch]) for batch in (1, 8)]
    return {**found, **met(goals)}


def decode_stored() -> Row:
    """Quantized weights as they are stored against bfloat16."""
    found = stored.run((1, 4), 32, repeats=9)
    goals = [Goal(f"{kind}, 1 row", found[f"{kind}_rows_1"], limit) for kind, limit in MAX_STORED.items()]
    goals += [Goal(f"{kind}, memory", found[f"{kind}_memory"], MAX_STORED_BYTES) for kind in MAX_STORED]
    return {**found, **met(goals)}


def met(goals: Iterable[Goal]) -> Row:
    return {"goals": [goal.as_row() for goal in goals]}


PARTS = {
    "bytes": bytes_of_shares,
    "load": load_times,
    "decode": lambda: decode_of(LARGE, 64),
    "decode_small": lambda: decode_of(SMALL, 64),
    "stored": decode_stored,
    "exchanges": lambda: {"families": exchanges.measure(), "goals": []},
    "large": large.measure,
    "large_loss": large.measure_loss,
    "large_replaced": large.measure_replacement,
}
DEFAULT = [name for name in PARTS if not name.startswith("large")]


def main() -> None:
    unwind_on_terminate()
    parser = parser_of("weights", __doc__, PARTS)
    parser.set_defaults(only=DEFAULT)
    run_parts("weights", PARTS, parser.parse_args(), lambda name: PARTS[name]())


if __name__ == "__main__":
    main()
