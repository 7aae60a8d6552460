"""The order of jobs, preemption, and the length of chunks."""

from array import array

import pytest

from coordinator.engine_messages import Admitted, DocumentPrompt, Ended, Prompt, SchedulingParams, Tokens
from coordinator.kv_cache.block_placer import BlockCount, BlockPlacer
from coordinator.kv_cache.positions import UNLIMITED, Positions, RopeSwitch
from coordinator.kv_cache.token_paths import TokenPath
from coordinator.scheduling.fair_queue import AGEING
from coordinator.scheduling.jobs import Job, Request
from coordinator.scheduling.planner import Budget
from coordinator.scheduling.prefill_cursor import PrefillCursor
from coordinator.scheduling.scheduler import Scheduler
from coordinator.scheduling.throughput import UNKNOWN_RETRY_SECONDS, Speeds
from longleaf.config import EngineConfig
from longleaf.errors import DeadlineExceeded, ResourceExhausted
from longleaf.positions import OWN_ROPE, Rotary
from longleaf.rank_protocol.row_delta import RowState
from longleaf.rank_protocol.step import Decode, Prefill, StepPlan, StepResult
from longleaf.sampling import SamplingParams
from tests.support.fakes.echo_model import echo_token
from tests.support.fakes.workers import EchoBlockTable


class Bench:
    """A scheduler on ranks that take a fixed time per token."""

    def __init__(self, *, blocks: tuple[int, ...] = (64, 64), per_token: float = 0.001, **changes: object) -> None:
        settings: dict[str, object] = {"model": "none", "chunk_size": 32, "block_size": 4, "replicate_below": 8}
        self.config = EngineConfig(**(settings | changes))  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.config, BlockPlacer(blocks, 4), Positions(Rotary(), 2000), epoch=1)
        self.sequences, self.block_table = RowState(4), EchoBlockTable(4)
        self.per_token = per_token
        self.now = 0.0
        self.began: list[int] = []
        self.seen: dict[int, list[object]] = {}
        self.num_jobs = 0

    def ask(self, count: int, max_tokens: int = 4, first: int = 0, num_samples: int = 1, **scheduling: object) -> int:
        prompt = Prompt(
            context=None,
            token_ids=tuple(range(first, first + count)),
            sampling=SamplingParams(max_tokens=max_tokens),
            num_samples=num_samples,
            scheduling=SchedulingParams(**scheduling),  # type: ignore[arg-type]
        )
        return self.admit(prompt)

    def admit(self, prompt: Prompt) -> int:
        self.scheduler.admit(self.num_jobs, prompt, self.now)
        self.num_jobs += 1
        return self.num_jobs - 1

    def ingest(self, count: int, **scheduling: object) -> None:
        """Submits a document as job 100."""
        params = SchedulingParams(**scheduling)  # type: ignore[arg-type]
        self.scheduler.admit(100, DocumentPrompt(context="doc", token_ids=range(count), scheduling=params))

    def step(self) -> StepPlan | None:
        plan = self.scheduler.schedule(self.now)
        outcomes = self.scheduler.pop_outcomes()
        if plan is not None:
            seconds = plan.num_tokens * self.per_token
            self.now += seconds
            tokens = self.block_table.apply(self.sequences.complete(plan))
            outcomes += self.scheduler.commit(plan, StepResult(1, plan.step, tokens, seconds=seconds))
        for job, outcome in outcomes:
            self.began += [job] if isinstance(outcome, Admitted) else []
            self.seen.setdefault(job, []).append(outcome)
        self.scheduler.audit()
        return plan

    def run(self) -> list[StepPlan]:
        plans: list[StepPlan] = []
        while (plan := self.step()) is not None:
            plans.append(plan)
        return plans

    def tokens(self, job: int) -> list[tuple[int, int]]:
        """Index and id of each token of an answer."""
        return [(e.index, e.token_ids[0]) for e in self.seen[job] if isinstance(e, Tokens)]


