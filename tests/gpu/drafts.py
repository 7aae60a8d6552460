"""Steps with drafts of a small random model: tokens and logits equal those of steps of one token."""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bench.gpu import ground
from tests.gpu.decoding import BLOCK_SIZE, watched
from tests.gpu.place import Place, assert_same_bits

if TYPE_CHECKING:
    from bench.gpu.plans import Asked
    from longleaf.rank_protocol.step import Row
    from longleaf.sampling import Token

NUM_TOKENS, MOST_DRAFTS, SHARE = 24, 4, 0.8
"""Of an answer, of a row, and how often a draft is right."""
TOLERANCE = 1e-4
"""Of a logprob, in float32."""


def drafts_change_no_token(place: Place) -> None:
    """Greedy, drawn, with penalties; captured steps have the bits of those that are launched one by one, and are
    replayed."""
    ground.need(ground.NEEDED_BY_RANKS)
    from bench.gpu.plans import Asked, answers
    from longleaf.sampling import SamplingParams

    ids = tuple(3 + i * 7 % 400 for i in range(place.num_prompt))
    drawn = SamplingParams(temperature=0.9, top_p=0.9, num_logprobs=3, seed=1)
    penalized = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5, logit_bias={5: 1.0}, num_logprobs=0)
    samplings = (SamplingParams(num_logprobs=5), drawn, penalized)
    requested = [Asked(ids[: len(ids) - i], NUM_TOKENS, 0, sampling) for i, sampling in enumerate(samplings)]
    rank, wanted = watched(place, is_captured=True).rank, [list["Token"]() for _ in requested]
    for plan in answers(requested, 1, BLOCK_SIZE):
        result = rank.execute(plan)
        for sequence, tokens in result.tokens.items() if result else ():
            wanted[sequence] += tokens
    found = drafted(place, requested, wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        assert [token.id for token in mine] == [token.id for token in theirs]
        pairs = [(a.logprobs, b.logprobs) for a, b in zip(mine, theirs, strict=True)]
        assert all(a and b and abs(a.logprob - b.logprob) < TOLERANCE for a, b in pairs)


def drafted(place: Place, requests: "Sequence[Asked]", known: "Sequence[Sequence[Token]]") -> "list[list[Token]]":
    """The answers of ranks that are given drafts, of which most are right."""
    from bench.gpu import plans
    from longleaf.rank_protocol.step import Decode, StepPlan

    captured, eager = watched(place, is_captured=True), watched(place, is_captured=False)
    each = plans.blocks_each(requests, BLOCK_SIZE)
    for i, one in enumerate(requests):
        for rank in (captured.rank, eager.rank):
            rank.execute(StepPlan(plans.EPOCH, i, plans.chunk(i, one, 1, BLOCK_SIZE, i * each)))
    dice, found, num_steps = random.Random(0), [list["Token"]() for _ in requests], 0
    while here := [i for i, one in enumerate(requests) if len(found[i]) < one.num_tokens]:
        rows = [row(i, requests[i], found[i], known[i], each, dice) for i in here]
        plan = StepPlan(plans.EPOCH, len(requests) + num_steps, Decode(tuple(rows)))
        result = captured.rank.execute(plan)
        assert result == eager.rank.execute(plan)
        num_positions = sum(1 + len(row.draft_ids) for row in rows)
        assert_same_bits(captured.logits[0][:num_positions], eager.logits[0][:num_positions])
        assert result is not None
        for i in here:
            found[i] += result.tokens[i]
        num_steps += 1
    assert num_steps < NUM_TOKENS, "no draft was accepted"
    assert captured.graphs is not None and captured.graphs.num_replayed == 3 * num_steps, captured.graphs
    return found


def row(
    sequence: int, one: "Asked", said: "Sequence[Token]", known: "Sequence[Token]", each: int, dice: random.Random
) -> "Row":
    """The next row after the tokens so far, with drafts that fit into its block and its answer."""
    from bench.gpu import plans

    index = len(said)
    plain = plans.row(sequence, one, index, 1, BLOCK_SIZE, sequence * each)
    room = min(BLOCK_SIZE - 1 - index % BLOCK_SIZE, one.num_tokens - index - 1, MOST_DRAFTS if index else 0)
    drafts = [token.id if dice.random() < SHARE else token.id ^ 1 for token in known[index : index + room]]
    return plans.with_drafts(plain, drafts)
