"""Questions about contexts wait while the oldest waiting job needs the space of these contexts."""

from collections.abc import Callable

import pytest

from coordinator.engine_messages import Admitted, Ended
from coordinator.scheduling.admission import Admission
from coordinator.scheduling.fair_queue import AGEING
from longleaf.errors import DeadlineExceeded, ResourceExhausted, Unavailable
from longleaf.positions import AttentionSpan, WindowSpec
from longleaf.types import ContextSettings, Recovering
from tests.support.ranks_that_change import Group
from tests.support.scheduling import Asker


class Crowd(Asker, Group):
    """A long prompt that has no room beside a context that is queried constantly. One request runs at a time."""

    def __init__(self, num_blocks: int = 15, contexts: tuple[tuple[str, int], ...] = (("doc", 20),), **changes: object):
        settings: dict[str, object] = {"is_durable": True, "max_sequences": 1, "max_waiting": 20}
        super().__init__(num_ranks=1, num_blocks=num_blocks, **(settings | changes))
        for name, count in contexts:
            self.keep(name, count)

    def start(self) -> "Crowd":
        """Starts a short request, for which the long prompt waits."""
        self.ask(1, 2)
        self.step()
        self.long = self.prompt(range(100, 140), 8)
        return self

    def keep(self, context: str, count: int, append: bool = False) -> None:
        document = self.ingest(context, count, append)
        self.run()
        self.acknowledge(document)
        self._see(self.scheduler.pop_outcomes())

    @property
    def deferred(self) -> list[int]:
        return [job.id for job in self.scheduler._queue if job.is_deferred]

    def is_evicted(self, context: str = "doc") -> bool:
        return bool(self.scheduler.segments.placements.evicted(self.scheduler.contexts.get(context).path))

    def begin_turn(self) -> None:
        """Makes the next turn that of the oldest job."""
        turns = self.scheduler._queue.turns
        turns._num_turns += (AGEING - 1 - turns._num_turns) % AGEING

    def defer(self, *questions: str | None) -> list[int]:
        """Asks these contexts until the questions wait for the long prompt."""
        self.begin_turn()
        jobs = [self.ask(2, 3, context) for context in questions or ("doc", "doc")]
        self.scheduler._begin_waiting()
        self._check()
        return jobs

    def check_answers(self, jobs: list[int]) -> None:
        self.run()
        assert [self.tokens(job) for job in jobs] == [self.alone(2, 3)] * len(jobs)
        self.check_free()

    def check_free(self) -> None:
        """Everything is free once the contexts are deleted."""
        assert self.scheduler.num_waiting == self.scheduler.num_running == 0
        for context in self.contexts():
            self.scheduler.delete_context(context)
        self.scheduler.audit()
        assert self.scheduler.segments.make_room(self.placer.num_blocks)


def test_oldest_job_waits_only_for_jobs_that_ran_before_its_turn() -> None:
    crowd = Crowd().start()
    while crowd.long not in crowd.scheduler._running:
        while crowd.scheduler.num_waiting < 4:
            crowd.ask(1, 2, "doc")
        before, is_turn = set(crowd.scheduler._running), crowd.scheduler._queue.turns.is_for_the_oldest
        assert crowd.step()
        if is_turn:
            assert set(crowd.scheduler._running) <= before | {crowd.long}
    began = [job for job, events in crowd.seen.items() if any(isinstance(event, Admitted) for event in events)]
    assert len(began) <= AGEING


def test_deferred_questions_are_answered_after_the_oldest_job() -> None:
    crowd = Crowd().start()
    jobs = crowd.defer()
    assert crowd.deferred == jobs
    assert not crowd.is_evicted(), "until the long prompt has the room of all others"
    while crowd.long not in crowd.scheduler._running:
        assert crowd.step()
    assert not crowd.deferred
    crowd.run()
    assert len(crowd.tokens(crowd.long)) == 8
    for job in jobs:
        assert any(isinstance(event, Recovering) for event in crowd.seen[job])
    crowd.check_answers(jobs)


