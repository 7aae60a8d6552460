"""What each step does, and who may wait."""

import pytest

from coordinator.blocks import Placer
from coordinator.events import Acknowledged, Ended, Event, Progress, Prompt, Started, Tokens
from coordinator.positions import Positions
from coordinator.queue import MAX_PASSED
from coordinator.scheduler import Scheduler
from longleaf.config import EngineConfig
from longleaf.errors import AlreadyExists, InvalidArgument, LongleafError, NotFound, ResourceExhausted
from longleaf.sampling import Sampling
from longleaf.step import Decode, Prefill, Rotary, Seen, StepPlan, StepResult, Windows
from tests.window_ledger import WindowLedger
from workers.fakes import Ledger, echo_token


class Bench:
    """A scheduler whose plans are executed by arithmetic, with the laws checked after each step."""

    def __init__(
        self,
        *,
        blocks: tuple[int, ...] = (64, 64),
        max_positions: int = 2000,
        windows: Windows | None = None,
        **changes: object,
    ) -> None:
        settings: dict[str, object] = {"model": "none", "chunk_size": 32, "block_size": 4, "replicate_below": 8}
        self.config = EngineConfig(**(settings | changes))  # type: ignore[arg-type]
        self.placer = Placer(blocks, self.config.block_size, windows)
        self.scheduler = Scheduler(self.config, self.placer, Positions(Rotary(), max_positions), epoch=1)
        self.ledger = Ledger(self.config.block_size)
        self.window_ledger = WindowLedger(windows, self.config.block_size) if windows else None
        self.seen: dict[int, list[Event | Acknowledged | LongleafError]] = {}
        self.num_jobs = 0
        self.seconds_per_token = 1e-6

    def ask(
        self, count: int, max_tokens: int = 4, context: str | None = None, ends: tuple[int, ...] = (), priority: int = 0
    ) -> int:
        prompt = Prompt(
            context=context,
            token_ids=tuple(range(count)),
            sampling=Sampling(max_tokens=max_tokens),
            end_tokens=frozenset(ends),
            priority=priority,
        )
        return self._admitted(lambda job: self.scheduler.admit(job, prompt))

    def ingest(self, context: str, count: int, append: bool = False) -> int:
        tokens = list(range(count))
        return self._admitted(lambda job: self.scheduler.admit_ingest(job, context, tokens, append=append))

    def _admitted(self, admit) -> int:  # type: ignore[no-untyped-def]
        try:
            admit(self.num_jobs)
        finally:
            self.scheduler.check()
        self.num_jobs += 1
        return self.num_jobs - 1

    def schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        self._see(self.scheduler.drain())
        self.scheduler.check()
        return plan

    def commit(self, plan: StepPlan) -> None:
        self._see(self.scheduler.commit(plan, self._result(plan), now=9.0))
        self.scheduler.check()

    def _result(self, plan: StepPlan) -> StepResult:
        if self.window_ledger:
            self.window_ledger.apply(plan)
        seconds = plan.num_tokens * self.seconds_per_token
        return StepResult(plan.epoch, plan.step, self.ledger.apply(plan), seconds=seconds)

    def _see(self, outcomes: list[tuple[int, Event | Acknowledged | LongleafError]]) -> None:
        for job, outcome in outcomes:
            self.seen.setdefault(job, []).append(outcome)

    def run(self) -> list[StepPlan]:
        plans: list[StepPlan] = []
        while (plan := self.schedule()) is not None:
            self.commit(plan)
            plans.append(plan)
        return plans

    @staticmethod
    def alone(count: int, max_tokens: int) -> list[int]:
        """The answer to a prompt of `count` tokens."""
        answer = [count - 1]
        for index in range(max_tokens):
            answer.append(echo_token(answer[-1], index))
        return answer[1:]

    def tokens(self, job: int) -> list[int]:
        return [t for event in self.seen[job] if isinstance(event, Tokens) for t in event.token_ids]


def kinds(plans: list[StepPlan]) -> str:
    return "".join("P" if isinstance(plan.work, Prefill) else "D" for plan in plans)


