"""Samples tokens on the device that holds the logits, and copies all of them to the host at once."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from longleaf.config import MAX_DRAFT_TOKENS
from longleaf.kernels.backend import Numbers
from longleaf.rank_protocol.step import Row
from longleaf.sampling import SamplingParams, Token
from workers.host_copies import AsyncHostCopy, DeviceEvent, to_device
from workers.sampling import fused
from workers.sampling.acceptance import NOT_REACHED, DraftRows, drafts_of
from workers.sampling.constraints import Constraints, mask_of
from workers.sampling.fixed_shape import Needs, Parameters, choose, record_tokens
from workers.sampling.history import PADDING_ROW, TokenHistories
from workers.sampling.logprobs import to_messages, top_logprobs
from workers.sampling.sampler import Choice, CpuSampler, first_positions
from workers.sampling.uniforms import uniforms

AHEAD = 64
"""Random numbers that are generated at a time for a sequence."""
MAX_LOGITS = 1 << 22
"""Logits that are processed together, unless a single row has more. Bounds the memory of sampling."""
FLOATS = Parameters._fields[:7]
UNIFORM = FLOATS.index("uniform")
NUM_PARAMETERS = len(Parameters._fields)


class DeviceSequenceSampler:
    """The sampling parameters of one sequence, and the place of its history."""

    def __init__(self, sampling: SamplingParams, place: int) -> None:
        self.sampling = sampling
        self.place = place
        self._first = 0
        self._uniforms: list[float] = []

    def uniform(self, token_index: int) -> float:
        """The random number of a token; 0 for greedy sampling."""
        if self.sampling.is_greedy:
            return 0.0
        if not 0 <= token_index - self._first < len(self._uniforms):
            self._first, self._uniforms = token_index, uniforms(self.sampling.seed, token_index, AHEAD)
        return self._uniforms[token_index - self._first]

    def parameters(self, vocabulary_size: int) -> Sequence[float | int]:
        """The parameters of a row, in the order of Parameters, without the random number."""
        requested = self.sampling
        dropped = 1 - requested.top_p if requested.top_p < 1.0 else -1.0
        penalties = (requested.repetition_penalty, requested.presence_penalty, requested.frequency_penalty)
        top_k = min(requested.top_k or vocabulary_size, vocabulary_size)
        return (
            requested.temperature or 1.0,
            dropped,
            requested.min_p,
            *penalties,
            0.0,
            top_k,
            requested.is_greedy,
            self.place,
        )


class Batch:
    """The parameters of the positions of a step, numbers [F, R] by field."""

    def __init__(self, samplers: Sequence[DeviceSequenceSampler], vocabulary_size: int) -> None:
        self.samplers = samplers
        self.needs = needs_of([sampler.sampling for sampler in samplers])
        columns = [*zip(*(sampler.parameters(vocabulary_size) for sampler in samplers), strict=True)]
        self._floats_FR = np.array(columns[: len(FLOATS)], dtype=np.float64)
        self._indices_FR = np.array(columns[len(FLOATS) :], dtype=np.int64)

    def numbers(self, token_indices: Sequence[int]) -> Numbers:
        """The parameters of tokens with these indices, as int64; floats are stored bit for bit."""
        if self.needs.draws:
            pairs = zip(self.samplers, token_indices, strict=True)
            self._floats_FR[UNIFORM] = [sampler.uniform(index) for sampler, index in pairs]
        return np.concatenate((self._floats_FR.view(np.int64), self._indices_FR))


def padding_row(vocabulary_size: int) -> Numbers:
    """The parameters [F] of padding rows, from which no token is sampled."""
    return Batch([DeviceSequenceSampler(SamplingParams(), PADDING_ROW)], vocabulary_size).numbers([0])[:, 0]


def parameters_of(numbers_FR: Tensor) -> Parameters:
    """Parameters whose numbers are on the device."""
    floats_FR = numbers_FR[: len(FLOATS)].view(torch.float64)
    return Parameters(*floats_FR.unbind(), *numbers_FR[len(FLOATS) :].unbind())


class DeviceChoice:
    """Tokens that were sampled on the device and are being copied to the host."""

    def __init__(
        self,
        rows: Sequence[Row],
        samplers: Sequence[DeviceSequenceSampler],
        reported_NC: Tensor,
        broken: set[int],
        host_NC: Tensor | None = None,
        constraints: Constraints | None = None,
    ) -> None:
        """`reported_NC` holds the positions of rows and their drafts, in the order of the samplers. It is copied to
        `host_NC` if that is given. The tokens are added to the answers in `constraints`.
        """
        self._rows = rows
        self._samplers = samplers
        self._chosen_NC = reported_NC
        self._copy = AsyncHostCopy(reported_NC, host_NC)
        self._broken = broken
        self._constraints = constraints
        self._tokens: list[tuple[Token, ...]] | None = None
        self._forced: dict[int, tuple[int, ...]] = {}

    @property
    def arrival(self) -> DeviceEvent:
        """The event after which the tokens are on the host."""
        return self._copy.arrival

    def ids(self) -> Tensor:
        return ids_of(self._chosen_NC)

    def tokens(self) -> list[tuple[Token, ...]]:
        """The tokens of each row. Waits for the copy to the host."""
        if self._tokens is None:
            self._tokens = self._read()
        return self._tokens

    def forced(self) -> dict[int, tuple[int, ...]]:
        """The forced text behind the tokens. Waits for the copy to the host."""
        self.tokens()
        return self._forced

    def _read(self) -> list[tuple[Token, ...]]:
        rows, firsts = self._copy.wait().tolist(), first_positions(self._rows)
        self._broken.update(row.sequence for row, i in zip(self._rows, firsts, strict=True) if rows[i][0] < 0)
        failed = self._constraints.failed if self._constraints is not None else {}
        tokens: list[tuple[Token, ...]] = []
        for row, i in zip(self._rows, firsts, strict=True):
            found = reached(self._samplers[i].sampling, rows[i : i + 1 + len(row.draft_ids)])
            if self._constraints is not None and not (row.sequence in self._broken or row.sequence in failed):
                for token in found:
                    self._constraints.accept(row.sequence, token.id)
            tokens.append(() if row.sequence in self._broken or row.sequence in failed else found)
        if self._constraints is not None:
            self._forced = self._constraints.forced(self._rows)
        return tokens


class DeviceSampler:
    """Samples the tokens of all sequences without waiting for the device. Has the same methods as CpuSampler."""

    def __init__(self, device: str, num_sequences: int, constraints: Constraints | None = None) -> None:
        """At most `num_sequences` may be active at once."""
        self.constraints = constraints or Constraints()
        """The grammars of the sequences."""
        self._last: DeviceChoice | None = None
        """The last choice of a step with constraints, whose tokens the next masks depend on."""
        self.broken: set[int] = set()
        """Sequences with non-finite logits: no further token is sampled for them."""
        self._device = device
        self._num_sequences = num_sequences
        self._samplers: dict[int, DeviceSequenceSampler] = {}
        self._histories: TokenHistories | None = None
        self._batch: Batch | None = None
        self._sent: tuple[Batch, Tensor] | None = None
        """The parameters that the last `start` sent."""

    def start(self, rows: Sequence[Row], logits_RV: Tensor) -> Choice:
        """Samples the next token of each row from its logits [V], and the tokens behind accepted drafts from the logits
        that follow. Parameters are sent to the device if they differ from those of the previous step. With constraints,
        waits for the tokens of the previous step.
        """
        if self.begin_constraints(rows):
            return self.start_constrained(rows, logits_RV)
        batch, reported_RN = self._report(rows, logits_RV, None)
        return DeviceChoice(rows, batch.samplers, reported_RN, self.broken)

    def begin_constraints(self, rows: Sequence[Row]) -> bool:
        """Creates the states of grammars. Returns whether any of the rows has one."""
        if self._last is not None:
            self._last.tokens()  # adds them to the answers
            self._last = None
        self.constraints.begin(rows)
        return any(self.constraints.holds(row.sequence) for row in rows)

    def start_constrained(self, rows: Sequence[Row], logits_RV: Tensor) -> DeviceChoice:
        """As `start`, after `begin_constraints`. The masks are computed while the device runs the model."""
        mask_RV = mask_of(self.constraints, rows, logits_RV.shape[-1])
        batch, reported_RN = self._report(rows, logits_RV, mask_RV)
        self._last = DeviceChoice(rows, batch.samplers, reported_RN, self.broken, constraints=self.constraints)
        return self._last

    def _report(self, rows: Sequence[Row], logits_RV: Tensor, mask_RV: Tensor | None) -> tuple[Batch, Tensor]:
        """The parameters of the rows, and the result of `choose` for them."""
        batch, drafts = self.batch(rows, logits_RV.shape[-1]), None
        is_drafted = len(batch.samplers) > len(rows)
        if self._sent is None or self._sent[0] is not batch or batch.needs.draws or is_drafted:
            numbers = batch.numbers(token_indices(rows))
            if is_drafted:
                numbers = np.concatenate((numbers, drafts_of(rows)))
            there_FR = to_device(torch.from_numpy(numbers), self._device)
            self._sent = batch, there_FR[:NUM_PARAMETERS]
            drafts = DraftRows(*there_FR[NUM_PARAMETERS:]) if is_drafted else None
        parameters = parameters_of(self._sent[1])
        if mask_RV is None:
            return batch, self.choose(logits_RV, parameters, batch.needs, drafts)
        allowed_RV = to_device(mask_RV, self._device)
        # a row with NaN must not lose it to the mask
        is_finite_R1 = logits_RV.amax(dim=-1, keepdim=True).isfinite()
        masked_RV = torch.where(allowed_RV | ~is_finite_R1, logits_RV, -torch.inf)
        reported_RN = self.choose(masked_RV, parameters, batch.needs._replace(num_top=-1), drafts)
        if batch.needs.num_top >= 0:
            ids_R1 = ids_of(reported_RN).clamp(min=0)[:, None]
            top_RN, logprobs_RN = top_logprobs(logits_RV, ids_R1, batch.needs.num_top)
            reported_RN = torch.cat((reported_RN.double(), logprobs_RN, top_RN.double()), dim=1)
        return batch, reported_RN

    def batch(self, rows: Sequence[Row], vocabulary_size: int) -> Batch:
        """The sampling parameters of rows and their drafts. Returns the previous batch if it is the same."""
        by_row = [self._sampler(row, vocabulary_size) for row in rows]
        samplers = [each for row, each in zip(rows, by_row, strict=True) for _ in range(1 + len(row.draft_ids))]
        if self._batch is None or self._batch.samplers != samplers:
            self._batch = Batch(samplers, vocabulary_size)
        return self._batch

    def choose(
        self, logits_RV: Tensor, parameters: Parameters, needs: Needs, drafts: DraftRows | None = None
    ) -> Tensor:
        """The result of `fixed_shape.record_tokens` for rows: by kernels on a GPU, else by torch operations. Many
        rows are sampled in slices.
        """
        size = logits_RV.shape[-1]
        is_fused, histories = fused.is_supported(logits_RV), self._histories_of(size)
        choose_some = fused.choose if is_fused else choose
        most = fused.max_rows(size) if is_fused else max(1, MAX_LOGITS // size)
        num_before = min(MAX_DRAFT_TOKENS, len(logits_RV) - 1) if needs.counts_tokens else 0
        before_RM = drafts.before(num_before) if drafts is not None and num_before else None
        found: list[Tensor] = []
        for start in range(0, len(logits_RV), most):
            some = slice(start, start + most)
            before_LM = None if before_RM is None else before_RM[some]
            found.append(choose_some(logits_RV[some], parameters.of(some), histories, needs, before_LM))
        return record_tokens(found[0] if len(found) == 1 else torch.cat(found), parameters, histories, needs, drafts)

    def _histories_of(self, vocabulary_size: int) -> TokenHistories:
        """The histories, which are allocated once."""
        self._histories = self._histories or TokenHistories(vocabulary_size, self._num_sequences, self._device)
        return self._histories

    def _sampler(self, row: Row, vocabulary_size: int) -> DeviceSequenceSampler:
        """The sampler of the row's sequence. It is created again when the row brings new terms."""
        if row.terms is not None:
            self._drop(row.sequence)
            place = self._histories_of(vocabulary_size).begin(row.terms)
            self._samplers[row.sequence] = DeviceSequenceSampler(row.terms.sampling, place)
        return self._samplers[row.sequence]

    def forget(self, sequences: Iterable[int]) -> None:
        """Drops the state of sequences that have ended."""
        for sequence in sequences:
            self.constraints.forget([sequence])
            self._drop(sequence)

    def _drop(self, sequence: int) -> None:
        """Drops the state of a sequence, except its grammar."""
        self.broken.discard(sequence)
        if (sampler := self._samplers.pop(sequence, None)) is not None and self._histories is not None:
            self._histories.end(sampler.place)

    def clear(self) -> None:
        """Drops the state of all sequences."""
        self._last = None
        self.forget([*self._samplers, *self.broken])
        self.constraints.clear()