def test_samples_of_a_deferred_question_are_answered() -> None:
    crowd = Crowd(max_sequences=2)
    crowd.ask(1, 2)
    crowd.start()
    crowd.begin_turn()
    question = crowd.ask(2, 3, "doc", num_samples=2)
    crowd.scheduler._begin_waiting()
    assert crowd.deferred == [question]
    crowd.run()
    assert crowd.answer(question, 0) == crowd.answer(question, 1) == crowd.alone(2, 3)
    crowd.check_free()


def test_context_of_later_questions_is_not_reloaded_meanwhile() -> None:
    crowd = Crowd().start()
    jobs = crowd.defer()
    running = next(iter(crowd.scheduler._running))
    crowd.scheduler.contexts.evict(crowd.scheduler.contexts.get("doc"))
    crowd.scheduler.audit()
    assert crowd.is_evicted()
    for _ in range(3):
        jobs.append(crowd.ask(2, 3, "doc"))
        crowd.scheduler._begin_waiting()
        crowd.scheduler.audit()
        assert (crowd.deferred, crowd.is_evicted()) == (jobs, True)
        assert crowd.scheduler.recovery.total is None
    assert running in crowd.scheduler._running
    crowd.check_answers(jobs)
    assert crowd.scheduler.num_recomputed_tokens == 20


def cancelled(crowd: Crowd) -> None:
    assert crowd.scheduler.cancel(crowd.long)


def failed(crowd: Crowd) -> None:
    crowd.scheduler.fail(crowd.long, Unavailable("lost"))


def paused(crowd: Crowd) -> None:
    crowd.scheduler.pause(crowd.long, True)


@pytest.mark.parametrize("end", [cancelled, failed, paused])
@pytest.mark.parametrize("is_evicted", [False, True])
def test_deferred_questions_continue_when_the_oldest_job_no_longer_waits(
    end: Callable[[Crowd], None], is_evicted: bool
) -> None:
    crowd = Crowd().start()
    jobs = crowd.defer()
    if is_evicted:
        crowd.scheduler.contexts.evict(crowd.scheduler.contexts.get("doc"))
    end(crowd)
    crowd.scheduler.audit()
    crowd.run()
    assert crowd.scheduler.num_recomputed_tokens == (20 if is_evicted else 0)
    crowd.scheduler.cancel(crowd.long)
    crowd.check_answers(jobs)


def test_deferred_question_ends_before_it_is_resumed() -> None:
    crowd = Crowd().start()
    jobs = crowd.defer("doc", "doc", "doc")
    jobs.append(crowd.ask(2, 3, "doc", deadline=0.5))
    crowd.scheduler._begin_waiting()
    assert crowd.deferred == jobs
    assert crowd.scheduler.cancel(jobs[0])
    crowd.scheduler.audit()
    crowd.scheduler.fail(jobs[1], Unavailable("lost"))
    crowd.scheduler.audit()
    crowd.scheduler.contexts.evict(crowd.scheduler.contexts.get("doc"))
    plan = crowd.scheduler.schedule(now=1.0)
    assert plan is not None
    crowd.commit(plan)
    assert isinstance(crowd.seen[jobs[3]][-1], DeadlineExceeded)
    crowd.check_answers([jobs[2]])


@pytest.mark.parametrize("is_evicted", [False, True])
def test_context_of_deferred_questions_is_deleted(is_evicted: bool) -> None:
    crowd = Crowd().start()
    jobs = crowd.defer()
    if is_evicted:
        crowd.scheduler.contexts.evict(crowd.scheduler.contexts.get("doc"))
    crowd.scheduler.delete_context("doc")
    crowd.scheduler.audit()
    crowd.check_answers(jobs)