def test_long_prompt_is_read_in_chunks_and_its_last_token_is_a_row() -> None:
    bench = Bench()
    job = bench.ask(70, max_tokens=3)
    plans = bench.run()
    assert kinds(plans) == "PPPDDD"
    chunks = [plan.work for plan in plans if isinstance(plan.work, Prefill)]
    assert [(c.start, len(c.token_ids)) for c in chunks] == [(0, 32), (32, 32), (64, 5)]
    rows = [plan.work.rows[0] for plan in plans if isinstance(plan.work, Decode)]
    assert [(row.start, row.token_ids, row.token_index) for row in rows] == [(69, (69,), 0), (70, (), 1), (71, (), 2)]
    expected = [69]
    for index in range(3):
        expected.append(echo_token(expected[-1], index))
    assert bench.tokens(job) == expected[1:]
    assert bench.seen[job][0] == Started(70, 0)
    assert bench.seen[job][1:4] == [Progress(32, 70), Progress(64, 70), Progress(69, 70)]
    assert bench.seen[job][-1] == Ended("length", 70, 0, 3, 0.0, 0.0, 0.0)
    assert sum(bench.scheduler.segments.tokens_by_rank()) == 0
    assert bench.scheduler.segments.make_room(bench.placer.num_blocks)
    assert bench.placer.num_free == bench.placer.num_blocks


@pytest.mark.parametrize(("count", "expected"), [(1, "D"), (7, "D"), (8, "PD"), (33, "PD"), (34, "PPD")])
def test_short_prompt_is_one_row(count: int, expected: str) -> None:
    bench = Bench()
    bench.ask(count, max_tokens=1)
    assert kinds(bench.run()) == expected


def test_steps_alternate_and_prompts_take_turns() -> None:
    bench = Bench()
    bench.ingest("doc", 40)  # to measure how long chunks take
    bench.run()
    bench.scheduler.delete_context("doc")
    bench.ask(4, max_tokens=6)
    bench.ask(65, max_tokens=1)
    bench.ask(97, max_tokens=1)
    plans = bench.run()
    assert kinds(plans)[:9] == "DPDPDPDPD"
    lasts = [plan.work.path[-1] for plan in plans if isinstance(plan.work, Prefill)]
    first, second = dict.fromkeys(lasts)
    assert lasts == [first, second, first, second, second]


def test_the_next_plan_is_there_before_the_answer() -> None:
    bench = Bench()
    job = bench.ask(4, max_tokens=4)
    first, second = bench.schedule(), bench.schedule()
    assert first is not None and second is not None
    assert bench.schedule() is None, "two plans are under way"
    row = second.work.rows[0]  # type: ignore[union-attr]
    assert (row.token_ids, row.start, row.token_index) == ((), 4, 1)
    bench.commit(first)
    (segment,) = bench.scheduler.segments
    assert list(segment.token_ids) == [0, 1, 2, 3, bench.tokens(job)[0]]
    bench.commit(second)
    bench.run()
    assert bench.tokens(job) == bench.alone(4, 4)


def test_what_was_asked_for_after_the_end_is_dropped() -> None:
    bench = Bench(blocks=(3,))
    end = echo_token(3, 0)
    job, waiting = bench.ask(4, max_tokens=5, ends=(end,)), bench.ask(8, max_tokens=1)
    first, surplus = bench.schedule(), bench.schedule()
    assert first is not None and surplus is not None
    bench.commit(first)
    assert bench.tokens(job) == [end]
    later = bench.schedule()  # takes the blocks that the surplus still writes to
    assert later is not None
    assert later.release_segments == (first.work.rows[0].path[-1],)  # type: ignore[union-attr]
    bench.commit(surplus)
    assert bench.tokens(job) == [end]
    bench.commit(later)
    bench.run()
    assert len(bench.tokens(waiting)) == 1


def test_only_one_chunk_is_under_way() -> None:
    bench = Bench()
    job = bench.ingest("doc", 100)
    plan = bench.schedule()
    assert plan is not None
    assert bench.schedule() is None
    assert bench.scheduler.cancel(job)
    assert bench.schedule() is None
    bench.commit(plan)
    assert bench.schedule() is None


