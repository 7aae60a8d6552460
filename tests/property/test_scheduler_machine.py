"""Any order of requests, steps and cancellations keeps the books straight, and all that is admitted ends."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.blocks import Placer
from coordinator.events import Ended, Prompt, Started, Tokens
from coordinator.scheduler import Acknowledged, Outcome, Scheduler
from longleaf.config import EngineConfig
from longleaf.errors import AlreadyExists, InvalidArgument, LongleafError, NotFound, ResourceExhausted
from longleaf.sampling import Sampling
from longleaf.step import Decode, StepPlan, StepResult
from workers.fakes import Ledger, echo_token

NAMES = st.sampled_from(["a", "b", "c"])
ASKED = st.sampled_from([None, None, None, "a", "b", "c"])
SAMPLES = st.sampled_from([1, 1, 1, 2, 3])


@st.composite
def texts(draw: st.DrawFn) -> list[int]:
    """Tokens that begin like others: they count up, and from some position on may be of another kind."""
    count, kind, same = draw(st.integers(0, 40)), draw(st.integers(0, 2)), draw(st.integers(0, 40))
    return [i if i < same else i + 100 * kind for i in range(count)]


TEXTS = texts()


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
        self.plan: StepPlan | None = None
        self.num_jobs = 0
        self.open: dict[int, set[int]] = {}
        """Samples that have not ended, by job; an ingest has one."""
        self.texts: dict[str, list[int]] = {}
        self.documents: dict[int, list[int]] = {}
        """What is read, by ingest."""
        self.prompts: dict[int, list[int]] = {}
        """What is answered, context included, by sequence."""
        self.answers: dict[int, list[int]] = {}
        self.expected: dict[int, list[int]] = {}

    @rule(tokens=TEXTS, max_tokens=st.integers(1, 12), context=ASKED, num_samples=SAMPLES)
    def ask(self, tokens: list[int], max_tokens: int, context: str | None, num_samples: int) -> None:
        sampling = Sampling(max_tokens=max_tokens)
        prompt = Prompt(context=context, token_ids=tuple(tokens), sampling=sampling, num_samples=num_samples)
        try:
            self.scheduler.admit(self.num_jobs, prompt)
        except (InvalidArgument, NotFound, ResourceExhausted):
            return
        for sequence in range(self.num_jobs, self.num_jobs + num_samples):
            self.prompts[sequence] = [*(self.texts[context] if context else []), *tokens]
            self.expected[sequence] = expected_answer(tokens[-1], max_tokens)
            self.answers[sequence] = []
        self._opened(num_samples)

    @rule(tokens=TEXTS, context=NAMES, append=st.booleans())
    def ingest(self, tokens: list[int], context: str, append: bool) -> None:
        try:
            self.scheduler.admit_ingest(self.num_jobs, context, tokens, append=append)
        except (AlreadyExists, InvalidArgument, NotFound, ResourceExhausted):
            return
        self.documents[self.num_jobs] = tokens
        self._opened(1)

    def _opened(self, num_samples: int) -> None:
        self.open[self.num_jobs] = set(range(num_samples))
        self.num_jobs += num_samples

    @rule(source=NAMES, context=NAMES, num_tokens=st.none() | st.integers(0, 60))
    def fork(self, source: str, context: str, num_tokens: int | None) -> None:
        num_free = self.placer.num_free
        try:
            self.scheduler.fork_context(source, context, num_tokens)
        except (AlreadyExists, InvalidArgument, NotFound):
            return
        self.texts[context] = self.texts[source][:num_tokens]
        assert self.placer.num_free == num_free

    @rule(steps=st.integers(1, 12))
    def run_steps(self, steps: int) -> None:
        """Random single rules would seldom finish a document."""
        for _ in range(2 * steps):
            (self.schedule if self.plan is None else self.commit)()
            self.adds_up()

    @precondition(lambda self: self.plan is None)
    @rule()
    def schedule(self) -> None:
        self.plan = self.scheduler.schedule()
        self._see(self.scheduler.drain())
        assert self.plan is not None or not self.open

    @precondition(lambda self: self.plan is not None)
    @rule()
    def commit(self) -> None:
        assert self.plan is not None
        result = StepResult(self.plan.epoch, self.plan.step, self.ledger.apply(self.plan))
        for row in self.plan.work.rows if isinstance(self.plan.work, Decode) else ():
            read = self.prompts[row.sequence] + self.expected[row.sequence][: row.token_index]
            assert self.ledger.token_ids(row.path) == read
        self._see(self.scheduler.commit(self.plan, result))
        self.plan = None

    def _see(self, outcomes: list[Outcome]) -> None:
        for job, outcome in outcomes:
            assert job in self.open, "an outcome after the last one"
            assert not isinstance(outcome, LongleafError)
            if isinstance(outcome, Tokens):
                assert outcome.index == len(self.answers[job + outcome.sample])
                self.answers[job + outcome.sample] += outcome.token_ids
            if isinstance(outcome, Ended):
                assert self.answers[job + outcome.sample] == self.expected[job + outcome.sample]
                self._ended(job, outcome.sample)
            if isinstance(outcome, Started):
                assert outcome.cached_tokens < outcome.prompt_tokens == len(self.prompts[job])
            if isinstance(outcome, Acknowledged):
                self.texts.setdefault(outcome.context, []).extend(self.documents[job])
                self._ended(job, 0)

    def _ended(self, job: int, sample: int) -> None:
        self.open[job].remove(sample)
        if not self.open[job]:
            del self.open[job]

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.open)))
        assert self.scheduler.cancel(job)
        assert not self.scheduler.cancel(job)
        del self.open[job]

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel_sample(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.open)))
        sample = data.draw(st.integers(0, 3))
        if self.scheduler.cancel_sample(job, sample):
            assert not self.scheduler.cancel_sample(job, sample)
            self._ended(job, sample)

    @rule(context=NAMES)
    def delete(self, context: str) -> None:
        try:
            cancelled = self.scheduler.delete_context(context)
        except NotFound:
            return
        del self.texts[context]
        for job in cancelled:
            del self.open[job]

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
            (self.schedule if self.plan is None else self.commit)()
            self.adds_up()
        for context in self.scheduler.contexts.list():
            self.scheduler.delete_context(context.id)
        self.adds_up()
        assert self.scheduler.segments.make_room(self.placer.num_blocks)
        assert self.placer.num_free == self.placer.num_blocks
        assert not list(self.scheduler.segments)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=400, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
