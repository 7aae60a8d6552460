"""Samples tokens from logits on a CPU. Random numbers depend only on (seed, token index), never on the batch."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from msgspec.structs import replace
from torch import Tensor

from longleaf.rank_protocol.step import Row, SamplingTerms
from longleaf.sampling import Logprobs, Token
from workers.sampling import distribution, draws
from workers.sampling.acceptance import NOT_FINITE, NOT_REACHED
from workers.sampling.constraints import Constraints
from workers.sampling.logprobs import logprobs
from workers.sampling.penalties import Penalties
from workers.sampling.uniforms import uniform

MAX_LOGITS = 1 << 19
"""Maximum number of logits that are processed together, unless a single row has more. They take 4 MiB in float64: the
allocator reuses blocks of this size instead of requesting pages from the system each time.
"""


PLAIN = -2
"""Kind of rows whose token is the argmax of the unmodified logits."""


class Choice(Protocol):
    """The next tokens of rows."""

    def ids(self) -> Tensor:
        """The ids that other ranks need, int64, on the device of the logits: one after each row and one after each of
        its drafts. NOT_FINITE means that there is no token, NOT_REACHED that a draft before it was not accepted.
        """
        ...

    def tokens(self) -> list[tuple[Token, ...]]:
        """The accepted drafts of each row, and the token after them. Empty for a sequence whose logits are not finite,
        in this step or an earlier one.
        """
        ...

    def forced(self) -> dict[int, tuple[int, ...]]:
        """For each sequence whose grammar forces text after the tokens, that text in tokens."""
        ...


class SampledTokens:
    """Tokens on the host. Implements Choice."""

    def __init__(
        self, rows: Sequence[Row], tokens: list[tuple[Token, ...]], forced: dict[int, tuple[int, ...]] | None = None
    ) -> None:
        self._rows = rows
        self._tokens = tokens
        self._forced = forced or {}

    def ids(self) -> Tensor:
        found: list[int] = []
        for row, tokens in zip(self._rows, self._tokens, strict=True):
            ids = [token.id for token in tokens] or [NOT_FINITE]
            found += ids + [NOT_REACHED] * (1 + len(row.draft_ids) - len(ids))
        return torch.tensor(found, dtype=torch.long)

    def tokens(self) -> list[tuple[Token, ...]]:
        return self._tokens

    def forced(self) -> dict[int, tuple[int, ...]]:
        return self._forced


class CpuSequenceSampler:
    """The terms of one sequence, and the token counts of its penalties."""

    def __init__(self, sequence: int, terms: SamplingTerms, vocabulary_size: int) -> None:
        self.sequence = sequence
        self.sampling = sampling = terms.sampling
        self.penalties = Penalties(terms, vocabulary_size)
        is_plain = sampling.is_argmax and terms.grammar is None
        self.kind = PLAIN if is_plain else -1 if sampling.is_greedy else sampling.top_k
        """Rows of one kind are processed together: equal top-k (0 or more), greedy (-1), or greedy without adjustment
        (PLAIN).
        """


class CpuSampler:
    """Samples the tokens of all sequences on a CPU. Stores the terms of each sequence, which arrive with its first
    row.
    """

    def __init__(self, constraints: Constraints | None = None) -> None:
        self.constraints = constraints or Constraints()
        """The grammars of the sequences."""
        self.broken: set[int] = set()
        """Sequences with non-finite logits: no further token is sampled for them."""
        self._samplers: dict[int, CpuSequenceSampler] = {}

    def start(self, rows: Sequence[Row], logits_RV: Tensor) -> Choice:
        """Samples the next tokens of each row whose sequence is not broken. In `logits_RV`, the logits of a row are
        followed by those of its drafts.

        Each token is the same as in a separate step, up to the first one that differs from the draft, or that completes
        the answer by its grammar. A draft that is followed by non-finite logits, or that the grammar cannot continue,
        is not accepted: the next step will fail the same way.
        """
        firsts, is_finite, size = first_positions(rows), highest_are_finite(logits_RV), logits_RV.shape[-1]
        self.constraints.begin(rows)
        self.broken.update(row.sequence for row, first in zip(rows, firsts, strict=True) if not is_finite[first])
        left = [
            i
            for i, row in enumerate(rows)
            if row.sequence not in self.broken and self.constraints.can_continue(row.sequence, size)
        ]
        tokens: list[tuple[Token, ...]] = [()] * len(rows)
        turn = 0
        while left:
            logits_LV = select_rows(logits_RV, [firsts[i] + turn for i in left])
            chosen = self.choose([row_of_draft(rows[i], turn) for i in left], logits_LV)
            for i, token in zip(left, chosen, strict=True):
                if rows[i].sequence not in self.constraints.failed:
                    tokens[i] += (token,)
            turn += 1
            left = [i for i in left if len(tokens[i]) == turn and not self.constraints.has_ended(rows[i].sequence)]
            left = [i for i in left if is_accepted(rows[i], tokens[i]) and is_finite[firsts[i] + turn]]
        return SampledTokens(rows, tokens, self.constraints.forced(rows))

    def choose(self, rows: Sequence[Row], logits_RV: Tensor) -> list[Token]:
        """The next token of each row, from its logits [V]."""
        samplers = [self._sampler(row, logits_RV.shape[-1]) for row in rows]
        chosen = [0] * len(rows)
        for some in _alike(samplers, lambda sampler: sampler.kind, logits_RV.shape[-1]):
            indices = [rows[i].token_index for i in some]
            found = choose(select_rows(logits_RV, some), [samplers[i] for i in some], indices, self.constraints)
            for i, token_id in zip(some, found, strict=True):
                chosen[i] = token_id
                samplers[i].penalties.add(token_id)
                self.constraints.accept(rows[i].sequence, token_id)
        row_logprobs: list[Logprobs | None] = [None] * len(rows)
        for some in _alike(samplers, lambda sampler: sampler.sampling.num_logprobs, logits_RV.shape[-1]):
            num_top = samplers[some[0]].sampling.num_logprobs
            entries = logprobs(select_rows(logits_RV, some), [chosen[i] for i in some], num_top or 0)
            for i, entry in zip(some, entries, strict=True):
                row_logprobs[i] = entry
        return list(map(Token, chosen, row_logprobs))

    def _sampler(self, row: Row, vocabulary_size: int) -> CpuSequenceSampler:
        """The sampler of the row's sequence. It is created again when the row brings new terms."""
        if row.terms is not None:
            self._samplers[row.sequence] = CpuSequenceSampler(row.sequence, row.terms, vocabulary_size)
        return self._samplers[row.sequence]

    def forget(self, sequences: Iterable[int]) -> None:
        """Drops the state of sequences that have ended."""
        for sequence in sequences:
            self.broken.discard(sequence)
            self._samplers.pop(sequence, None)
            self.constraints.forget([sequence])

    def clear(self) -> None:
        """Drops the state of all sequences."""
        self.forget([*self._samplers, *self.broken])
        self.constraints.clear()