def ids_of(reported_RN: Tensor) -> Tensor:
    """The ids [R], int64, of the result of `fixed_shape.record_tokens`, including its markers."""
    return reported_RN[:, 0].long()


def token_indices(rows: Sequence[Row]) -> list[int]:
    """Indices, within their answers, of the tokens behind rows and their drafts."""
    return [row.token_index + number for row in rows for number in range(1 + len(row.draft_ids))]


def make_sampler(device: str, num_sequences: int, constraints: Constraints | None = None) -> CpuSampler | DeviceSampler:
    """The faster sampler for the device of the logits: a CPU needs no asynchronous copy and samples few tokens."""
    return CpuSampler(constraints) if device == "cpu" else DeviceSampler(device, num_sequences, constraints)


def needs_of(samplings: Sequence[SamplingParams]) -> Needs:
    """The operations that rows of these parameters need together."""
    return Needs(
        has_bias=any(s.logit_bias for s in samplings),
        has_repetition=any(s.repetition_penalty != 1.0 for s in samplings),
        has_counts=any(s.presence_penalty or s.frequency_penalty for s in samplings),
        draws=any(not s.is_greedy for s in samplings),
        cuts=any(not s.is_greedy and (s.top_k or s.top_p < 1.0) for s in samplings),
        has_min_p=any(not s.is_greedy and s.min_p for s in samplings),
        num_top=max((s.num_logprobs for s in samplings if s.num_logprobs is not None), default=-1),
    )


def reached(sampling: SamplingParams, chosen: Iterable[Sequence[float]]) -> tuple[Token, ...]:
    """The tokens of the reached positions of a sequence."""
    return tuple(token(sampling, *numbers) for numbers in chosen if numbers[0] != NOT_REACHED)


def token(sampling: SamplingParams, token_id: float, *numbers: float) -> Token:
    """The token of a row in the format of `choose`."""
    num_top = sampling.num_logprobs
    if num_top is None:
        return Token(int(token_id))
    most = len(numbers) // 2
    ids = map(int, numbers[1 + most : 1 + most + num_top])
    return Token(int(token_id), to_messages([*ids], numbers[: 1 + min(num_top, most)]))
