"""The reported and counted drafts if every draft is right."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from coordinator.engine_messages import Ended, Prompt, SpanLayout, Tokens
from coordinator.kv_cache.positions import Positions
from coordinator.scheduling.scheduler import Scheduler
from coordinator.scheduling.speculation_stats import DraftCounts
from coordinator.speculation.draft_length import DraftLengthPolicy
from longleaf.positions import Rotary
from longleaf.rank_protocol.step import MAX_ATTRIBUTED_SPANS, Attention, Decode, StepPlan, StepResult
from longleaf.sampling import SamplingParams
from tests.support.random_drafter import RandomDrafter
from tests.support.scheduling import Bench

NUM_DRAFTS = 7


class GreedyPolicy(DraftLengthPolicy):
    """A policy that uses all offered drafts, regardless of their cost."""

    def __init__(self) -> None:
        pass

    def has_room(self, num_sequences: int) -> bool:
        return True

    def is_worth_waiting(self, expected: Sequence[Sequence[float]]) -> bool:
        return True

    def lengths(self, offered: Sequence[Sequence[float]]) -> list[int]:
        return list(map(len, offered))


class Drafter(RandomDrafter):
    """Drafts the tokens that will be sampled."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench.config, "right")
        self._policy = GreedyPolicy()


def attention_at(position: int) -> Attention:
    return Attention(position.to_bytes(2), b"", b"")


class DraftingBench(Bench):
    """A bench whose steps have the maximum number of drafts."""

    def __init__(self) -> None:
        super().__init__(block_size=64, max_draft_tokens=NUM_DRAFTS)
        positions = Positions(Rotary(), 2000)
        self.scheduler = Scheduler(self.config, self.placer, positions, 1, drafter=Drafter(self))

    def _result(self, plan: StepPlan) -> StepResult:
        """The attention of each token names its position."""
        result, work = super()._result(plan), self.sequences.complete(plan).work
        rows = work.rows if isinstance(work, Decode) else ()
        attention = {
            row.sequence: tuple(attention_at(row.start + row.num_known + i) for i in range(1 + len(row.draft_ids)))
            for row in rows
            if row.spans
        }
        return replace(result, attention=attention)

    def answer(self, end: int | None = None, max_tokens: int = 40, cuts: SpanLayout | None = None) -> list[Tokens]:
        """The steps of one answer, which `end` ends."""
        prompt = Prompt(
            context=None,
            token_ids=tuple(range(8)),
            sampling=SamplingParams(max_tokens=max_tokens),
            end_tokens=frozenset({end} if end is not None else ()),
            max_draft_tokens=NUM_DRAFTS,
            cuts=cuts,
        )
        job = self._admitted(lambda job: self.scheduler.admit(job, prompt))
        self.run()
        assert isinstance(self.seen[job][-1], Ended)
        return [event for event in self.seen[job] if isinstance(event, Tokens)]


def test_step_counts_drafted_and_accepted_tokens() -> None:
    bench = DraftingBench()
    answer = bench.answer(max_tokens=20)
    assert [token_id for step in answer for token_id in step.token_ids] == Bench.alone(8, 20)
    assert [(len(step.tokens), step.num_drafted, step.num_accepted) for step in answer] == [
        (1, 0, 0),
        (8, 7, 7),
        (8, 7, 7),
        (3, 2, 2),
    ]
    assert bench.scheduler.drafts == DraftCounts(num_drafted=16, num_accepted=16, num_sampled=20, num_sequence_steps=4)


def test_drafts_after_the_end_token_are_not_accepted() -> None:
    bench, alone = DraftingBench(), Bench.alone(8, 40)
    assert alone.index(alone[12]) == 12
    *_, last = bench.answer(end=alone[12])
    assert (last.index, last.token_ids) == (9, tuple(alone[9:13]))
    assert (last.num_drafted, last.num_accepted) == (7, 4)
    assert bench.scheduler.drafts == DraftCounts(num_drafted=14, num_accepted=11, num_sampled=13, num_sequence_steps=3)


@pytest.mark.parametrize(
    ("num_spans", "expected"),
    [(3, [1, 8, 4]), (MAX_ATTRIBUTED_SPANS // 4, [1, 4, 4, 4]), (MAX_ATTRIBUTED_SPANS, [1] * 13)],
)
def test_each_token_of_a_drafted_step_has_its_attention(num_spans: int, expected: list[int]) -> None:
    """As many drafts as fit into the result of a step; none after the end of the answer."""
    bench, alone = DraftingBench(), Bench.alone(8, 40)
    answer = bench.answer(end=alone[12], cuts=SpanLayout(32, num_spans=num_spans))
    assert [len(step.tokens) for step in answer] == expected
    assert [attention for step in answer for attention in step.attention] == [attention_at(8 + i) for i in range(13)]
