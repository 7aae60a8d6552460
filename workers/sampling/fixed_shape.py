"""Samples the tokens of all rows by operations whose shapes depend on no values, so that the host never waits.

Each row gets the result of `distribution.py`, by the same float64 operations on the same numbers in the same order: on
CPUs the results are bit-identical. Other devices add in another order and have another exponential function, so that
sums differ in their last bits, and a token may differ where a sum is that close to a limit: the drawn number to the
edge of a token's interval, a sum of shares to the top-p threshold, a share to the min-p threshold. Sequential sums of V
shares have an error of approximately sqrt(V) / 8 eps, 1e-14 for 152,000 tokens, and at most 8 V eps. If N tokens are
about equally likely, one draw in 1 / (2e-14 N) is that close to an edge: one in 3e8 for all tokens, one in 5e11 for a
hundred.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from longleaf.sampling import MAX_LOGPROBS
from workers.sampling.acceptance import NOT_FINITE, NOT_REACHED, DraftRows
from workers.sampling.history import PADDING_ROW, TokenHistories
from workers.sampling.logprobs import top_logprobs

COLUMNS = (slice(None), None)


class Needs(NamedTuple):
    """The operations that the rows of a step need. Rows with equal needs run the same operations."""

    has_bias: bool
    has_repetition: bool
    has_counts: bool
    """Presence or frequency penalties."""
    draws: bool
    cuts: bool
    """By top-k or top-p."""
    has_min_p: bool
    num_top: int
    """The number of logprobs that are reported beside that of the token; -1 for none, not even the token's."""

    @property
    def is_adjusted(self) -> bool:
        return self.has_bias or self.counts_tokens

    @property
    def counts_tokens(self) -> bool:
        """Whether the result depends on earlier tokens."""
        return self.has_repetition or self.has_counts

    def covers(self, other: "Needs") -> bool:
        """Whether the operations for these needs also serve rows of other needs."""
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))


ADJUSTED = Needs(True, True, True, False, False, False, -1)
KINDS = (
    Needs(False, False, False, False, False, False, -1),
    Needs(False, False, False, True, False, True, -1),
    ADJUSTED,
    ADJUSTED._replace(draws=True, cuts=True, has_min_p=True),
    ADJUSTED._replace(draws=True, cuts=True, has_min_p=True, num_top=MAX_LOGPROBS),
)
"""The needs of captured operations, in the order of increasing work; the last one covers all. Operations that a row
does not need leave its bits unchanged, such as a sort of logits of which none are cut, or a division by a penalty of 1.
"""


def kind_of(needs: Needs) -> Needs:
    """The kind with the fewest operations that covers the needs."""
    return next(kind for kind in KINDS if kind.covers(needs))


class Parameters(NamedTuple):
    """Sampling parameters [R] of the rows of a step; floats are float64."""

    temperature: Tensor
    """1 for greedy sampling."""
    dropped_share: Tensor
    """1 - top_p; -1 drops nothing."""
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    uniform: Tensor
    """A number in [0, 1)."""
    top_k: Tensor
    """From 1 to V."""
    is_greedy: Tensor
    place: Tensor
    """The place in the histories."""

    def of(self, rows: slice | tuple[slice, None]) -> "Parameters":
        """The parameters of some rows, or as columns."""
        return Parameters(*(values_R[rows] for values_R in self))


def choose(
    logits_RV: Tensor, parameters: Parameters, histories: TokenHistories, needs: Needs, before_RM: Tensor | None = None
) -> Tensor:
    """The id of the next token of each row, from its logits [V], or NOT_FINITE: [R, 1], int64. With logprobs
    [R, 2 + 2 N], float64: the id, its natural-log probability, those of the N likeliest tokens, and their ids.

    `before_RM` are drafts that count as generated, see `DraftRows.before`.
    """
    # NaN propagates to the maximum; single logits of -inf are tokens that are ruled out
    is_finite_R = logits_RV.amax(dim=-1).isfinite()
    if needs.is_adjusted or needs.draws:
        ids_R = choose_adjusted(logits_RV, parameters.of(COLUMNS), histories, needs, before_RM)
    else:
        ids_R = logits_RV.argmax(dim=-1)
    told_R1 = torch.where(is_finite_R, ids_R, NOT_FINITE)[:, None]
    if needs.num_top < 0:
        return told_R1
    ids_RN, logprobs_RN = top_logprobs(logits_RV, ids_R[:, None], needs.num_top)
    return torch.cat((told_R1.double(), logprobs_RN, ids_RN.double()), dim=1)