def test_end_token_ends_and_is_reported() -> None:
    bench = Bench()
    second = echo_token(echo_token(3, 0), 1)
    job = bench.ask(4, max_tokens=10, ends=(second,))
    bench.run()
    assert bench.tokens(job)[-1] == second
    assert bench.seen[job][-1] == Ended("end_token", 4, 0, 2, 0.0, 0.0, 0.0)


def test_rows_are_batched_up_to_the_limit() -> None:
    bench = Bench(max_sequences=3)
    for _ in range(5):
        bench.ask(4, max_tokens=3)
    widths = [len(plan.work.rows) for plan in bench.run() if isinstance(plan.work, Decode)]
    assert widths == [3, 3, 3, 2, 2, 2]


def test_question_about_a_context_attends_to_its_path() -> None:
    bench = Bench()
    ingest = bench.ingest("doc", 40)
    bench.run()
    assert bench.seen[ingest] == [Progress(32, 40), Progress(40, 40), Acknowledged("doc")]
    more = bench.ingest("doc", 10, append=True)
    bench.run()
    assert bench.seen[more][-1] == Acknowledged("doc")
    job = bench.ask(5, max_tokens=2, context="doc")
    plan = bench.run()[0]
    assert isinstance(plan.work, Decode)
    row = plan.work.rows[0]
    assert (len(row.path), row.start, row.num_tokens) == (3, 50, 5)
    assert bench.seen[job][0] == Started(55, 50)
    assert sum(bench.scheduler.segments.tokens_by_rank()) == 50


def test_cancelled_ingest_leaves_the_context_as_it_was() -> None:
    bench = Bench()
    bench.ingest("doc", 40)
    bench.run()
    free = bench.placer.num_free
    job = bench.ingest("doc", 100, append=True)
    plan = bench.schedule()
    assert plan is not None
    assert bench.scheduler.cancel(job)
    bench.scheduler.check()
    bench.commit(plan)
    assert not bench.scheduler.cancel(job)
    assert bench.scheduler.contexts.get("doc").num_tokens == 40
    assert bench.placer.num_free == free
    bench.ask(1, max_tokens=1)
    assert bench.run()[0].release_segments == (plan.work.path[-1],)  # type: ignore[union-attr]


def test_deleted_context_lives_under_its_sequences() -> None:
    bench = Bench()
    bench.ingest("doc", 40)
    bench.run()
    job = bench.ask(4, max_tokens=3, context="doc")
    plan = bench.schedule()
    assert bench.scheduler.delete_context("doc") == []
    with pytest.raises(NotFound):
        bench.ask(4, context="doc")
    assert plan is not None
    bench.commit(plan)
    bench.run()
    assert len(bench.tokens(job)) == 3
    assert bench.placer.num_free == bench.placer.num_blocks


def test_deleting_a_context_cancels_what_is_appended_to_it() -> None:
    bench = Bench()
    bench.ingest("doc", 40)
    bench.run()
    job = bench.ingest("doc", 40, append=True)
    bench.schedule()
    assert bench.scheduler.delete_context("doc") == [job]
    bench.scheduler.check()
    assert bench.placer.num_free == bench.placer.num_blocks


def test_names_are_taken_from_the_start_of_an_ingest() -> None:
    bench = Bench()
    job = bench.ingest("doc", 40)
    with pytest.raises(AlreadyExists):
        bench.ingest("doc", 1)
    with pytest.raises(NotFound):
        bench.ingest("doc", 1, append=True)
    bench.run()
    with pytest.raises(AlreadyExists):
        bench.ingest("doc", 1)
    bench.ingest("doc", 1, append=True)
    with pytest.raises(ResourceExhausted, match="another document") as caught:
        bench.ingest("doc", 1, append=True)
    assert caught.value.retry_seconds
    assert bench.seen[job][-1] == Acknowledged("doc")


