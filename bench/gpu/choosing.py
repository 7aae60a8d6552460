"""Tokens of many rows, chosen on the device from random logits: what a step takes for it."""

import time
from collections.abc import Sequence
from itertools import count
from statistics import median
from typing import Any

import torch

from bench.gpu import timing
from bench.gpu.cases import Choose
from bench.gpu.counting import counted
from longleaf.rank_protocol.step import PenaltyHistory, Row, SamplingTerms
from longleaf.sampling import SamplingParams
from workers.host_copies import to_device
from workers.sampling.device_sampler import DeviceSampler, parameters_of
from workers.sampling.fixed_shape import kind_of
from workers.sampling.sampler import Choice

REPEATS = 20
SPREAD = 3.0
"""Standard deviation of the logits: some thousand tokens of 152,000 are likely, as in text that nobody could guess."""
GREEDY, DRAWN = SamplingParams(), SamplingParams(temperature=0.8, seed=1)
CUT = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=2)
PENALIZED = SamplingParams(
    temperature=0.8,
    min_p=0.02,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.1,
    logit_bias={7: 2.0},
    seed=3,
)
SAMPLINGS: dict[str, Sequence[SamplingParams]] = {
    "greedy": (GREEDY,),
    "temperature": (DRAWN,),
    "top-k and top-p": (CUT,),
    "all settings mixed": (GREEDY, DRAWN, CUT, PENALIZED),
    "20 logprobs": (SamplingParams(num_logprobs=20),),
}
SEEN = PenaltyHistory(tuple(range(1000)), tuple(range(50)))


class Tokens:
    """A sampler, and the rows of a case, step by step."""

    def __init__(self, case: Choose, device: str) -> None:
        self._device = device
        self._sampler = DeviceSampler(device, case.num_rows)
        self._samplings = [SAMPLINGS[case.kind][i % len(SAMPLINGS[case.kind])] for i in range(case.num_rows)]
        self._logits_RV = SPREAD * torch.randn(case.num_rows, case.vocabulary, dtype=torch.bfloat16, device=device)
        self._indices = count()

    def start(self) -> Choice:
        """Begins to choose the next token of each row."""
        return self._sampler.start(self._next_rows(), self._logits_RV)

    def fixed(self) -> timing.Call:
        """What a captured step does to choose tokens: the operations of the rows' kind, over fixed memory."""
        rows = self._next_rows()
        batch = self._sampler.batch(rows, self._logits_RV.shape[1])
        numbers = to_device(torch.from_numpy(batch.numbers([row.token_index for row in rows])), self._device)
        kind = kind_of(batch.needs)
        return lambda: self._sampler.choose(self._logits_RV, parameters_of(numbers), kind)

    def _next_rows(self) -> list[Row]:
        index = next(self._indices)
        return [self._row(i, sampling, index) for i, sampling in enumerate(self._samplings)]

    def _row(self, sequence: int, sampling: SamplingParams, index: int) -> Row:
        seen = SEEN if sampling.repetition_penalty != 1.0 else None
        terms = SamplingTerms(sampling, seen) if index == 0 else None
        return Row(sequence, (0,), index, (), (), index, terms)


@torch.inference_mode()
def measure(case: Choose, device: str) -> dict[str, Any]:
    """The row of a case. Raises RuntimeError where a token is missing."""
    tokens = Tokens(case, device)
    if not all(tokens.start().tokens()):
        raise RuntimeError("a row has no token")
    counts = counted(lambda: tokens.start().tokens())
    fixed = tokens.fixed()
    fixed()  # as before a capture
    return {
        "captured_us": round(timing.seconds(timing.captured([fixed])) * 1e6, 1),
        "called_us": round(timing.seconds(tokens.start) * 1e6, 1),
        "to_the_host_us": round(median(seconds_of(tokens) for _ in range(REPEATS)) * 1e6, 1),
        "counts": counts and counts._asdict(),
    }


def seconds_of(tokens: Tokens) -> float:
    """From the call until the tokens are on the host."""
    begin = time.perf_counter()
    tokens.start().tokens()
    return time.perf_counter() - begin
