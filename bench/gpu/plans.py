"""Plans as a scheduler makes them, of sequences whose keys are there already, and of sequences that come and go."""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

from msgspec.structs import replace

from longleaf.rank_protocol.step import Decode, Prefill, Row, SamplingTerms, StepPlan
from longleaf.runs import Run, ceil_div, cut_chunk
from longleaf.sampling import SamplingParams

EPOCH = 1
REFUSED = 7
"""The id of drafts. A greedy row does not choose it where its row of the head is zero, as some logit is positive."""


def num_blocks(num_keys: int, num_contexts: int, num_rows: int, num_steps: int, block_size: int) -> int:
    """Blocks that `over_keys` asks for in so many steps."""
    return num_contexts * ceil_div(num_keys, block_size) + num_rows * ceil_div(num_steps, block_size)


def over_keys(
    num_keys: int, num_contexts: int, num_rows: int, block_size: int, num_drafts: int = 0
) -> Iterator[StepPlan]:
    """Decode steps without end of greedy rows over contexts of which nobody has computed the keys; the rows are dealt
    to the contexts in turn, and each has a tail of its own. Drafts must be refused, and fit into a row's first block.

    The first plan tells where the contexts lie: it has a row of each, their last tokens, and nothing is sampled.
    """
    each = ceil_div(num_keys, block_size)
    attribution_rows = tuple(range(num_rows, num_rows + num_contexts))
    runs = [Run(0, 0, num_keys, tuple(range(i * each, (i + 1) * each))) for i in range(num_contexts)]
    attributed_rows = [Row(attribution_rows[i], (i,), num_keys - 1, (1,), (run,), -1) for i, run in enumerate(runs)]
    yield StepPlan(EPOCH, 0, Decode(tuple(attributed_rows)))
    tails = num_contexts * each
    for index in count():
        end, rows = num_keys + index + 1, list[Row]()
        for i in range(num_rows):
            blocks = range(tails + i, tails + i + 1 + index // block_size * num_rows, num_rows)
            run = Run(0, num_keys, end, tuple(blocks))
            path, ids = (() if index else (i % num_contexts, num_contexts + i)), (() if index else (3 + i,))
            terms = None if index else SamplingTerms(SamplingParams())
            rows.append(with_drafts(Row(i, path, end - 1, ids, (run,), index, terms), (REFUSED,) * num_drafts))
        yield StepPlan(EPOCH, 1 + index, Decode(tuple(rows)), release_sequences=() if index else attribution_rows)


def with_drafts(row: Row, draft_ids: Sequence[int]) -> Row:
    """The row with drafts behind its token, which fit into its last block."""
    *runs, last = row.runs
    return replace(row, draft_ids=tuple(draft_ids), runs=(*runs, replace(last, end=last.end + len(draft_ids))))


class Asked(NamedTuple):
    """A prompt, and when it comes."""

    token_ids: tuple[int, ...]
    num_tokens: int
    """Tokens of the answer."""
    begin: int = 0
    """The decode step that is its first."""
    sampling: SamplingParams = SamplingParams()


def answers(asked: Sequence[Asked], num_ranks: int, block_size: int) -> Iterator[StepPlan]:
    """All steps that answer prompts, each of two tokens or more: what comes before its last token is a chunk, cut over
    the ranks, and the tail goes from rank to rank with each block."""
    each = blocks_each(asked, block_size)
    numbers = count()
    gone: list[int] = []
    for step in range(max(one.begin + one.num_tokens for one in asked)):
        for i, one in enumerate(asked):
            if one.begin == step:
                yield StepPlan(EPOCH, next(numbers), chunk(i, one, num_ranks, block_size, i * each))
        here = [i for i, one in enumerate(asked) if one.begin <= step < one.begin + one.num_tokens]
        if not here:
            continue
        rows = [row(i, asked[i], step - asked[i].begin, num_ranks, block_size, i * each) for i in here]
        released = tuple(gone)
        yield StepPlan(EPOCH, next(numbers), Decode(tuple(rows)), released, release_sequences=released)
        gone = [i for i in here if asked[i].begin + asked[i].num_tokens == step + 1]


def blocks_each(asked: Sequence[Asked], block_size: int) -> int:
    """Blocks that any of them may take on a rank."""
    return ceil_div(max(len(one.token_ids) + one.num_tokens for one in asked), block_size) + 1


def chunk(sequence: int, one: Asked, num_ranks: int, block_size: int, first_block: int) -> Prefill:
    """All of a prompt but its last token. Its pieces take blocks of the same numbers on each rank."""
    ids = one.token_ids[:-1]
    pieces = [
        Run(rank, low, high, tuple(range(first_block, first_block + ceil_div(high - low, block_size))))
        for rank, (low, high) in enumerate(cut_chunk(0, len(ids), block_size, num_ranks))
    ]
    return Prefill((sequence,), 0, ids, tuple(pieces))


def row(sequence: int, one: Asked, index: int, num_ranks: int, block_size: int, first_block: int) -> Row:
    """The row that samples the token `index` of an answer. Runs of the tail follow the chunk, a block each."""
    start = len(one.token_ids) - 1
    turn = index // block_size
    chunk_blocks = ceil_div(ceil_div(start, block_size), num_ranks)
    block = first_block + chunk_blocks + turn // num_ranks
    run = Run(turn % num_ranks, start + turn * block_size, start + index + 1, (block,))
    if index:
        return Row(sequence, (), start + index, (), (run,), index)
    return Row(sequence, (sequence,), start, one.token_ids[-1:], (run,), 0, SamplingTerms(one.sampling))