@pytest.mark.parametrize(
    ("count", "max_tokens", "context", "field", "words"),
    [
        (0, 1, None, "input", "no tokens"),
        (201, 1, None, "input", "0 tokens of context and 201 of input and 1 to generate make 202.*limit is 200"),
        (150, 60, None, "sampling.max_token_count", "150 of input and 60 to generate make 210.*limit is 200"),
        (150, 1, "doc", "input", "60 tokens of context and 150 of input and 1 to generate make 211"),
        (4, 0, None, "sampling.max_token_count", "between 1 and"),
    ],
)
def test_limits_of_the_model(count: int, max_tokens: int, context: str | None, field: str, words: str) -> None:
    bench = Bench(max_positions=200)
    bench.ingest("doc", 60)
    bench.run()
    with pytest.raises(InvalidArgument, match=words) as caught:
        bench.ask(count, max_tokens, context)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("count", "max_tokens", "field"), [(44, 1, "input"), (20, 30, "sampling.max_token_count"), (20, 20, None)]
)
def test_limits_of_the_pool(count: int, max_tokens: int, field: str | None) -> None:
    bench = Bench(blocks=(5, 5))
    if field is None:
        bench.ask(count, max_tokens)
        bench.run()
        return
    with pytest.raises(InvalidArgument, match="the pool of all ranks holds 40, in blocks of 4") as caught:
        bench.ask(count, max_tokens)
    assert caught.value.field == field


@pytest.mark.parametrize(("count", "words"), [(0, "no tokens"), (41, "pool"), (201, "model's limit is 200")])
def test_limits_of_a_document(count: int, words: str) -> None:
    bench = Bench(blocks=(5, 5), max_positions=200)
    with pytest.raises(InvalidArgument, match=words) as caught:
        bench.ingest("doc", count)
    assert caught.value.field == "text"


def test_what_has_no_room_lets_small_ones_pass() -> None:
    bench = Bench(blocks=(5, 5))
    first, second, third = bench.ask(20, 10), bench.ask(20, 10), bench.ask(1, 1)
    plan = bench.schedule()
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (2, 1)
    assert plan is not None
    bench.commit(plan)
    bench.run()
    assert [len(bench.tokens(job)) for job in (first, second, third)] == [10, 10, 1]
    assert list(bench.seen) == [first, third, second]


def test_a_large_job_is_not_passed_for_ever() -> None:
    bench = Bench(blocks=(5, 5), max_waiting=100)
    small = [bench.ask(1, 2 + i % 7) for i in range(4)]
    bench.schedule()
    large = bench.ask(20, 20)
    small += [bench.ask(1, 2 + i % 7) for i in range(3 * MAX_PASSED)]
    plan = bench.scheduler._planner._flights._flights[0][0]
    bench.commit(plan)
    bench.run()
    began = list(bench.seen)
    assert began.index(large) == 4 + MAX_PASSED
    assert all(bench.tokens(job) for job in small)


def test_queue_is_bounded() -> None:
    bench = Bench(max_waiting=2, max_sequences=3)
    for _ in range(5):
        bench.ask(4)  # three of them need not wait
    with pytest.raises(ResourceExhausted, match="2 requests wait already") as caught:
        bench.ask(4)
    assert caught.value.retry_seconds


def test_a_document_does_not_take_the_room_of_those_that_wait() -> None:
    bench = Bench(blocks=(5, 5), max_sequences=1)
    bench.ask(4, 2)
    large = bench.ask(20, 10)
    with pytest.raises(ResourceExhausted, match="under way") as caught:
        bench.ingest("doc", 16)  # it might come first, and stay
    assert caught.value.retry_seconds
    bench.run()
    assert len(bench.tokens(large)) == 10
    bench.ingest("doc", 16)
    bench.run()