def note(
    told_RC: Tensor, parameters: Parameters, histories: TokenHistories, needs: Needs, drafts: DraftRows | None
) -> Tensor:
    """Adds the sampled tokens to the histories of their sequences. Returns the result of `choose`, with the id
    NOT_REACHED behind drafts that are not accepted.
    """
    ids_R, places_R = told_RC[:, 0].long(), parameters.place
    if drafts is not None:
        is_reached_R = drafts.reached(ids_R)
        told_RC[:, 0].masked_fill_(~is_reached_R, NOT_REACHED)
        places_R = torch.where(is_reached_R, places_R, PADDING_ROW)
    if needs.counts_tokens:
        histories.add(places_R, ids_R.clamp(min=0))
    return told_RC


def choose_adjusted(
    logits_RV: Tensor, parameters_R1: Parameters, histories: TokenHistories, needs: Needs, before_RM: Tensor | None
) -> Tensor:
    """Ids [R] after bias and penalties, greedy or drawn."""
    scores_RV = logits_RV.to(torch.float64, copy=True)
    if needs.is_adjusted:
        adjust(scores_RV, parameters_R1, histories, needs, before_RM)
    if not needs.draws:
        return scores_RV.argmax(dim=-1)
    greedy_R = scores_RV.argmax(dim=-1)
    return torch.where(parameters_R1.is_greedy[:, 0] > 0, greedy_R, draw(scores_RV, parameters_R1, needs))


def adjust(
    scores_RV: Tensor, parameters_R1: Parameters, histories: TokenHistories, needs: Needs, before_RM: Tensor | None
) -> None:
    """Adds biases and penalties in place, as `penalties.py` does; those that a row does not have leave its bits
    unchanged.
    """
    places_R = parameters_R1.place[:, 0]
    if needs.has_bias:
        scores_RV.scatter_add_(1, histories.bias_ids_PB[places_R], histories.biases_PB[places_R])
    if not needs.counts_tokens:
        return
    is_seen_RV, counts_RV = histories.is_seen_PV[places_R], histories.counts_PV[places_R]
    if before_RM is not None:
        more_RV = counts_of(before_RM, scores_RV.shape[-1])
        is_seen_RV, counts_RV = is_seen_RV | (more_RV > 0), counts_RV + more_RV
    if needs.has_repetition:
        factor_R1 = parameters_R1.repetition_penalty
        penalized_RV = torch.where(scores_RV < 0, scores_RV * factor_R1, scores_RV / factor_R1)
        torch.where(is_seen_RV, penalized_RV, scores_RV, out=scores_RV)
    if needs.has_counts:
        scores_RV -= parameters_R1.presence_penalty * (counts_RV > 0)
        scores_RV -= counts_RV * parameters_R1.frequency_penalty


def counts_of(ids_RM: Tensor, vocabulary_size: int) -> Tensor:
    """The number of occurrences of each of V ids in each row, [R, V], int32; ids without a logit are not counted."""
    is_id_RM = (ids_RM >= 0) & (ids_RM < vocabulary_size)
    counts_RV = torch.zeros(len(ids_RM), vocabulary_size, dtype=torch.int32, device=ids_RM.device)
    return counts_RV.scatter_add_(1, torch.where(is_id_RM, ids_RM, 0), is_id_RM.int())


def draw(scores_RV: Tensor, parameters_R1: Parameters, needs: Needs) -> Tensor:
    """Ids [R] drawn from scores [V] after bias and penalties. The scores are overwritten."""
    scores_RV /= parameters_R1.temperature
    if needs.cuts:
        cut(scores_RV, parameters_R1)
    shares_RV = torch.softmax(scores_RV, dim=-1)
    if needs.has_min_p:
        least_R1 = parameters_R1.min_p * shares_RV.amax(dim=-1, keepdim=True)
        shares_RV = torch.softmax(scores_RV.masked_fill_(shares_RV < least_R1, -torch.inf), dim=-1)
    cumulative_RV = shares_RV.cumsum(dim=-1)
    drawn_R1 = parameters_R1.uniform * cumulative_RV[:, -1:]
    found_R1 = torch.searchsorted(cumulative_RV, drawn_R1, right=True)
    ids_V = torch.arange(scores_RV.shape[-1], device=scores_RV.device)
    # the last token up to there with a non-zero share: rounding may lead past the last one, or between two
    return torch.where((shares_RV != 0) & (ids_V <= found_R1), ids_V, 0).amax(dim=-1)


def cut(scores_RV: Tensor, parameters_R1: Parameters) -> None:
    """Sets the scores that top-k or top-p drops to -inf. Among equal scores, top-p drops those of smaller ids first."""
    sorted_RV, order_RV = scores_RV.sort(dim=-1, stable=True)
    last_R1 = sorted_RV.gather(1, scores_RV.shape[-1] - parameters_R1.top_k)
    sorted_RV.masked_fill_(sorted_RV < last_R1, -torch.inf)
    is_dropped_RV = torch.softmax(sorted_RV, dim=-1).cumsum(dim=-1) <= parameters_R1.dropped_share
    is_dropped_RV[:, -1:].zero_()
    scores_RV.scatter_(1, order_RV, sorted_RV.masked_fill_(is_dropped_RV, -torch.inf))
