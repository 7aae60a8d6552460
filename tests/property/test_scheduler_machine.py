"""Any order of requests, steps and cancellations keeps the books straight, and all that is admitted ends."""

import math
from collections import deque

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.blocks import Placer
from coordinator.events import Ended, Prompt, Started, Tokens
from coordinator.jobs import Claim
from coordinator.scheduler import Acknowledged, Outcome, Scheduler
from longleaf.config import EngineConfig
from longleaf.errors import AlreadyExists, DeadlineExceeded, InvalidArgument, LongleafError, NotFound, ResourceExhausted
from longleaf.sampling import Sampling
from longleaf.step import StepPlan, StepResult
from workers.fakes import Ledger, echo_token

NAMES = st.sampled_from(["a", "b"])
CLAIMS = st.builds(
    Claim,
    priority=st.integers(0, 3),
    client=st.sampled_from(["", "x", "y"]),
    deadline=st.none() | st.none() | st.none() | st.floats(0, 2),
)


def expected_answer(last: int, count: int) -> list[int]:
    answer: list[int] = []
    for index in range(count):
        last = echo_token(last, index)
        answer.append(last)
    return answer


class SchedulerMachine(RuleBasedStateMachine):
    """Drives a small scheduler; a ledger of what ranks believe is stored checks every plan."""

    @initialize(
        blocks=st.lists(st.integers(4, 24), min_size=1, max_size=4),
        chunk_size=st.integers(1, 20),
        block_size=st.integers(1, 6),
        replicate_below=st.integers(0, 9),
        max_sequences=st.integers(1, 3),
    )
    def begin(self, blocks: list[int], chunk_size: int, block_size: int, replicate_below: int, max_sequences: int):
        config = EngineConfig(
            model="none",
            chunk_size=chunk_size,
            block_size=block_size,
            replicate_below=replicate_below,
            max_sequences=max_sequences,
            max_waiting=4,
        )
        self.seconds = 0.001
        self.deadlines: dict[int, float] = {}
        self.placer = Placer(blocks, block_size)
        self.scheduler = Scheduler(config, self.placer, max_positions=150, epoch=1)
        self.ledger = Ledger(block_size)
        self.plans: deque[StepPlan] = deque()
        self.num_jobs = 0
        self.num_ended = 0
        self.now = 0.0
        self.paused: set[int] = set()
        self.open: set[int] = set()
        self.answers: dict[int, list[int]] = {}
        self.expected: dict[int, list[int]] = {}

    @rule(
        count=st.integers(0, 40),
        max_tokens=st.integers(1, 12),
        context=st.none() | NAMES,
        claim=CLAIMS,
        ends=st.booleans(),
    )
    def ask(self, count: int, max_tokens: int, context: str | None, claim: Claim, ends: bool) -> None:
        answer = expected_answer(count - 1, max_tokens)
        end = answer[max_tokens // 2] if ends else -1
        prompt = Prompt(
            context=context,
            token_ids=tuple(range(count)),
            sampling=Sampling(max_tokens=max_tokens),
            end_tokens=frozenset([end]),
            priority=claim.priority,
            client=claim.client,
            deadline=self._deadline(claim),
        )
        try:
            self.scheduler.admit(self.num_jobs, prompt, self.now)
        except (InvalidArgument, NotFound, ResourceExhausted, DeadlineExceeded):
            return
        self.expected[self.num_jobs] = answer[: answer.index(end) + 1] if ends else answer
        self._opened(prompt.deadline)

    @rule(count=st.integers(0, 40), context=NAMES, append=st.booleans(), claim=CLAIMS)
    def ingest(self, count: int, context: str, append: bool, claim: Claim) -> None:
        claim = Claim(priority=claim.priority, client=claim.client, deadline=self._deadline(claim))
        try:
            self.scheduler.admit_ingest(self.num_jobs, context, range(count), append=append, claim=claim, now=self.now)
        except (AlreadyExists, InvalidArgument, NotFound, ResourceExhausted, DeadlineExceeded):
            return
        self._opened(claim.deadline)

    def _deadline(self, claim: Claim) -> float | None:
        return None if claim.deadline is None else self.now + claim.deadline

    def _opened(self, deadline: float | None) -> None:
        self.deadlines[self.num_jobs] = math.inf if deadline is None else deadline
        self.open.add(self.num_jobs)
        self.answers[self.num_jobs] = []
        self.num_jobs += 1

    @rule(steps=st.integers(1, 12), ahead=st.integers(1, 2), seconds=st.sampled_from([0.0, 0.001, 0.02, 0.5]))
    def run_steps(self, steps: int, ahead: int, seconds: float) -> None:
        """Random single rules would seldom finish a document."""
        self.seconds = seconds
        for _ in range(steps):
            while len(self.plans) < ahead and self._schedule():
                self.adds_up()
            if self.plans:
                self.commit()
            self.adds_up()

    @rule()
    def schedule(self) -> None:
        self._schedule()

    def _schedule(self) -> bool:
        """Whether there was something to do."""
        plan = self.scheduler.schedule(self.now)
        self._see(self.scheduler.drain())
        self.plans.extend([plan] if plan else [])
        # Whoever runs or waits for room has something to do, but for those whose readers are behind.
        assert self.plans or self.open <= self.paused
        return plan is not None

    @precondition(lambda self: self.plans)
    @rule()
    def commit(self) -> None:
        plan = self.plans.popleft()
        self.now += self.seconds
        result = StepResult(plan.epoch, plan.step, self.ledger.apply(plan), self.seconds)
        self._see(self.scheduler.commit(plan, result))

    def _see(self, outcomes: list[Outcome]) -> None:
        for job, outcome in outcomes:
            assert job in self.open, "an outcome after the last one"
            if isinstance(outcome, LongleafError):
                assert isinstance(outcome, DeadlineExceeded)
                assert self.deadlines[job] <= self.now
            if isinstance(outcome, Tokens):
                assert outcome.index == len(self.answers[job])
                self.answers[job] += outcome.token_ids
            if isinstance(outcome, Ended):
                assert self.answers[job] == self.expected[job]
            if isinstance(outcome, Started):
                assert outcome.cached_tokens <= outcome.prompt_tokens
            if isinstance(outcome, Ended | Acknowledged | LongleafError):
                self._closed(job)

    def _closed(self, job: int) -> None:
        self.open.remove(job)
        self.paused.discard(job)
        self.num_ended += 1

    @precondition(lambda self: self.open)
    @rule(data=st.data(), is_paused=st.booleans())
    def pause(self, data: st.DataObject, is_paused: bool) -> None:
        readers = sorted(self.open & self.expected.keys())
        if readers:
            job = data.draw(st.sampled_from(readers))
            self.scheduler.pause(job, is_paused)
            (self.paused.add if is_paused else self.paused.discard)(job)

    @rule(seconds=st.floats(0, 1))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.open)))
        assert self.scheduler.cancel(job)
        assert not self.scheduler.cancel(job)
        self._closed(job)

    @rule(context=NAMES)
    def delete(self, context: str) -> None:
        try:
            cancelled = self.scheduler.delete_context(context)
        except NotFound:
            return
        for job in cancelled:
            self._closed(job)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "scheduler"):
            self._see(self.scheduler.drain())
            self.scheduler.check()
            assert self.placer.num_reserved == 0 or self.open
            waiting, running = self.scheduler.num_waiting, self.scheduler.num_running
            assert waiting + running == len(self.open)
            assert waiting + running + self.num_ended == self.num_jobs
            assert set(self.scheduler.positions()) <= self.open

    def teardown(self) -> None:
        """All that was admitted ends, and without contexts nothing is held."""
        if not hasattr(self, "scheduler"):
            return
        for job in self.paused:
            self.scheduler.pause(job, False)
        self.paused.clear()
        while self.open:
            self.run_steps(1, 2, 0.001)
        for context in self.scheduler.contexts.list():
            self.scheduler.delete_context(context.id)
        self.adds_up()
        assert self.placer.num_free == self.placer.num_blocks


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=250, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
