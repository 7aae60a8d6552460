"""Quantized checkpoints against 16-bit ones with the same number of parameters.

Other processes on the machine change all times, so both sides take turns and only their ratios count. Usage:

    python -m bench.quantized --into bench/results/quantized.json
"""

from bench.durable.options import Goal, Row
from bench.harness.arguments import unwind_on_terminate
from bench.harness.parts import parser_of, run_parts
from bench.quantized import loading
from bench.quantized.checkpoints import LAYOUTS

MAX_LOAD = 1.5
"""Largest processor time relative to a checkpoint in bfloat16."""


def load_times() -> Row:
    found = [loading.measure(layout, repeats=7) for layout in LAYOUTS]
    goals = [Goal(f"load, {row['layout']}", row["processors"], MAX_LOAD) for row in found]
    return {"layouts": found, "goals": [goal.as_row() for goal in goals]}


PARTS = {"load": load_times}


def main() -> None:
    unwind_on_terminate()
    run_parts("quantized", PARTS, parser_of("quantized", __doc__, PARTS).parse_args(), lambda name: PARTS[name]())


if __name__ == "__main__":
    main()
