"""Draft lookups at a full batch, and sequences whose tokens are compared with unused drafts."""

from collections import Counter, deque
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from coordinator.scheduling.speculation import MAX_COMPARED, TURN_STEPS
from coordinator.speculation.ngram_drafter import Draft
from coordinator.speculation.sequence_drafter import SequenceDrafter
from longleaf.config import MIN_ROWS
from longleaf.errors import DeadlineExceeded
from longleaf.rank_protocol.step import StepPlan, StepResult
from tests.support.fakes.echo_model import echo_token
from tests.support.scheduling import Bench


def steps_of(bench: Bench) -> Iterator[StepPlan]:
    """Yields each step after the next one is planned."""
    plan = bench.schedule()
    while (done := plan) is not None:
        bench.commit(done)
        plan = bench.schedule()
        yield done


@pytest.mark.parametrize(("num_sequences", "is_full"), [(MIN_ROWS, True), (2, False)])
def test_full_batch_looks_up_no_drafts(monkeypatch: pytest.MonkeyPatch, num_sequences: int, is_full: bool) -> None:
    found, draft = list[Draft](), SequenceDrafter.draft

    def look(drafts: SequenceDrafter, end: int, count: int) -> Draft:
        found.append(draft(drafts, end, count))
        return found[-1]

    monkeypatch.setattr(SequenceDrafter, "draft", look)
    bench = Bench(blocks=(1000,), max_sequences=MIN_ROWS, max_draft_tokens=7)
    for _ in range(num_sequences):
        bench.ask(5, max_tokens=20, max_draft_tokens=7)
    for _ in steps_of(bench):
        bench.scheduler.learn()
    assert (not found) == is_full


def test_sequences_are_compared_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, compare, in_step = Counter[int](), SequenceDrafter.compare, list[int]()

    def count(drafts: SequenceDrafter, token_id: int, end: int) -> None:
        seen[drafts.tail.id] += 1
        in_step.append(drafts.tail.id)
        compare(drafts, token_id, end)

    monkeypatch.setattr(SequenceDrafter, "compare", count)
    count_sequences = 2 * MAX_COMPARED + 3
    bench = Bench(blocks=(1000, 1000), max_sequences=2 * count_sequences, max_draft_tokens=7, check_every=50)
    for _ in range(count_sequences):
        bench.ask(5, max_tokens=3 * TURN_STEPS + 5, max_draft_tokens=7)
    for _ in steps_of(bench):
        in_step.clear()
        bench.scheduler.learn()
        assert len(in_step) <= MAX_COMPARED
    assert len(seen) == count_sequences
    assert min(seen.values()) >= TURN_STEPS - 1


class EvenBench(Bench):
    """A bench whose steps all take the same time, with plans sent ahead."""

    def _result(self, plan: StepPlan) -> StepResult:
        return replace(super()._result(plan), seconds=0.01)

    def counts(self) -> list[int]:
        """The number of drafts of each decode step until all jobs end."""
        under_way, found = deque[StepPlan](), list[int]()
        while True:
            while (plan := self.schedule()) is not None:
                under_way.append(plan)
            self.scheduler.learn()
            if not under_way:
                return found
            done = under_way.popleft()
            found += [done.num_drafts] if done.kind == "decode" else []
            self.commit(done)


def test_repeated_question_has_drafts_after_its_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    num_context, num_question = 40, 5

    def know(drafts: SequenceDrafter, end: int, count: int) -> Draft:
        last, found = drafts.tail.token_ids[end - drafts.tail.start - 1], list[int]()
        for index in range(end - num_context - num_question, end - num_context - num_question + count):
            found.append(last := echo_token(last, index))
        return Draft(1, tuple(found))

    monkeypatch.setattr(SequenceDrafter, "draft", know)
    bench, drafted = EvenBench(block_size=64, max_draft_tokens=7), list[list[int]]()
    bench.ingest("c", num_context)
    bench.counts()
    for _ in range(2):
        job = bench.ask(num_question, context="c", max_tokens=30, max_draft_tokens=7)
        drafted.append(bench.counts())
        assert bench.tokens(job) == bench.alone(num_question, 30)
    first, second = drafted
    assert first[:3] == [0, 0, 0], "the benefit of drafts is not known yet"
    assert second[:2] == [0, 7]


def test_deadline_that_drafts_may_meet_is_not_refused() -> None:
    bench = Bench(block_size=64, max_draft_tokens=7)
    bench.seconds_per_token = 0.1
    bench.ask(5, max_tokens=20)
    bench.run()  # measures the step time
    with pytest.raises(DeadlineExceeded):
        bench.ask(5, max_tokens=80, deadline=6.0)
    bench.ask(5, max_tokens=80, deadline=6.0, max_draft_tokens=7)
