"""Answers that outgrow one set of rotary factors are recomputed with the other one."""

import pytest

from coordinator.engine_messages import Admitted, DocumentPrompt, Ended, Prompt, Tokens
from longleaf.errors import InvalidArgument, ResourceExhausted
from longleaf.positions import OWN_ROPE, Rope, Rotary
from longleaf.rank_protocol.step import Decode, Prefill, StepPlan
from longleaf.sampling import Sampling
from longleaf.types import ContextSettings
from tests.support.random_drafter import RandomDrafter
from tests.support.scheduling import Bench, kinds

BORDER = 24
FAR = Rope(scaled_for=BORDER + 1)


class RopeBench(Bench):
    """A bench that records the rope and the positions of each step of a sequence."""

    def __init__(self, **changes: object) -> None:
        super().__init__(rotary=Rotary(kind="longrope", scaled_from=BORDER), **changes)  # type: ignore[arg-type]
        self.steps: list[tuple[int, Rope, int, int]] = []
        """Sequence, rope, and the positions [start, end)."""

    def schedule(self) -> StepPlan | None:
        plan = super().schedule()
        if plan is not None and isinstance(plan.work, Decode):
            for row in plan.work.rows:
                rope = self.scheduler._running[row.sequence].rope
                self.steps.append((row.sequence, rope, row.start, row.start + row.num_tokens))
        elif plan is not None and isinstance(plan.work, Prefill):
            [(job, _)] = self.scheduler._planner._flights[-1].jobs
            work = plan.work
            self.steps.append((job.id, work.rope, work.start, work.start + len(work.token_ids)))
        return plan

    def of(self, job: int, rope: Rope) -> list[tuple[int, int]]:
        return [(start, end) for sequence, found, start, end in self.steps if (sequence, found) == (job, rope)]


@pytest.mark.parametrize("drafts", ["", *RandomDrafter.KINDS])
@pytest.mark.parametrize("count", [1, 3, 20, BORDER - 1, BORDER])
def test_sequence_is_recomputed_at_the_first_position_past_the_limit(count: int, drafts: str) -> None:
    bench = RopeBench(drafts=drafts, max_draft_tokens=4)
    job = bench.ask(count, max_tokens=40, max_draft_tokens=4)
    bench.run()
    assert bench.tokens(job) == bench.alone(count, 40)
    near, far = bench.of(job, OWN_ROPE), bench.of(job, FAR)
    assert (near[0][0], max(end for _, end in near)) == (0, BORDER)
    assert far[0][0] == 0
    assert [start for start, _ in far[1:]] == [end for _, end in far[:-1]] or drafts, "every position once"
    [end] = [event for event in bench.seen[job] if isinstance(event, Ended)]
    assert (end.prompt_tokens, end.cached_tokens, end.completion_tokens) == (count, 0, 40)


@pytest.mark.parametrize(("count", "max_tokens"), [(20, 5), (BORDER, 1), (1, BORDER)])
def test_answer_that_just_fits_is_computed_once(count: int, max_tokens: int) -> None:
    bench = RopeBench()
    job = bench.ask(count, max_tokens)
    bench.run()
    assert not bench.of(job, FAR)
    assert bench.of(job, OWN_ROPE)[-1][1] == count + max_tokens - 1


def test_prompt_past_the_limit_begins_with_the_other_rope() -> None:
    bench = RopeBench()
    job = bench.ask(BORDER + 1, 9)
    bench.run()
    assert not bench.of(job, OWN_ROPE)


@pytest.mark.parametrize("reported", [4, 5])
def test_resumed_answer_uses_the_rope_for_its_length(reported: int) -> None:
    bench = RopeBench()
    answer = bench.alone(20, 30)
    prompt = Prompt(
        context=None,
        token_ids=tuple(range(20)),
        sampling=Sampling(max_tokens=30),
        generated={0: answer[:reported]},
    )
    bench.scheduler.admit(0, prompt)
    bench.run()
    assert bench.tokens(0) == answer[reported:]
    assert bool(bench.of(0, OWN_ROPE)) == (20 + reported <= BORDER)


def test_other_jobs_wait_for_one_chunk_at_a_time() -> None:
    bench = RopeBench(chunk_size=4)
    other = bench.ask(2, 20)
    bench.ask(20, 12)
    plans = bench.run()
    assert "PP" not in kinds(plans)
    assert bench.tokens(other) == bench.alone(2, 20)