@pytest.mark.parametrize("is_evicted", [False, True])
@pytest.mark.parametrize("num_tokens", [20, 9])
def test_context_of_deferred_questions_is_forked(num_tokens: int, is_evicted: bool) -> None:
    crowd = Crowd().start()
    jobs = crowd.defer()
    if is_evicted:
        crowd.scheduler.contexts.evict(crowd.scheduler.contexts.get("doc"))
    crowd.scheduler.fork_context("doc", "fork", num_tokens)
    crowd.scheduler.audit()
    jobs.append(crowd.ask(2, 3, "fork"))
    crowd.scheduler._begin_waiting()
    crowd.scheduler.audit()
    assert crowd.deferred == jobs
    crowd.check_answers(jobs)


def test_document_is_appended_to_the_context_of_deferred_questions() -> None:
    crowd = Crowd(num_blocks=20, contexts=(("doc", 20), ("other", 20))).start()
    doc, other = crowd.defer("doc", "other")
    assert crowd.deferred == [doc]
    with pytest.raises(ResourceExhausted, match="running generations"):
        crowd.ingest("doc", 24, append=True)  # the long prompt would have no room beside it
    crowd.scheduler.cancel(other)
    document = crowd.ingest("doc", 4, append=True)
    crowd.scheduler._begin_waiting()
    crowd.scheduler.audit()
    assert crowd.deferred == [], "the document needs the context"
    crowd.run()
    crowd.acknowledge(document)
    crowd.check_answers([doc])


def test_context_of_deferred_questions_is_pinned() -> None:
    crowd = Crowd().start()
    jobs = crowd.defer()
    crowd.scheduler.contexts.change("doc", ContextSettings(is_pinned=True), 9.0)
    crowd.scheduler._lifecycle.mark_changed()
    crowd.scheduler._begin_waiting()
    crowd.scheduler.audit()
    assert crowd.deferred == [], "deferral cannot make room"
    crowd.run()
    assert isinstance(crowd.seen[crowd.long][-1], ResourceExhausted)
    crowd.check_answers(jobs)


@pytest.mark.parametrize("is_evicted", [False, True])
@pytest.mark.parametrize("before", [(0,), (0, None), (None,)])
def test_epoch_ends_while_questions_are_deferred(before: tuple[int | None, ...], is_evicted: bool) -> None:
    crowd = Crowd(num_blocks=30, contexts=(("doc", 80),)).start()
    jobs = crowd.defer()
    assert crowd.deferred == jobs
    if is_evicted:
        crowd.scheduler.contexts.evict(crowd.scheduler.contexts.get("doc"))
    crowd.change(*before, may_grow=before == (0, None))
    assert crowd.deferred == []
    crowd.run()
    if not crowd.scheduler.job_recovery.is_confirmed:
        crowd.scheduler.job_recovery.shrink_to_fit()
    crowd.run()
    assert len(crowd.tokens(crowd.long)) == 8
    crowd.check_answers(jobs)


def test_least_recently_used_contexts_are_deferred() -> None:
    crowd = Crowd(num_blocks=20, contexts=(("old", 20), ("new", 20), ("small", 8))).start()
    old, new, small = crowd.defer("old", "new", "small")
    assert crowd.deferred == [old]
    other = crowd.ask(2, 3, "old")
    crowd.scheduler._begin_waiting()
    assert crowd.deferred == [old, other]
    crowd.check_answers([old, new, small, other])


def test_later_questions_do_not_displace_those_that_may_begin() -> None:
    crowd = Crowd(num_blocks=20, contexts=(("a", 20), ("b", 20))).start()
    [a] = crowd.defer("a")
    assert crowd.deferred == []
    b = crowd.ask(2, 3, "b")
    crowd.scheduler._begin_waiting()
    crowd.scheduler.audit()
    assert crowd.deferred == [b]
    crowd.check_answers([a, b])