def test_a_chunk_read_before_a_preemption_is_not_counted_after_it() -> None:
    bench = Bench(max_sequences=1)
    low = bench.ask(70, max_tokens=3)
    chunk = bench.schedule()
    assert chunk is not None
    high = bench.ask(40, max_tokens=1, priority=1)
    assert bench.schedule() is None, "one chunk is under way"
    assert bench.scheduler.cancel(high)
    assert bench.schedule() is None
    bench.commit(chunk)
    bench.run()
    assert bench.tokens(low) == bench.alone(70, 3)
    assert [e.processed for e in bench.seen[low] if isinstance(e, Progress)] == [32, 64, 69]


def test_room_that_contexts_hold_does_not_come_by_waiting() -> None:
    bench = Bench(blocks=(5, 5))
    bench.ingest("doc", 30)
    with pytest.raises(ResourceExhausted, match="the contexts keep 32; delete a context") as caught:
        bench.ask(10, 4)
    assert caught.value.retry_seconds is None
    bench.run()
    with pytest.raises(ResourceExhausted, match="delete a context"):
        bench.ingest("other", 10)
    bench.ask(4, 4, "doc")
    bench.run()


def test_jobs_around_a_deleted_context_all_run() -> None:
    bench = Bench(blocks=(5, 5), max_sequences=1)
    bench.ingest("doc", 20)
    bench.run()
    running = bench.ask(1, 4)
    plan = bench.schedule()
    large = bench.ask(12, 8)
    small = bench.ask(4, 2, "doc")
    bench.scheduler.delete_context("doc")
    with pytest.raises(ResourceExhausted, match="under way") as caught:
        bench.ask(20, 20)  # it might come before the small one, which keeps the document
    assert caught.value.retry_seconds
    assert plan is not None
    bench.commit(plan)
    bench.run()
    larger = bench.ask(20, 20)
    bench.run()
    assert len(bench.tokens(running)) == 4
    assert len(bench.tokens(large)) == 8
    assert len(bench.tokens(small)) == 2
    assert len(bench.tokens(larger)) == 20


def test_a_fork_is_asked_and_appended_to_by_itself() -> None:
    bench = Bench()
    bench.ingest("doc", 40)
    bench.run()
    assert bench.scheduler.fork_context("doc", "fork", 30, now=3.0).num_tokens == 30
    bench.ingest("fork", 5, append=True)
    bench.ingest("doc", 5, append=True)
    bench.run()
    bench.scheduler.delete_context("doc")
    job = bench.ask(4, max_tokens=2, context="fork")
    plan = bench.run()[0]
    assert isinstance(plan.work, Decode)
    assert (len(plan.work.rows[0].path), plan.work.rows[0].start) == (3, 35)
    assert bench.seen[job][0] == Started(39, 35)
    bench.scheduler.delete_context("fork")
    bench.scheduler.check()
    assert bench.placer.num_free == bench.placer.num_blocks


def test_a_fork_takes_no_name_that_an_ingest_has_taken() -> None:
    bench = Bench()
    bench.ingest("doc", 40)
    bench.run()
    bench.ingest("other", 40)
    with pytest.raises(AlreadyExists, match="contexts/other"):
        bench.scheduler.fork_context("doc", "other")
    bench.scheduler.fork_context("doc", "fork")
    with pytest.raises(AlreadyExists, match="contexts/fork"):
        bench.ingest("fork", 1)


@pytest.mark.parametrize(
    ("penalty", "told"),
    [
        ({}, None),
        ({"presence_penalty": 1.0}, Seen((), ())),
        ({"repetition_penalty": 1.5}, Seen(tuple(range(40)), ())),
    ],
)
def test_penalties_are_told_what_was_seen_with_the_first_row(penalty: dict[str, float], told: Seen | None) -> None:
    bench = Bench()
    bench.ingest("book", 40)
    bench.run()
    sampling = Sampling(max_tokens=3, **penalty)  # type: ignore[arg-type]
    prompt = Prompt(context="book", token_ids=(3, 3, 5) * 5, sampling=sampling)
    bench._admitted(lambda job: bench.scheduler.admit(job, prompt))
    rows = [row for plan in bench.run() if isinstance(plan.work, Decode) for row in plan.work.rows]
    assert [row.token_index for row in rows] == [0, 1, 2]
    assert [row.seen for row in rows] == [told, None, None]