def first_positions(rows: Sequence[Row]) -> list[int]:
    """The index of the first logits of each row."""
    return [*accumulate((1 + len(row.draft_ids) for row in rows), initial=0)][:-1]


def row_of_draft(row: Row, turn: int) -> Row:
    """The row of a separate step for draft number `turn`, counted from 1; the row itself for 0."""
    return replace(row, token_index=row.token_index + turn, terms=None) if turn else row


def is_accepted(row: Row, tokens: Sequence[Token]) -> bool:
    """Whether the last token sampled for a row equals the row's draft."""
    turn = len(tokens) - 1
    return turn < len(row.draft_ids) and row.draft_ids[turn] == tokens[turn].id


def select_rows(logits_RV: Tensor, rows: Sequence[int]) -> Tensor:
    """The logits of `rows`, which must be in ascending order. A view if they are consecutive."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return logits_RV[rows[0] : rows[-1] + 1]
    return logits_RV.index_select(0, torch.tensor(rows))


def choose(
    logits_RV: Tensor,
    samplers: Sequence[CpuSequenceSampler],
    token_indices: Sequence[int],
    constraints: Constraints,
) -> list[int]:
    """The next token ids from the logits [V] of rows of one kind."""
    first = samplers[0].sampling
    if samplers[0].kind == PLAIN:
        return argmax(logits_RV)
    scores_RV = adjusted(logits_RV, samplers, constraints)
    if first.is_greedy:
        return argmax(scores_RV)

    def draw_alone(i: int) -> int:
        [scores_V] = adjusted(logits_RV[i, None], [samplers[i]], constraints)
        return distribution.draw(scores_V, samplings[i], uniforms[i])

    samplings = [sampler.sampling for sampler in samplers]
    uniforms = [uniform(s.seed, index) for s, index in zip(samplings, token_indices, strict=True)]
    drawn = draws.draw(scores_RV, samplings, uniforms)
    return [draw_alone(i) if token_id is None else token_id for i, token_id in enumerate(drawn)]


def adjusted(logits_RV: Tensor, samplers: Sequence[CpuSequenceSampler], constraints: Constraints) -> Tensor:
    """Logits [R, V], float64, after bias and penalties; -inf for tokens that the constraint of a row excludes."""
    scores_RV = logits_RV.to(torch.float64, copy=True)
    for scores_V, sampler in zip(scores_RV, samplers, strict=True):
        sampler.penalties.adjust(scores_V)
        if (allowed_V := constraints.allowed(sampler.sequence, len(scores_V))) is not None:
            scores_V.masked_fill_(~allowed_V, -math.inf)
    return scores_RV


def argmax(logits_RV: Tensor) -> list[int]:
    """The index of the first maximum of each row. Numpy takes a tenth of torch's time."""
    is_half = logits_RV.dtype in (torch.bfloat16, torch.float16)
    return (logits_RV.float() if is_half else logits_RV).numpy().argmax(axis=-1).tolist()


def highest_are_finite(logits_RV: Tensor) -> list[bool]:
    """Whether a token can be sampled from each row: it contains no NaN, and its highest logit is finite. A logit of
    -inf is a token that the model rules out.
    """
    return [math.isfinite(highest) for highest in logits_RV.amax(dim=-1).tolist()]


def _alike(
    samplers: Sequence[CpuSequenceSampler], kind: Callable[[CpuSequenceSampler], int | None], num_tokens: int
) -> Iterator[list[int]]:
    """The row indices grouped by kind, without kind None. The logits of a group do not exceed MAX_LOGITS."""
    most = max(1, MAX_LOGITS // num_tokens)
    alike: dict[int, list[int]] = {}
    for i, sampler in enumerate(samplers):
        if (found := kind(sampler)) is not None:
            alike.setdefault(found, []).append(i)
    for rows in alike.values():
        yield from (rows[start : start + most] for start in range(0, len(rows), most))
