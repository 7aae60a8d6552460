"""Chooses tokens on the device that has the logits, and tells the host of all of them in one copy."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from longleaf.channel.step import Row
from longleaf.sampling import Sampling, Token
from workers.sampling.fixed_shape import Needs, Parameters, choose
from workers.sampling.history import Histories
from workers.sampling.logprobs import told
from workers.sampling.sampler import NO_TOKEN, Choice, Sampler
from workers.sampling.uniforms import uniforms
from workers.transfers import ToHost, to_device

AHEAD = 64
"""Tokens of a sequence whose random numbers are made at a time."""
MAX_LOGITS = 1 << 22
"""Logits that are computed on together, unless one row alone has more: it bounds the memory that this takes."""
FLOATS = Parameters._fields[:7]
UNIFORM = FLOATS.index("uniform")


class Chooser:
    """How the tokens of one sequence are chosen, and where its history lies."""

    def __init__(self, sampling: Sampling, place: int) -> None:
        self.sampling = sampling
        self.place = place
        self._first = 0
        self._uniforms: list[float] = []

    def uniform(self, token_index: int) -> float:
        """The random number of a token; 0 where none is drawn."""
        if self.sampling.is_greedy:
            return 0.0
        if not 0 <= token_index - self._first < len(self._uniforms):
            self._first, self._uniforms = token_index, uniforms(self.sampling.seed, token_index, AHEAD)
        return self._uniforms[token_index - self._first]

    def parameters(self, vocabulary_size: int) -> Sequence[float | int]:
        """Those of a row, in the order of Parameters, without the random number."""
        asked = self.sampling
        dropped = 1 - asked.top_p if asked.top_p < 1.0 else -1.0
        penalties = (asked.repetition_penalty, asked.presence_penalty, asked.frequency_penalty)
        top_k = min(asked.top_k or vocabulary_size, vocabulary_size)
        return (asked.temperature or 1.0, dropped, asked.min_p, *penalties, 0.0, top_k, asked.is_greedy, self.place)


class Batch:
    """The parameters of the rows of a step. They go to the device where they are others than in the step before."""

    def __init__(self, choosers: Sequence[Chooser], vocabulary_size: int, device: str) -> None:
        self.choosers = choosers
        self.needs = needs_of([chooser.sampling for chooser in choosers])
        columns = [*zip(*(chooser.parameters(vocabulary_size) for chooser in choosers), strict=True)]
        self._numbers_FR = np.array(columns[: len(FLOATS)], dtype=np.float64)
        self._indices_IR = np.array(columns[len(FLOATS) :], dtype=np.int64)
        self._device = device
        self._there: Tensor | None = None

    def parameters(self, token_indices: Sequence[int]) -> Parameters:
        """Those of the tokens of these indices, on the device."""
        if self.needs.draws or self._there is None:
            pairs = zip(self.choosers, token_indices, strict=True)
            self._numbers_FR[UNIFORM] = [chooser.uniform(index) for chooser, index in pairs]
            table = np.concatenate((self._numbers_FR.view(np.int64), self._indices_IR))
            self._there = to_device(torch.from_numpy(table), self._device)
        floats_FR = self._there[: len(FLOATS)].view(torch.float64)
        return Parameters(*floats_FR.unbind(), *self._there[len(FLOATS) :].unbind())


class DeviceChoice:
    """Tokens that were chosen on the device and are on their way to the host."""

    def __init__(self, rows: Sequence[Row], choosers: Sequence[Chooser], told_RN: Tensor, broken: set[int]) -> None:
        self._rows = rows
        self._choosers = choosers
        self._told_RN = told_RN
        self._arriving = ToHost(told_RN)
        self._broken = broken

    def ids(self) -> Tensor:
        return self._told_RN[:, 0].long().clamp(min=NO_TOKEN.id)

    def tokens(self) -> list[Token | None]:
        """Waits for what the device was told so far."""
        rows = self._arriving.wait().tolist()
        self._broken.update(row.sequence for row, (token_id, *_) in zip(self._rows, rows, strict=True) if token_id < 0)
        return [
            None if row.sequence in self._broken else token(chooser.sampling, *numbers)
            for row, chooser, numbers in zip(self._rows, self._choosers, rows, strict=True)
        ]


class DeviceSampler:
    """Chooses the tokens of all sequences without waiting for the device. Has the same methods as Sampler."""

    def __init__(self, device: str) -> None:
        self.broken: set[int] = set()
        """Sequences whose logits were not finite: no token is chosen for them any more."""
        self._device = device
        self._choosers: dict[int, Chooser] = {}
        self._histories: Histories | None = None
        self._batch: Batch | None = None

    def start(self, rows: Sequence[Row], logits_RV: Tensor) -> Choice:
        """Has the device choose the next token of each row, from its logits [V]."""
        size = logits_RV.shape[-1]
        histories = self._histories = self._histories or Histories(size, self._device)
        choosers = [self._chooser(row, histories) for row in rows]
        if self._batch is None or self._batch.choosers != choosers:
            self._batch = Batch(choosers, size, self._device)
        parameters = self._batch.parameters([row.token_index for row in rows])
        most = max(1, MAX_LOGITS // size)
        parts = [slice(start, start + most) for start in range(0, len(rows), most)]
        found = [choose(logits_RV[some], parameters.of(some), histories, self._batch.needs) for some in parts]
        return DeviceChoice(rows, choosers, found[0] if len(found) == 1 else torch.cat(found), self.broken)

    def _chooser(self, row: Row, histories: Histories) -> Chooser:
        """The chooser of the row's sequence, begun anew where the row tells its terms."""
        if row.terms is not None:
            self.forget([row.sequence])
            self._choosers[row.sequence] = Chooser(row.terms.sampling, histories.begin(row.terms))
        return self._choosers[row.sequence]

    def forget(self, sequences: Iterable[int]) -> None:
        """Drops what was told of sequences that have ended."""
        for sequence in sequences:
            self.broken.discard(sequence)
            if (chooser := self._choosers.pop(sequence, None)) is not None and self._histories is not None:
                self._histories.end(chooser.place)


def make_sampler(device: str) -> Sampler | DeviceSampler:
    """The one that is fastest where the logits are: a CPU has nobody to wait for, and looks at few tokens."""
    return Sampler() if device == "cpu" else DeviceSampler(device)


def needs_of(samplings: Sequence[Sampling]) -> Needs:
    """What rows of these parameters need together."""
    return Needs(
        has_bias=any(s.logit_bias for s in samplings),
        has_repetition=any(s.repetition_penalty != 1.0 for s in samplings),
        has_counts=any(s.presence_penalty or s.frequency_penalty for s in samplings),
        draws=any(not s.is_greedy for s in samplings),
        cuts=any(not s.is_greedy and (s.top_k or s.top_p < 1.0) for s in samplings),
        has_min_p=any(not s.is_greedy and s.min_p for s in samplings),
        num_top=max((s.num_logprobs for s in samplings if s.num_logprobs is not None), default=-1),
    )


def token(sampling: Sampling, token_id: float, *numbers: float) -> Token:
    """A row of what the device tells, as `choose` puts it together."""
    num_top = sampling.num_logprobs
    if num_top is None:
        return Token(int(token_id))
    most = len(numbers) // 2
    ids = map(int, numbers[1 + most : 1 + most + num_top])
    return Token(int(token_id), told([*ids], numbers[: 1 + min(num_top, most)]))
