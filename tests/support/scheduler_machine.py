"""A machine that drives a small scheduler by any order of requests, steps and cancellations."""

import math
from collections import deque
from collections.abc import Callable, Iterable
from copy import copy
from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from coordinator.engine_messages import (
    Acknowledged,
    Admitted,
    ContinuationPoint,
    DocumentPrompt,
    Ended,
    Failed,
    Outcome,
    Prompt,
    SchedulingParams,
    SpanLayout,
    Tokens,
)
from coordinator.kv_cache.block_placer import BlockCount, BlockPlacer
from coordinator.kv_cache.contexts import LAST_ENDS
from coordinator.kv_cache.positions import Positions
from coordinator.kv_cache.token_paths import TokenPath
from coordinator.scheduling.jobs import Job
from coordinator.scheduling.scheduler import Scheduler
from coordinator.scheduling.speculation_stats import DraftCounts
from longleaf.config import EngineConfig
from longleaf.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InvalidArgument,
    LongleafError,
    NotFinite,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from longleaf.positions import Rotary, WindowSpec
from longleaf.rank_protocol.row_delta import RowState
from longleaf.rank_protocol.step import Decode, Prefill, StepPlan, StepResult
from longleaf.sampling import SamplingParams, Token
from tests.support.fakes.echo_model import drafted_ends, echo_token
from tests.support.fakes.workers import EchoBlockTable
from tests.support.random_drafter import RandomDrafter
from tests.support.shadow_window_cache import ShadowWindowCache, windows_of

MOST_STEPS = 2000
"""The maximum number of steps until any job ends."""
NAMES = st.sampled_from(["a", "b", "c"])
CONTEXTS = st.sampled_from([None, None, None, "a", "b", "c"])
SAMPLES = st.sampled_from([1, 1, 1, 2, 3])
SCHEDULING_PARAMS = st.builds(
    SchedulingParams,
    priority=st.integers(0, 3),
    tenant=st.sampled_from(["default", "default", "acme"]),
    client=st.sampled_from(["", "x", "y"]),
    deadline=st.none() | st.none() | st.none() | st.floats(0, 2),
)