def test_recomputed_answer_keeps_its_turn_if_it_fits() -> None:
    bench = RopeBench(max_sequences=1)
    first, second = bench.ask(20, 12), bench.ask(3, 2)
    bench.run()
    sequences = [sequence for sequence, *_ in bench.steps]
    assert sequences == sorted(sequences), "the second one begins when the first one has ended"
    assert bench.tokens(second) == bench.alone(3, 2)
    assert first == 0


@pytest.mark.parametrize("num_blocks", [11, 13, 16])
def test_samples_wait_for_blocks_to_recompute_their_shared_prompt(num_blocks: int) -> None:
    """Two samples need 8 blocks each past the limit; before it they share 5 and have 3 each."""
    bench = RopeBench(blocks=(num_blocks,))
    job = bench.ask(20, 12, num_samples=2)
    bench.ask(6, 3)
    bench.run()
    for sample in range(2):
        events = [e for e in bench.seen[job] if isinstance(e, Tokens) and e.sample == sample]
        assert [token for event in events for token in event.token_ids] == bench.alone(20, 12)
    assert bench.scheduler.num_preempted == 0


def test_unread_answer_waits_at_the_limit() -> None:
    bench = RopeBench()
    job = bench.ask(20, 12)
    while len(bench.steps) < 3:
        bench.step()
    bench.scheduler.pause(job, True)
    bench.run()
    bench.scheduler.pause(job, False)
    while len(bench.tokens(job)) < 5 and bench.step():
        bench.scheduler.pause(job, len(bench.tokens(job)) == 4)
    bench.run()
    assert not bench.of(job, FAR)
    bench.scheduler.pause(job, False)
    bench.run()
    assert bench.tokens(job) == bench.alone(20, 12)


def test_question_uses_its_context_up_to_the_limit() -> None:
    bench = RopeBench()
    bench.ingest("book", 20)
    bench.run()
    job = bench.ask(2, 12, context="book")
    bench.step()
    bench.scheduler.delete_context("book")
    bench.run()
    assert bench.tokens(job) == bench.alone(2, 12)
    assert bench.of(job, OWN_ROPE)[0][0] == 20
    assert bench.of(job, FAR)[0][0] == 0
    assert [event.cached_tokens for event in bench.seen[job] if isinstance(event, Admitted)] == [20, 0]


def test_question_that_fits_uses_the_keys_of_its_context() -> None:
    bench = RopeBench()
    bench.ingest("book", 20)
    bench.run()
    job = bench.ask(2, 3, context="book")
    assert next(iter(bench.scheduler._queue)).context == "book"
    bench.run()
    assert not bench.of(job, FAR)


@pytest.mark.parametrize("num_blocks", [16, 17])
def test_recomputation_needs_blocks_beside_the_context(num_blocks: int) -> None:
    """5 blocks for the context, 6 for the prompt of 24 tokens and 6 for the answer."""
    bench = RopeBench(blocks=(num_blocks,))
    bench.ingest("book", 20)
    bench.run()
    if num_blocks < 17:
        with pytest.raises(ResourceExhausted, match="48 tokens are needed, and contexts use too many of 64"):
            bench.ask(4, 21, context="book")
        return
    job = bench.ask(4, 21, context="book")
    bench.run()
    assert bench.tokens(job) == bench.alone(4, 21)


def test_context_keeps_its_declared_capacity() -> None:
    bench = RopeBench()
    document = DocumentPrompt(context="book", token_ids=[1] * 10, settings=ContextSettings(capacity=BORDER - 1))
    bench.scheduler.admit(0, document)
    bench.num_jobs = 1
    bench.run()
    with pytest.raises(InvalidArgument, match="the context was created for 23 positions"):
        bench.ask(2, 30, context="book")


def test_question_resumed_in_another_service_uses_the_rope_for_its_length() -> None:
    bench = RopeBench()
    bench.ingest("book", 20)
    bench.run()
    answer = bench.alone(2, 12)
    prompt = Prompt(context="book", token_ids=(0, 1), sampling=Sampling(max_tokens=12), generated={0: answer[:6]})
    bench.scheduler.admit(1, prompt)
    bench.run()
    assert bench.tokens(1) == answer[6:]
    assert not bench.of(1, OWN_ROPE)