def answer(count: int, max_tokens: int) -> list[tuple[int, int]]:
    ids = [count - 1]
    for index in range(max_tokens):
        ids.append(echo_token(ids[-1], index))
    return list(enumerate(ids[1:]))


def test_higher_priority_begins_first() -> None:
    bench = Bench(max_sequences=1)
    first = bench.ask(4, priority=9)
    bench.step()
    jobs = [bench.ask(4, priority=priority) for priority in (0, 2, 1, 2)]
    bench.run()
    assert bench.began == [first, jobs[1], jobs[3], jobs[2], jobs[0]]


def test_clients_take_turns_regardless_of_their_number_of_jobs() -> None:
    bench = Bench(max_sequences=1)
    many = [bench.ask(4, client="many") for _ in range(5)]
    few = [bench.ask(4, client="few") for _ in range(2)]
    bench.run()
    assert bench.began == [many[0], few[0], many[1], few[1], *many[2:]]


def test_clients_are_charged_in_tokens() -> None:
    bench = Bench(max_sequences=1)
    large = [bench.ask(4, max_tokens=40, client="large") for _ in range(2)]
    small = [bench.ask(4, max_tokens=4, client="small") for _ in range(8)]
    bench.run()
    assert bench.began[:2] == [large[0], small[0]]
    assert 4 <= bench.began.index(large[1]) <= 8, "its turn comes when the others had as many tokens, or due to its age"


def test_low_priority_is_not_starved() -> None:
    bench = Bench(max_sequences=1, max_waiting=1000)
    low = bench.ask(4, priority=-100)
    urgent = bench.ask(4, priority=5)
    for _ in range(200):
        bench.ask(4, priority=5)
        bench.step()
    assert urgent in bench.began
    assert bench.began.index(low) <= AGEING
    assert isinstance(bench.seen[low][-1], Ended), "and it was not preempted again"


def test_short_prompt_does_not_wait_for_a_long_one() -> None:
    bench = Bench(blocks=(400,))
    bench.ingest(1500, client="a")
    bench.step()
    short = bench.ask(40, client="b")
    plans = [bench.step() for _ in range(5)]
    assert isinstance(bench.seen[short][-1], Tokens), [type(plan.work) for plan in plans if plan]


def test_preempted_answer_continues_at_its_next_token() -> None:
    bench = Bench(blocks=(10,))
    low = bench.ask(20, max_tokens=20)
    for _ in range(6):
        bench.step()
    reported = len(bench.tokens(low))
    assert reported >= 4
    high = bench.ask(20, max_tokens=10, first=500, priority=1)
    bench.step()
    assert bench.began[-1] == high
    assert bench.scheduler.positions() == {low: Admitted(20, 0, 1)}
    plans = bench.run()
    assert bench.tokens(low) == answer(20, 20)
    assert bench.tokens(high) == answer(520, 10)
    ended = bench.seen[low][-1]
    assert isinstance(ended, Ended)
    assert (ended.prompt_tokens, ended.completion_tokens) == (20, 20)
    again = [plan.work for plan in plans if isinstance(plan.work, Prefill)][-1]
    assert (again.start, len(again.token_ids)) == (0, 20 + reported - 1)
    row = next(p.work.rows[0] for p in plans if isinstance(p.work, Decode) and p.work.rows[0].sequence == low)
    assert row.token_index == reported


def test_recomputed_chunk_is_described_as_prompt_and_answer() -> None:
    bench = Bench(blocks=(10,))
    low = bench.ask(20, max_tokens=20)
    for _ in range(6):
        bench.step()
    reported = len(bench.tokens(low))
    job = bench.scheduler._running[low]
    bench.ask(20, max_tokens=10, first=500, priority=1)
    plans = bench.run()
    again = [plan.work for plan in plans if isinstance(plan.work, Prefill)][-1]
    assert job._tokens_of(again) == f"tokens 0 to {20 + reported - 2} of the prompt and the answer"


