"""Answers that become longer than one set of rotary factors reaches: they are computed anew with the other one."""

import pytest

from coordinator.events import Ended, Prompt, Tokens
from longleaf.channel.step import Decode, Prefill, StepPlan
from longleaf.geometry import OWN_ROPE, Rope, Rotary
from longleaf.sampling import Sampling
from tests.support.random_drafter import RandomDrafter
from tests.support.scheduling import Bench, kinds

BORDER = 24
FAR = Rope(scaled_for=BORDER + 1)


class Watched(Bench):
    """Notes by which rope, and up to which position, each step of a sequence computes."""

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
def test_all_is_computed_anew_at_the_first_position_behind_the_border(count: int, drafts: str) -> None:
    bench = Watched(drafts=drafts, max_draft_tokens=4)
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
def test_an_answer_that_just_fits_is_computed_once(count: int, max_tokens: int) -> None:
    bench = Watched()
    job = bench.ask(count, max_tokens)
    bench.run()
    assert not bench.of(job, FAR)
    assert bench.of(job, OWN_ROPE)[-1][1] == count + max_tokens - 1


def test_a_prompt_behind_the_border_begins_with_the_other_rope() -> None:
    bench = Watched()
    job = bench.ask(BORDER + 1, 9)
    bench.run()
    assert not bench.of(job, OWN_ROPE)


@pytest.mark.parametrize("told", [4, 5])
def test_an_answer_goes_on_with_the_rope_of_what_was_told(told: int) -> None:
    bench = Watched()
    answer = bench.alone(20, 30)
    prompt = Prompt(
        context=None,
        token_ids=tuple(range(20)),
        sampling=Sampling(max_tokens=30),
        generated={0: answer[:told]},
    )
    bench.scheduler.admit(0, prompt)
    bench.run()
    assert bench.tokens(0) == answer[told:]
    assert bool(bench.of(0, OWN_ROPE)) == (20 + told <= BORDER)


def test_others_wait_for_one_chunk_at_a_time() -> None:
    bench = Watched(chunk_size=4)
    other = bench.ask(2, 20)
    bench.ask(20, 12)
    plans = bench.run()
    assert "PP" not in kinds(plans)
    assert bench.tokens(other) == bench.alone(2, 20)


def test_an_answer_keeps_its_turn_where_it_has_room() -> None:
    bench = Watched(max_sequences=1)
    first, second = bench.ask(20, 12), bench.ask(3, 2)
    bench.run()
    sequences = [sequence for sequence, *_ in bench.steps]
    assert sequences == sorted(sequences), "the second one begins when the first one has ended"
    assert bench.tokens(second) == bench.alone(3, 2)
    assert first == 0


@pytest.mark.parametrize("num_blocks", [11, 13, 16])
def test_samples_that_shared_a_prompt_wait_for_room_to_read_it_again(num_blocks: int) -> None:
    """Two need 8 blocks each behind the border, and 5 that they share with 3 of their own before."""
    bench = Watched(blocks=(num_blocks,))
    job = bench.ask(20, 12, num_samples=2)
    bench.ask(6, 3)
    bench.run()
    for sample in range(2):
        events = [e for e in bench.seen[job] if isinstance(e, Tokens) and e.sample == sample]
        assert [token for event in events for token in event.token_ids] == bench.alone(20, 12)
    assert bench.scheduler.num_preempted == 0


def test_one_that_is_not_read_waits_at_the_border() -> None:
    bench = Watched()
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
