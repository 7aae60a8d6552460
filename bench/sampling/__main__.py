"""Sampling of a step's tokens on rank 0, while all other ranks wait: all rows together against one by one.

The logits are random: the `peaked` ones have few likely tokens, the others thousands and tens of thousands. Both sides
take turns on one thread and must choose the same tokens. Usage:

    python -m bench.sampling --json
    python -m bench.sampling --rows 1 --vocabulary 32000 --case top_p
"""

import argparse
import json
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from bench.harness.arguments import log
from bench.harness.machine import describe
from bench.sampling import one_by_one
from longleaf.rank_protocol.step import PenaltyHistory, Row, SamplingTerms
from longleaf.sampling import SamplingParams
from workers.sampling.sampler import CpuSampler

SPREADS = {"peaked": 8.0, "broad": 3.0, "flat": 1.0}
"""Standard deviations of the logits."""
TARGETS = {"top_p": 10.0}
SEEN = PenaltyHistory(tuple(range(0, 100_000, 7)), tuple(range(500)))
"""The penalty history of each sequence: 100,000 tokens of context, and an answer of 500."""
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, presence penalty": {"presence_penalty": 0.5},
    "plain": {"temperature": 1.0},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "top_k": {"temperature": 1.0, "top_k": 50},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "top_k, top_p, min_p": {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    "repetition penalty": {"temperature": 1.0, "repetition_penalty": 1.1},
    "presence and frequency": {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "20 logprobs": {"num_logprobs": 20},
}


@dataclass
class Side:
    """One of the two samplers, and how long it took in each turn."""

    sampler: CpuSampler | one_by_one.Sampler
    seconds: list[float]
    chosen: list[list[int]]

    def turn(self, rows: list[Row], logits_RV: torch.Tensor) -> None:
        began = time.perf_counter()
        tokens = self.sampler.choose(rows, logits_RV)
        self.seconds.append(time.perf_counter() - began)
        self.chosen.append([token.id for token in tokens])


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m bench.sampling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print a list of rows as JSON")
    parser.add_argument("--case", dest="cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--rows", type=int, default=16, help="tokens that are chosen in a step")
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--repeats", type=int, default=9, help="timed turns of each side")
    given = parser.parse_args()
    torch.set_num_threads(1)
    shape = (given.rows, given.vocabulary)
    found = [row(case, kind, shape, given.repeats) for case in given.cases for kind in SPREADS]
    print(json.dumps(found, indent=2) if given.json else "\n".join(map(line, found)))


def row(case: str, kind: str, shape: tuple[int, int], repeats: int) -> dict[str, Any]:
    """The row of one case. The first turn, in which samplers receive their terms, is not counted."""
    log(f"{case}, {kind}")
    logits_RV = SPREADS[kind] * torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    together, alone = Side(CpuSampler(), [], []), Side(one_by_one.Sampler(), [], [])
    for step in range(repeats + 1):
        rows = [step_row(i, SamplingParams(seed=i, **CASES[case]), step) for i in range(shape[0])]
        for side in (together, alone) if step % 2 else (alone, together):
            side.turn(rows, logits_RV)
    ratios = [b / a for a, b in zip(together.seconds[1:], alone.seconds[1:], strict=True)]
    return {
        "bench": "sampling",
        "case": case,
        "logits": kind,
        "rows": shape[0],
        "vocabulary": shape[1],
        "together_ms": round(median(together.seconds[1:]) * 1e3, 2),
        "alone_ms": round(median(alone.seconds[1:]) * 1e3, 2),
        "ratio": round(median(ratios), 2),
        "ratio_min": round(min(ratios), 2),
        "ratio_max": round(max(ratios), 2),
        "target": TARGETS.get(case),
        "same_tokens": together.chosen == alone.chosen,
        "machine": describe(),
    }


def step_row(sequence: int, sampling: SamplingParams, step: int) -> Row:
    """The row of a sequence in a step; the first one includes its terms."""
    terms = SamplingTerms(sampling, SEEN if sampling.has_penalties else None) if step == 0 else None
    return Row(sequence, (0,), step, (), (), step, terms)


def line(found: dict[str, Any]) -> str:
    return (
        f"{found['case']:26} {found['logits']:7} {found['together_ms']:8} ms  one by one {found['alone_ms']:8} ms"
        f"  ratio {found['ratio']:6}  {'same tokens' if found['same_tokens'] else 'OTHER TOKENS'}"
    )


if __name__ == "__main__":
    main()