def test_retained_tokens_of_a_preempted_answer_are_not_recomputed() -> None:
    bench = Bench(max_sequences=1)
    low = bench.ask(20, max_tokens=20)
    for _ in range(6):
        bench.step()
    bench.ask(20, max_tokens=2, first=500, priority=1)
    plans = bench.run()
    again = next(p.work.rows[0] for p in plans if isinstance(p.work, Decode) and p.work.rows[0].sequence == low)
    assert (again.start, len(again.token_ids), again.token_index) == (19, 6, 5)
    assert bench.tokens(low) == answer(20, 20)
    ended = bench.seen[low][-1]
    assert isinstance(ended, Ended)
    assert ended.cached_tokens == 0


def test_one_of_several_samples_is_preempted() -> None:
    bench = Bench(max_sequences=3)
    job = bench.ask(20, max_tokens=10, num_samples=3)
    bench.num_jobs += 2
    for _ in range(4):
        bench.step()
    high = bench.ask(4, max_tokens=3, priority=1)
    bench.run()
    assert bench.tokens(high) == answer(4, 3)
    for sample in range(3):
        found = [(e.index, e.token_ids[0]) for e in bench.seen[job] if isinstance(e, Tokens) and e.sample == sample]
        assert found == answer(20, 10)
    assert bench.began == [job, high]


def test_youngest_job_of_the_lowest_priority_is_preempted() -> None:
    bench = Bench(max_sequences=3)
    for priority in (0, 0, 1):
        bench.ask(4, max_tokens=50, priority=priority)
    bench.step()
    bench.ask(4, max_tokens=1, priority=2)
    bench.step()
    assert list(bench.scheduler.positions()) == [1]


def test_one_of_several_tenants_may_fill_half_of_the_queue() -> None:
    bench = Bench(max_sequences=1, max_waiting=5)
    for number in range(4):  # one of them begins
        bench.ask(4, first=10 * number, tenant="acme", is_alone=False)
    with pytest.raises(ResourceExhausted, match="tenant acme has 3 waiting requests, its share of 5") as caught:
        bench.ask(4, tenant="acme", is_alone=False)
    assert caught.value.retry_seconds
    for number in range(2):
        bench.ask(4, first=100 * number, tenant="bolt", is_alone=False)
    for tenant in ("acme", "bolt"):
        with pytest.raises(ResourceExhausted, match="5 requests are waiting"):
            bench.ask(4, tenant=tenant, is_alone=False)
    bench.run()
    for number in range(6):
        bench.ask(4, first=10 * number, tenant="acme")


def test_queue_position_counts_jobs_of_the_tenant() -> None:
    bench = Bench(max_sequences=1)
    bench.ask(4, max_tokens=20)
    bench.step()
    acme = [bench.ask(4, tenant="acme") for _ in range(3)]
    bolt = [bench.ask(4, tenant="bolt") for _ in range(2)]
    places = {job: admitted.queue_position for job, admitted in bench.scheduler.positions().items()}
    assert places == dict(zip((*acme, *bolt), (1, 2, 3, 1, 2), strict=True))


def test_priority_does_not_preempt_other_tenants() -> None:
    bench = Bench(max_sequences=2)
    low = bench.ask(4, max_tokens=20, tenant="acme", priority=-1)
    bench.ask(4, max_tokens=20, tenant="bolt", priority=-2)
    bench.step()
    high = bench.ask(4, max_tokens=20, tenant="bolt", priority=100)
    urgent = bench.ask(4, max_tokens=20, tenant="core", priority=100)
    bench.step()
    assert set(bench.scheduler.positions()) == {1, urgent}, "only a job of the same tenant is preempted"
    bench.run()
    assert bench.scheduler.num_preempted == 1
    assert [len(bench.tokens(job)) for job in (low, 1, high, urgent)] == [20] * 4


