"""Any order of requests, steps and cancellations keeps the books straight, and all that is admitted ends."""

from collections import deque

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.blocks import Placer
from coordinator.events import Ended, Prompt, Started, Tokens
from coordinator.scheduler import Acknowledged, Outcome, Scheduler
from longleaf.config import EngineConfig
from longleaf.errors import AlreadyExists, InvalidArgument, LongleafError, NotFound, ResourceExhausted
from longleaf.sampling import Sampling
from longleaf.step import StepPlan, StepResult
from workers.fakes import Ledger, echo_token

NAMES = st.sampled_from(["a", "b"])


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
        self.placer = Placer(blocks, block_size)
        self.scheduler = Scheduler(config, self.placer, max_positions=150, epoch=1)
        self.ledger = Ledger(block_size)
        self.plans: deque[StepPlan] = deque()
        self.num_jobs = 0
        self.open: set[int] = set()
        self.answers: dict[int, list[int]] = {}
        self.expected: dict[int, list[int]] = {}

    @rule(count=st.integers(0, 40), max_tokens=st.integers(1, 12), context=st.none() | NAMES)
    def ask(self, count: int, max_tokens: int, context: str | None) -> None:
        tokens = tuple(range(count))
        prompt = Prompt(context=context, token_ids=tokens, sampling=Sampling(max_tokens=max_tokens))
        try:
            self.scheduler.admit(self.num_jobs, prompt)
        except (InvalidArgument, NotFound, ResourceExhausted):
            return
        self.expected[self.num_jobs] = expected_answer(count - 1, max_tokens)
        self._opened()

    @rule(count=st.integers(0, 40), context=NAMES, append=st.booleans())
    def ingest(self, count: int, context: str, append: bool) -> None:
        try:
            self.scheduler.admit_ingest(self.num_jobs, context, range(count), append=append)
        except (AlreadyExists, InvalidArgument, NotFound, ResourceExhausted):
            return
        self._opened()

    def _opened(self) -> None:
        self.open.add(self.num_jobs)
        self.answers[self.num_jobs] = []
        self.num_jobs += 1

    @rule(steps=st.integers(1, 12), ahead=st.integers(1, 2))
    def run_steps(self, steps: int, ahead: int) -> None:
        """Random single rules would seldom finish a document."""
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
        plan = self.scheduler.schedule()
        self._see(self.scheduler.drain())
        self.plans.extend([plan] if plan else [])
        assert self.plans or not self.open
        return plan is not None

    @precondition(lambda self: self.plans)
    @rule()
    def commit(self) -> None:
        plan = self.plans.popleft()
        result = StepResult(plan.epoch, plan.step, self.ledger.apply(plan))
        self._see(self.scheduler.commit(plan, result))

    def _see(self, outcomes: list[Outcome]) -> None:
        for job, outcome in outcomes:
            assert job in self.open, "an outcome after the last one"
            assert not isinstance(outcome, LongleafError)
            if isinstance(outcome, Tokens):
                assert outcome.index == len(self.answers[job])
                self.answers[job] += outcome.token_ids
            if isinstance(outcome, Ended):
                assert self.answers[job] == self.expected[job]
            if isinstance(outcome, Started):
                assert outcome.cached_tokens <= outcome.prompt_tokens
            if isinstance(outcome, Ended | Acknowledged):
                self.open.remove(job)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.open)))
        assert self.scheduler.cancel(job)
        assert not self.scheduler.cancel(job)
        self.open.remove(job)

    @rule(context=NAMES)
    def delete(self, context: str) -> None:
        try:
            cancelled = self.scheduler.delete_context(context)
        except NotFound:
            return
        self.open -= set(cancelled)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()
            assert self.placer.num_reserved == 0 or self.open
            assert len(self.open) == self.scheduler.num_waiting + self.scheduler.num_running

    def teardown(self) -> None:
        """All that was admitted ends, and without contexts nothing is held."""
        if not hasattr(self, "scheduler"):
            return
        while self.open:
            self.run_steps(1, 2)
        for context in self.scheduler.contexts.list():
            self.scheduler.delete_context(context.id)
        self.adds_up()
        assert self.placer.num_free == self.placer.num_blocks


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=250, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
