"""Answers of fake ranks, computed without a model."""

from array import array
from collections.abc import Iterator, Mapping, Sequence

from longleaf.rank_protocol.step import Attention, Decode, Positions, Row, StepPlan
from longleaf.sampling import Token

VOCAB = 1000
NUM_HEADS = 2
"""Heads of the single layer of fake ranks, number 3."""
FULL_LAYER = 3


def echo_token(last: int, token_index: int, vocab: int = VOCAB) -> int:
    """The id that fake ranks sample after `last`."""
    return (last * 31 + 7 + token_index) % vocab


def echo_tokens(last: int, token_index: int, draft_ids: Sequence[int], vocab: int = VOCAB) -> list[int]:
    """The ids that fake ranks sample after `last` and drafts, up to the first mismatch."""
    found = [echo_token(last, token_index, vocab)]
    while len(found) <= len(draft_ids) and found[-1] == draft_ids[len(found) - 1]:
        found.append(echo_token(found[-1], token_index + len(found), vocab))
    return found


def drafted_ends(plan: StepPlan, tokens: Mapping[int, Sequence[Token]]) -> Iterator[tuple[Row, int]]:
    """The rows of a complete plan that have drafts, and the end of their sequences after these tokens were sampled."""
    for row in plan.work.rows if isinstance(plan.work, Decode) else ():
        if row.draft_ids:
            yield row, row.start + row.num_known + len(tokens[row.sequence]) - 1


def echo_spans(starts: Sequence[int], end: int, size: int) -> list[Positions]:
    """The spans of segments with these starts that are used up to `end`."""
    ends = [*starts[1:], end]
    return [
        (at, min(at + size, last)) for first, last in zip(starts, ends, strict=True) for at in range(first, last, size)
    ]


def echo_attention(spans: Sequence[Positions], hidden: Sequence[Positions], position: int) -> Attention:
    """Attention of a row at a position: zero for completely hidden spans, otherwise a value that depends on the
    position."""
    weights = [0 if _is_hidden(span, hidden) else 1 + (7 * i + position) % 5 for i, span in enumerate(spans)]
    total = sum(weights) + 7
    means = array("f", [*(weight / total for weight in weights), 1 / total, 1 / total, 2 / total, 3 / total])
    largest = array("f", [min(1.0, NUM_HEADS * weight / total) for weight in weights])
    heads = array("i", [(FULL_LAYER << 16) + position % NUM_HEADS] * len(weights))
    return Attention(means.tobytes(), largest.tobytes(), heads.tobytes())


def echo_scores(token_ids: Sequence[int], hidden: Sequence[Positions]) -> tuple[float, ...]:
    """Logprobs of tokens; the later in the context something is hidden, the lower they are."""
    less = sum(end for _, end in hidden) / 1024
    return tuple(-1 / 16 * (token_id % 7 + 1) - less for token_id in token_ids)


def _is_hidden(span: Positions, hidden: Sequence[Positions]) -> bool:
    return any(start <= span[0] and span[1] <= end for start, end in hidden)