def test_deadline_ignores_priorities_of_other_tenants() -> None:
    bench = Bench(max_sequences=1)
    for number in range(3):
        bench.ask(4, max_tokens=100, first=10 * number)
    bench.run()  # a request takes a tenth of a second
    for number in range(4):
        bench.ask(4, max_tokens=100, first=10 * number, tenant="acme", priority=9)
    bench.ask(4, tenant="bolt", max_tokens=1, deadline=bench.now + 0.2)
    with pytest.raises(DeadlineExceeded):
        bench.ask(4, tenant="acme", max_tokens=1, deadline=bench.now + 0.2)


def test_equal_priority_preempts_only_a_slow_reader() -> None:
    bench = Bench(max_sequences=1)
    slow = bench.ask(4, max_tokens=10)
    bench.step()
    other = bench.ask(4, max_tokens=3)
    bench.step()
    assert list(bench.scheduler.positions()) == [other]
    bench.scheduler.pause(slow, True)
    bench.run()
    assert bench.tokens(other) == answer(4, 3)
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (0, 1)
    bench.scheduler.pause(slow, False)
    bench.run()
    assert bench.tokens(slow) == answer(4, 10)


def test_unread_jobs_do_not_fill_the_queue() -> None:
    bench = Bench(max_sequences=1, max_waiting=3)
    for number in range(4):
        unread = bench.ask(4, max_tokens=10, first=10 * number)
        bench.step()
        bench.scheduler.pause(unread, True)
    assert (bench.scheduler.num_waiting, bench.scheduler.num_running, bench.scheduler.num_unread) == (3, 1, 4)
    reading = [bench.ask(4, max_tokens=3, first=100 * number) for number in range(1, 4)]
    bench.run()
    assert [bench.tokens(job) for job in reading] == [answer(100 * number + 4, 3) for number in range(1, 4)]
    for number in range(4):
        bench.scheduler.pause(number, False)
    bench.run()
    assert [bench.tokens(job) for job in range(4)] == [answer(10 * number + 4, 10) for number in range(4)]


def test_unread_jobs_do_not_prevent_deadlines() -> None:
    bench = Bench(max_sequences=1, max_waiting=3)
    for number in range(3):
        bench.ask(4, max_tokens=100, first=10 * number)
    bench.run()  # a request takes a tenth of a second
    for number in range(4, 8):
        bench.scheduler.pause(bench.ask(4, max_tokens=100, first=10 * number), True)
    bench.ask(4, max_tokens=1, first=500, deadline=bench.now + 0.01)


def test_excess_unread_jobs_end_the_oldest_of_the_largest_client() -> None:
    bench = Bench(max_sequences=1, max_waiting=2)
    jobs = [bench.ask(4, max_tokens=10, first=10 * n, client=client) for n, client in enumerate(("few", "many"))]
    jobs.append(bench.ask(4, max_tokens=10, first=20, client="many"))
    for job in jobs:
        bench.scheduler.pause(job, True)
    jobs.append(bench.ask(4, max_tokens=10, first=30, client="other"))
    bench.scheduler.pause(jobs[3], True)
    bench.run()
    assert isinstance(bench.seen[jobs[1]][-1], ResourceExhausted)
    bench.scheduler.audit()
    for job in (jobs[0], jobs[2], jobs[3]):
        bench.scheduler.pause(job, False)
    bench.run()
    assert [len(bench.tokens(job)) for job in (jobs[0], jobs[2], jobs[3])] == [10, 10, 10]


def test_passed_deadline_ends_a_job_in_any_state() -> None:
    bench = Bench(max_sequences=1)
    reading = bench.ask(200, deadline=0.05)
    waiting = bench.ask(4, deadline=0.06)
    bench.ingest(200, deadline=0.07)
    bench.now = 0.1
    bench.run()
    for job in (reading, waiting, 100):
        assert isinstance(bench.seen[job][-1], DeadlineExceeded)
    assert bench.scheduler.next_deadline is None
    assert bench.scheduler.num_waiting == bench.scheduler.num_running == 0