def test_contexts_that_share_windows_are_deferred_together() -> None:
    crowd = Crowd(windows=WindowSpec(reaches=(AttentionSpan(window=6),), num_blocks=64))
    crowd.scheduler.fork_context("doc", "fork")
    crowd.keep("fork", 4, append=True)
    crowd.start()
    jobs = crowd.defer("doc", "fork")
    assert crowd.deferred == jobs
    while crowd.long not in crowd.scheduler._running:
        assert crowd.step()
    assert (crowd.is_evicted("doc"), crowd.is_evicted("fork")) == (False, False)  # they are being reloaded
    assert crowd.scheduler.recovery.total
    crowd.check_answers(jobs)


def test_admission_counts_the_contexts_of_deferred_questions() -> None:
    crowd = Crowd(num_blocks=20, contexts=(("doc", 36), ("other", 28))).start()
    jobs = crowd.defer("doc")
    assert crowd.deferred == jobs
    crowd.scheduler.contexts.evict(crowd.scheduler.contexts.get("doc"))
    with pytest.raises(ResourceExhausted, match="running generations"):
        crowd.ingest("more", 20)
    crowd.check_answers(jobs)


def test_question_about_an_evicted_pinned_context_leaves_room_for_waiting_jobs() -> None:
    """The context would stay once it is reloaded."""
    crowd = Crowd()
    crowd.scheduler.contexts.evict(crowd.scheduler.contexts.get("doc"))
    crowd.scheduler.contexts.change("doc", ContextSettings(is_pinned=True), 9.0)
    crowd.start()
    with pytest.raises(ResourceExhausted, match="running generations") as caught:
        crowd.ask(2, 3, "doc")
    assert caught.value.retry_seconds
    assert crowd.is_evicted()
    crowd.run()
    assert len(crowd.tokens(crowd.long)) == 8
    crowd.check_answers([crowd.ask(2, 3, "doc")])


def test_nothing_is_deferred_before_the_turn_of_the_oldest_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be hundreds of waiting jobs, so their contexts are not counted in each step."""
    crowd = Crowd().start()
    jobs = [crowd.ask(2, 3, "doc") for _ in range(10)]
    calls: list[object] = []
    resident = Admission.resident
    monkeypatch.setattr(Admission, "resident", lambda *args: (calls.append(args), resident(*args))[1])
    for _ in range(6):
        crowd.scheduler._lifecycle.mark_changed()
        crowd.step()
    assert (crowd.deferred, calls) == ([], [])
    crowd.check_answers(jobs)


def test_refused_request_does_not_delay_a_job_that_needs_the_space_of_its_context() -> None:
    """The context is not evicted during the admission."""
    crowd = Crowd(num_blocks=14, contexts=(("a", 12), ("b", 12)), max_waiting=1, max_sequences=2)
    crowd.ask(1, 4)
    crowd.start()
    while crowd.scheduler.num_running == 2:
        plan = crowd.scheduler.schedule()
        assert plan
        crowd.commit(plan)
    with pytest.raises(ResourceExhausted, match="1 requests are waiting"):
        crowd.ask(2, 3, "a")
    assert crowd.schedule()
    assert crowd.long in crowd.scheduler._running


def test_reload_does_not_wait_for_prompts_that_came_later() -> None:
    crowd = Crowd(contexts=(("doc", 32),), max_sequences=8).start()
    crowd.scheduler.cancel(crowd.long)
    crowd.scheduler.contexts.evict(crowd.scheduler.contexts.get("doc"))
    first = iter(range(1000, 100000, 100))

    def ask_more() -> None:
        while crowd.scheduler.num_waiting < 4:
            start = next(first)
            crowd.prompt(range(start, start + 12), 8)

    for _ in range(3):
        start = next(first)
        crowd.prompt(range(start, start + 12), 8)
        crowd.step()
    question = crowd.ask(2, 3, "doc")
    while not (crowd.seen.get(question) and isinstance(crowd.seen[question][-1], Ended)):
        ask_more()
        assert crowd.step()
        assert crowd.num_jobs < 60
    crowd.check_answers([question])