@st.composite
def texts(draw: st.DrawFn) -> list[int]:
    """Tokens with shared prefixes: consecutive numbers that may diverge after a position."""
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
    """Drives a small scheduler; a ledger of the ranks' stored keys checks every plan."""

    is_durable = False
    """Contexts are persistent and are evicted when room is needed."""

    @initialize(
        blocks=st.lists(st.integers(4, 24), min_size=1, max_size=4),
        chunk_size=st.integers(1, 20),
        block_size=st.integers(1, 6),
        replicate_below=st.integers(0, 9),
        max_sequences=st.integers(1, 3),
        max_waiting=st.integers(1, 4),
        windows=st.none() | windows_of(4, 40),
        max_drafts=st.integers(0, 4),
        kind=st.sampled_from(RandomDrafter.KINDS),
        scaled_from=st.sampled_from([0, 0, 24]),
    )
    def begin(
        self,
        blocks: list[int],
        chunk_size: int,
        block_size: int,
        replicate_below: int,
        max_sequences: int,
        max_waiting: int,
        windows: WindowSpec | None,
        max_drafts: int,
        kind: str,
        scaled_from: int = 0,
    ) -> None:
        self.rotary = Rotary(kind="longrope", scaled_from=scaled_from)
        config = EngineConfig(
            model="none",
            chunk_size=chunk_size,
            block_size=block_size,
            replicate_below=replicate_below,
            max_sequences=max_sequences,
            max_waiting=max_waiting,
            max_draft_tokens=max_drafts,
        )
        self.config = config
        self.drafter = RandomDrafter(config, kind)
        self.windows = windows
        self.max_unread = config.max_sequences + config.max_waiting
        self.placer = BlockPlacer(blocks, block_size, windows)
        self.scheduler = self._make_scheduler(1)
        self.sequences = RowState(self.placer.window_block_size)
        self._start_ranks(blocks, block_size, windows)
        self.plans: deque[StepPlan] = deque()
        self.now = 0.0
        self.seconds = 0.001
        self.breaks: int | None = None
        """The row of the next step result that is not finite."""
        self.num_jobs = 0
        self.num_submitted = 0
        self.num_ended = 0
        self.paused: set[int] = set()
        self.deadlines: dict[int, float] = {}
        self.open: dict[int, set[int]] = {}
        """Samples that have not ended, by job; an ingest has one."""
        self.texts: dict[str, list[int]] = {}
        self.ends: dict[str, list[int]] = {}
        """Where the last documents of each context ended, and where it was forked."""
        self.documents: dict[int, list[int]] = {}
        """The tokens of each ingest."""
        self.prompts: dict[int, list[int]] = {}
        """The tokens of each sequence's prompt, including its context."""
        self.answers: dict[int, list[int]] = {}
        self.turns: list[tuple[str | None, list[int]]] = []
        """The context of each question, and its tokens with those of its answer."""
        self.expected: dict[int, list[int]] = {}
        self.ran: set[int] = set()
        """Jobs that ran when the last step was scheduled, and those that waited, with how often they had begun."""
        self.waited: dict[int, int] = {}

    def _make_scheduler(self, epoch: int, **options: Any) -> Scheduler:
        positions = Positions(self.rotary, 150)
        return Scheduler(
            self.config, self.placer, positions, epoch, is_durable=self.is_durable, drafter=self.drafter, **options
        )

    # --- the ranks ---

    def _start_ranks(self, blocks: list[int], block_size: int, windows: WindowSpec | None) -> None:
        self.block_table = EchoBlockTable(block_size)
        self.shadow_window_cache = ShadowWindowCache(windows, block_size) if windows else None

    def _execute(self, plan: StepPlan) -> dict[int, tuple[Token, ...]]:
        """The ranks' answer to a complete plan."""
        if self.shadow_window_cache:
            self.shadow_window_cache.apply(plan)
        tokens = self.block_table.apply(plan)
        for row, end in drafted_ends(plan, tokens):
            if self.shadow_window_cache:
                self.shadow_window_cache.cut_back(row.path[-1], end)
        return tokens

    def _check_ropes(self, plan: StepPlan) -> None:
        """Sequences longer than the first scaling's range use the second scaling, and only those. Probes use the
        scaling of their context."""
        if not (border := self.rotary.scaled_from) or not isinstance(plan.work, Decode):
            return
        for row in plan.work.rows:
            is_probe = not self.expected[row.sequence]
            assert is_probe or (row.rope.scaled_for > 0) == (row.start + row.num_tokens > border)

    def _token_ids(self, path: tuple[int, ...]) -> list[int]:
        """The tokens whose keys lie on a path."""
        return self.block_table.token_ids(path)

    def _check_end(self, path: TokenPath) -> None:
        """Checks that a path can be continued: the tokens within its windows are in their slots after any eviction."""
        if self.shadow_window_cache:
            self.shadow_window_cache.check_place(path.ids, path.end)

    @property
    def is_disturbed(self) -> bool:
        """Jobs may wait for other things than room, and room may be held without a request."""
        return False

    # --- client operations ---

    @rule(
        tokens=TEXTS,
        max_tokens=st.integers(1, 12),
        context=CONTEXTS,
        num_samples=SAMPLES,
        scheduling=SCHEDULING_PARAMS,
        ends=st.booleans(),
        previous=st.none() | st.integers(0, 99),
    )
    def ask(
        self,
        tokens: list[int],
        max_tokens: int,
        context: str | None,
        num_samples: int,
        scheduling: SchedulingParams,
        ends: bool,
        previous: int | None = None,
    ) -> None:
        """Asks a question: the first one of a conversation, or one after the `previous` one and its answer."""
        if previous is not None and self.turns:
            context, turn = self.turns[previous % len(self.turns)]
            tokens = [*turn, *tokens]
        scheduling = self._now(scheduling)
        answer = expected_answer(tokens[-1] if tokens else 0, max_tokens)
        end = answer[max_tokens // 2] if ends else -1
        prompt = Prompt(
            context=context,
            token_ids=tuple(tokens),
            sampling=SamplingParams(max_tokens=max_tokens),
            end_tokens=frozenset([end]),
            num_samples=num_samples,
            scheduling=scheduling,
            max_draft_tokens=max_tokens % 5,
        )
        try:
            self.scheduler.admit(self.num_jobs, prompt, self.now)
        except (InvalidArgument, NotFound, ResourceExhausted, DeadlineExceeded, Unavailable):
            return
        for sequence in range(self.num_jobs, self.num_jobs + num_samples):
            self.prompts[sequence] = [*(self.texts[context] if context else []), *tokens]
            self.expected[sequence] = answer[: answer.index(end) + 1] if ends else answer
            self.answers[sequence] = []
        self.turns.append((context, [*tokens, *self.expected[self.num_jobs]]))
        self._opened(num_samples, scheduling.deadline)

    @rule(
        tokens=TEXTS,
        max_tokens=st.integers(1, 12),
        context=CONTEXTS,
        counts=st.lists(st.none() | st.integers(0, 11), min_size=1, max_size=3),
        scheduling=SCHEDULING_PARAMS,
    )
    def resume(
        self,
        tokens: list[int],
        max_tokens: int,
        context: str | None,
        counts: list[int | None],
        scheduling: SchedulingParams,
    ) -> None:
        """The number of tokens that each sample has already reported; None: all of them."""
        scheduling = self._now(scheduling)
        answer = expected_answer(tokens[-1] if tokens else 0, max_tokens)
        generated = {i: answer[:count] for i, count in enumerate(counts) if count is not None and count < max_tokens}
        if not generated:
            return
        prompt = Prompt(
            context=context,
            token_ids=tuple(tokens),
            sampling=SamplingParams(max_tokens=max_tokens),
            num_samples=len(counts),
            scheduling=scheduling,
            max_draft_tokens=max_tokens % 5,
            generated=generated,
        )
        try:
            self.scheduler.admit(self.num_jobs, prompt, self.now)
        except (InvalidArgument, NotFound, ResourceExhausted, DeadlineExceeded, Unavailable):
            return
        for sample, ids in generated.items():
            self.prompts[self.num_jobs] = self.prompts[self.num_jobs + sample] = [
                *(self.texts[context] if context else []),
                *tokens,
            ]
            self.expected[self.num_jobs] = self.expected[self.num_jobs + sample] = answer
            self.answers[self.num_jobs + sample] = list(ids)
        self._opened(len(counts), scheduling.deadline, generated)

    @rule(
        tokens=TEXTS,
        context=NAMES,
        num_scored=st.integers(0, 39),
        end=st.none() | st.integers(1, 60),
        hidden=st.lists(st.integers(0, 60), max_size=4, unique=True).map(sorted),
        scheduling=SCHEDULING_PARAMS,
    )
    def probe(
        self,
        tokens: list[int],
        context: str,
        num_scored: int,
        end: int | None,
        hidden: list[int],
        scheduling: SchedulingParams,
    ) -> None:
        """Reads tokens somewhere in a context, and answers nothing."""
        if (named := self.scheduler.contexts.find(context)) is None:
            return
        scheduling, end = self._now(scheduling), min(end or named.path.end, named.path.end)
        ranges = tuple((start, stop) for start, stop in pairwise(hidden) if stop <= end)[::2]
        prompt = Prompt(
            context=context,
            token_ids=tuple(tokens),
            sampling=SamplingParams(max_tokens=1),
            scheduling=scheduling,
            cuts=SpanLayout(1),
            hidden=ranges,
            beginning=ContinuationPoint(named.path.cut(end).ids, end),
            is_probe=True,
            num_scored=min(num_scored, max(0, len(tokens) - 1)),
        )
        try:
            self.scheduler.admit(self.num_jobs, prompt, self.now)
        except (InvalidArgument, NotFound, ResourceExhausted, DeadlineExceeded, Unavailable):
            return
        self.prompts[self.num_jobs] = [*self.texts[context][:end], *tokens]
        self.expected[self.num_jobs], self.answers[self.num_jobs] = [], []
        self._opened(1, scheduling.deadline)

    @rule(tokens=TEXTS, context=NAMES, append=st.booleans(), scheduling=SCHEDULING_PARAMS)
    def ingest(self, tokens: list[int], context: str, append: bool, scheduling: SchedulingParams) -> None:
        scheduling = self._now(scheduling)
        document = DocumentPrompt(context=context, token_ids=tokens, append=append, scheduling=scheduling)
        try:
            self.scheduler.admit(self.num_jobs, document, self.now)
        except (AlreadyExists, InvalidArgument, NotFound, ResourceExhausted, DeadlineExceeded, Unavailable):
            return
        self.documents[self.num_jobs] = tokens
        self._opened(1, scheduling.deadline)

    def _now(self, scheduling: SchedulingParams) -> SchedulingParams:
        """With a deadline that counts from now."""
        return (
            scheduling if scheduling.deadline is None else replace(scheduling, deadline=self.now + scheduling.deadline)
        )

    def _opened(self, num_samples: int, deadline: float | None, samples: Iterable[int] | None = None) -> None:
        """Some of the samples, if they are given, are to come."""
        self.open[self.num_jobs] = set(range(num_samples) if samples is None else samples)
        self.deadlines[self.num_jobs] = math.inf if deadline is None else deadline
        self.num_jobs += num_samples
        self.num_submitted += 1

    @rule(context=NAMES, sizes=st.lists(st.integers(1, 3), min_size=4, max_size=16), scheduling=SCHEDULING_PARAMS)
    def append_little_by_little(self, context: str, sizes: list[int], scheduling: SchedulingParams) -> None:
        """Many pieces, one after the other."""
        for size in sizes:
            self.ingest(list(range(size)), context, context in self.texts, scheduling)
            self._schedule()
            if self.plans:
                self.commit()

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), context=NAMES)
    def fork_at_an_end(self, data: st.DataObject, context: str) -> None:
        source = data.draw(st.sampled_from(sorted(self.texts)))
        self.fork(source, context, data.draw(st.sampled_from(self.ends[source])))

    @rule(source=NAMES, context=NAMES, num_tokens=st.none() | st.integers(0, 60))
    def fork(self, source: str, context: str, num_tokens: int | None) -> None:
        num_free = self.placer.num_free
        try:
            self.scheduler.fork_context(source, context, num_tokens)
        except InvalidArgument:
            assert num_tokens is not None
            assert self.windows or not 1 <= num_tokens <= len(self.texts[source])
            assert num_tokens not in self.ends[source], "the last ends can be forked"
            return
        except Unavailable:
            assert self.windows and num_tokens not in self.ends[source]
            assert self.is_disturbed, "the keys within windows are restored with the others"
            return
        except (AlreadyExists, NotFound):
            return
        self.texts[context] = self.texts[source][:num_tokens]
        self._add_end(context, [end for end in self.ends[source] if end < len(self.texts[context])])
        assert self.placer.num_free == num_free

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
        is_full = self.scheduler._planner.is_full
        plan = self.scheduler.schedule(self.now)
        self._see(self.scheduler.pop_outcomes())
        if not is_full and not self.is_disturbed:
            self._no_job_waits_for_later_ones()
        self.plans.extend([plan] if plan else [])
        self._no_job_is_stuck()
        return plan is not None

    def _no_job_is_stuck(self) -> None:
        """Every job that runs or waits for room has something to do, except those with slow readers."""
        assert self.plans or self.open.keys() <= self.paused

    def _no_job_waits_for_later_ones(self) -> None:
        """A job without room waits for at least one job that did not overtake it."""
        running = {job.id: job for job in self.scheduler._running.values()}
        waiting = self.scheduler._queue.order(lambda job: not job.is_deferred)
        for job in waiting:
            assert any(job.id not in other.passed for other in running.values()) or self._is_kept_out(job)
        stayed = [job for job in waiting if self.waited.get(job.id) == job.num_begins]
        for other in (running[job_id] for job_id in running.keys() - self.ran):
            request = other.request
            if other.id != request.id and other.num_begins == 1:
                continue  # a sample of a prompt that was read: it began with that one
            before = {job.id for job in stayed if job.request.scheduling == request.scheduling and job.id < request.id}
            assert before <= other.passed
        self.ran, self.waited = set(running), {job.id: job.num_begins for job in waiting}

    def _is_kept_out(self, job: Job) -> bool:
        """Whether a waiting job would have no room even if all that overtook it were preempted."""
        del job
        return False

    @rule(row=st.integers(0, 8))
    def spoil(self, row: int) -> None:
        self.breaks = row

    @precondition(lambda self: self.plans)
    @rule()
    def commit(self) -> None:
        plan = self.plans.popleft()
        self.now += self.seconds
        whole = self.sequences.complete(plan)
        tokens = self._execute(whole)
        for row, end in drafted_ends(whole, tokens):
            self.sequences.cut_back(row.sequence, end)
        result = StepResult(plan.epoch, plan.step, tokens, seconds=self.seconds)
        self._check_ropes(whole)
        for row in whole.work.rows if isinstance(whole.work, Decode) else ():
            answer = self.expected[row.sequence]
            read = self.prompts[row.sequence] + answer[: row.token_index]
            if row.token_index <= len(answer):  # or the answer's end was not known when the row was planned
                assert self._token_ids(row.path)[: len(read)] == read
        if self.breaks is not None:
            broken = (
                [row.sequence for row in plan.work.rows][self.breaks :][:1] if isinstance(plan.work, Decode) else []
            )
            result = replace(result, not_finite=tuple(broken), has_finite_keys=not isinstance(plan.work, Prefill))
        self.breaks = None
        counted = copy(self.scheduler.drafts)
        outcomes = self.scheduler.commit(plan, result)
        self._check_drafts(counted, whole, tokens, outcomes)
        self._see(outcomes)
        self.scheduler.learn()

    def _check_drafts(
        self, counted: DraftCounts, plan: StepPlan, tokens: dict[int, tuple[Token, ...]], outcomes: list[Outcome]
    ) -> None:
        """The reported and counted drafts since `counted` match the drafts of the plan and those that the ranks
        accepted."""
        rows = plan.work.rows if isinstance(plan.work, Decode) else ()
        drafted = {row.sequence: len(row.draft_ids) for row in rows}
        for job, outcome in outcomes:
            if isinstance(outcome, Tokens):
                sequence, num_reported = job + outcome.sample, len(outcome.tokens)
                assert outcome.num_drafted == drafted[sequence]
                assert outcome.num_accepted == min(num_reported, len(tokens[sequence]) - 1) <= outcome.num_drafted
                counted.add(outcome.num_drafted, outcome.num_accepted, num_reported)
        assert self.scheduler.drafts == counted

    def _see(self, outcomes: list[Outcome]) -> None:
        for job, outcome in outcomes:
            assert job in self.open, f"an outcome after the last one: {outcome}"
            if isinstance(outcome, LongleafError):
                self._is_right(job, outcome)
                self._closed(job)
            if isinstance(outcome, Tokens):
                assert outcome.index == len(self.answers[job + outcome.sample])
                self.answers[job + outcome.sample] += outcome.token_ids
            if isinstance(outcome, Ended):
                assert self.answers[job + outcome.sample] == self.expected[job + outcome.sample]
                self._ended(job, outcome.sample)
            if isinstance(outcome, Failed):
                answer = self.answers[job + outcome.sample]
                assert answer == self.expected[job + outcome.sample][: len(answer)]
                self._ended(job, outcome.sample)
            if isinstance(outcome, Admitted):
                assert outcome.cached_tokens < outcome.prompt_tokens == len(self.prompts[job])
            if isinstance(outcome, Acknowledged):
                self.texts.setdefault(outcome.context, []).extend(self.documents[job])
                self._add_end(outcome.context, self.ends.get(outcome.context, []))
                self._ended(job, 0)

    def _add_end(self, context: str, ends: list[int]) -> None:
        self.ends[context] = [*ends, len(self.texts[context])][-LAST_ENDS:]

    def _is_right(self, job: int, error: LongleafError) -> None:
        if isinstance(error, DeadlineExceeded):
            assert self.deadlines[job] <= self.now
            return
        if isinstance(error, NotFinite):
            return
        assert isinstance(error, ResourceExhausted)
        assert job in self.paused
        assert len(self.paused) == self.max_unread + 1 or self._is_needed(job, error)

    def _is_needed(self, job: int, error: LongleafError) -> bool:
        """Whether others need the room of a context that would not be evicted otherwise."""
        del job, error
        return False

    def _ended(self, job: int, sample: int) -> None:
        self.open[job].remove(sample)
        if not self.open[job]:
            self._closed(job)

    def _closed(self, job: int) -> None:
        del self.open[job]
        self.paused.discard(job)
        self.num_ended += 1

    @precondition(lambda self: self.open)
    @rule(data=st.data(), is_paused=st.booleans())
    def pause(self, data: st.DataObject, is_paused: bool) -> None:
        if readers := sorted(self.open.keys() & self.expected.keys()):
            self._pause(data.draw(st.sampled_from(readers)), is_paused)

    def _pause(self, job: int, is_paused: bool) -> None:
        self.scheduler.pause(job, is_paused)
        (self.paused.add if is_paused else self.paused.discard)(job)
        self._see(self.scheduler.pop_outcomes())
        self.waited.clear()  # a paused job is not in the queue's order

    @rule(params=st.lists(SCHEDULING_PARAMS, min_size=2, max_size=8))
    def ask_and_not_read(self, params: list[SchedulingParams]) -> None:
        for scheduling in params:
            job = self.num_jobs
            self.ask([0, 1], 3, None, 1, scheduling, False)
            if self.num_jobs > job:
                self._pause(job, True)

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
        del self.texts[context], self.ends[context]
        for job in cancelled:
            self._closed(job)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "scheduler"):
            self._see(self.scheduler.pop_outcomes())
            self.scheduler.audit()
            self._contexts_continue_at_their_ends()
            assert self.placer.num_reserved == BlockCount() or self.open or self.is_disturbed
            waiting, running = self.scheduler.num_waiting, self.scheduler.num_running
            assert waiting + running == len(self.open)
            assert waiting + running + self.num_ended == self.num_submitted
            assert set(self.scheduler.positions()) <= self.open.keys()
            assert self.scheduler.num_unread == len(self.paused) <= self.max_unread

    def _contexts_continue_at_their_ends(self) -> None:
        for context in self.scheduler.contexts.list():
            for end in self.ends[context.id]:
                self._check_end(context.path.cut(end))

    def _run_until(self, is_done: Callable[[], bool]) -> None:
        for _ in range(MOST_STEPS):
            if is_done():
                return
            self.run_steps(1, 2, 0.001)
        raise AssertionError("it never ends")

    def teardown(self) -> None:
        """All that was admitted ends, and without contexts nothing is held."""
        if not hasattr(self, "scheduler"):
            return
        for job in self.paused:
            self.scheduler.pause(job, False)
        self.paused.clear()
        self._run_until(lambda: not self.open)
        for context in self.scheduler.contexts.list():
            self.scheduler.delete_context(context.id)
        while self._schedule() or self.plans:
            self.commit()
        self.adds_up()
        assert self.scheduler.segments.make_room(self.placer.num_blocks)
        assert self.placer.num_free == self.placer.num_blocks
        assert not list(self.scheduler.segments.placements)


def runs(max_examples: int, is_random: bool = False) -> settings:
    """So many schedules, the same in every run or others each time."""
    return settings(
        max_examples=max_examples,
        derandomize=not is_random and settings().derandomize,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