def test_deadline_that_cannot_be_met_is_refused() -> None:
    bench = Bench()
    bench.ask(100, max_tokens=10)
    bench.run()
    with pytest.raises(DeadlineExceeded, match=r"50 ms are left, and at least 1\d\d ms are"):
        bench.ask(100, first=500, deadline=bench.now + 0.05)
    bench.ask(100, deadline=bench.now + 0.05)  # cached tokens need not be read
    with pytest.raises(DeadlineExceeded):
        bench.ask(4, deadline=bench.now)
    with pytest.raises(DeadlineExceeded):
        bench.ask(4, max_tokens=500, deadline=bench.now + 0.2)
    scheduling, sampling = SchedulingParams(deadline=bench.now + 0.2), SamplingParams(max_tokens=500)
    bench.admit(
        Prompt(context=None, token_ids=range(4), sampling=sampling, end_tokens=frozenset([1]), scheduling=scheduling)
    )
    bench.ask(100, deadline=bench.now + 0.5)
    bench.scheduler.audit()


def test_deadline_of_a_resumable_job_only_decides_its_admission() -> None:
    bench = Bench()
    job = bench.ask(100, max_tokens=10, deadline=0.05, is_resumable=True)
    assert bench.scheduler.next_deadline is None
    bench.now = 0.1
    bench.run()
    assert isinstance(bench.seen[job][-1], Ended)
    with pytest.raises(DeadlineExceeded):
        bench.ask(100, first=500, deadline=bench.now + 0.05, is_resumable=True)


def test_retryable_refusal_gives_a_delay() -> None:
    bench = Bench(max_sequences=1, max_waiting=4)

    def refused() -> float | None:
        for _ in range(5):
            bench.ask(4, max_tokens=500)
            bench.step()
        with pytest.raises(ResourceExhausted) as caught:
            bench.ask(4)
        return caught.value.retry_seconds

    assert refused() == UNKNOWN_RETRY_SECONDS
    bench.run()
    assert refused() == pytest.approx(1.0, rel=0.05)  # each takes half a second, and two of four are to begin


@pytest.mark.parametrize(
    ("per_token", "step", "expected"),
    [(None, 0.01, 256), (0.0001, 0.02, 768), (0.00001, 0.02, 4096), (0.001, 0.09, 256), (0.0001, 0.4, 768)],
)
def test_chunks_beside_streams_meet_the_latency_target(per_token: float | None, step: float, expected: int) -> None:
    speeds = Speeds()
    budget = Budget(EngineConfig(model="none", target_itl_ms=100.0), 2, speeds)
    request = Request(0, SchedulingParams(), TokenPath(), RopeSwitch(OWN_ROPE, OWN_ROPE), UNLIMITED)
    job = Job(request, 0, PrefillCursor(TokenPath(), array("I", range(9999)), 9999), BlockCount())
    if per_token:
        speeds.prefill_token.add(per_token * 500, 500)
    speeds.decode_step.add(step, 1)
    assert budget.chunk_size(job, is_alone=False) == expected
    assert budget.chunk_size(job, is_alone=True) == 4096


def test_chunk_length_follows_measured_times() -> None:
    bench = Bench(blocks=(400,), target_itl_ms=10.0, per_token=0.0005, chunk_size=400)
    stream = bench.ask(4, max_tokens=40)
    bench.step()
    bench.ingest(1200)
    chunks = [len(plan.work.token_ids) for plan in bench.run() if isinstance(plan.work, Prefill)]
    assert chunks[0] == 4, "nothing is known yet"
    assert set(chunks[1:30]) == {16}, "a multiple of blocks that takes less than the target, with a decode step"
    assert chunks[-2] == 400, "when no job decodes any more"
    assert bench.tokens(stream) == answer(4, 40)
