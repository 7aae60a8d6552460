"""Limits of jobs, waiting jobs, and jobs that may overtake others."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.engine_messages import Acknowledged, Ended
from coordinator.scheduling.jobs import Job, Request
from longleaf.errors import InvalidArgument, ResourceExhausted
from tests.support.scheduling import Asker, Bench


@pytest.mark.parametrize(
    ("count", "max_tokens", "context", "field", "words"),
    [
        (0, 1, None, "input", "no tokens"),
        (201, 1, None, "input", "0 tokens of context and 201 of input make 201; .*limit is 200"),
        (200, 2, None, "sampling.max_token_count", "200 of input and 2 to generate make 201, .* at most 1 can"),
        (
            150,
            60,
            None,
            "sampling.max_token_count",
            "150 of input and 60 to generate make 209, .*limit is 200 .*at most 51 can",
        ),
        (150, 1, "doc", "input", "60 tokens of context and 150 of input make 210"),
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


@pytest.mark.parametrize(("count", "max_tokens", "context"), [(200, 1, None), (150, 51, None), (140, 1, "doc")])
def test_last_token_of_an_answer_needs_no_position(count: int, max_tokens: int, context: str | None) -> None:
    bench = Bench(max_positions=200)
    bench.ingest("doc", 60)
    bench.run()
    job = bench.ask(count, max_tokens, context)
    bench.run()
    assert len(bench.tokens(job)) == max_tokens


@pytest.mark.parametrize(
    ("count", "max_tokens", "field"), [(44, 1, "input"), (20, 30, "sampling.max_token_count"), (20, 20, None)]
)
def test_limits_of_the_pool(count: int, max_tokens: int, field: str | None) -> None:
    bench = Bench(blocks=(5, 5))
    if field is None:
        bench.ask(count, max_tokens)
        bench.run()
        return
    with pytest.raises(InvalidArgument, match="the pool of all ranks has 40 tokens in blocks of 4") as caught:
        bench.ask(count, max_tokens)
    assert caught.value.field == field
    if found := re.search("at most ([0-9]+) can be generated", str(caught.value)):
        bench.ask(count, int(found[1]))
        with pytest.raises(InvalidArgument):
            bench.ask(count, int(found[1]) + 1)
    assert bool(found) == (field == "sampling.max_token_count")


@pytest.mark.parametrize(("count", "words"), [(0, "no tokens"), (41, "pool"), (201, "model's limit is 200")])
def test_limits_of_a_document(count: int, words: str) -> None:
    bench = Bench(blocks=(5, 5), max_positions=200)
    with pytest.raises(InvalidArgument, match=words) as caught:
        bench.ingest("doc", count)
    assert caught.value.field == "text"


def test_small_jobs_overtake_a_job_that_does_not_fit() -> None:
    bench = Bench(blocks=(5, 5))
    first, second, third = bench.ask(20, 10), bench.ask(20, 10), bench.ask(1, 1)
    plan = bench.schedule()
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (2, 1)
    assert plan is not None
    bench.commit(plan)
    bench.run()
    assert [len(bench.tokens(job)) for job in (first, second, third)] == [10, 10, 1]
    assert list(bench.seen) == [first, third, second]


@pytest.fixture
def busy() -> tuple[Bench, list[int]]:
    """A bench with two running answers of 40 of 100 blocks each; the second one ends later."""
    bench = Bench(blocks=(100,), max_sequences=6)
    running = [bench.ask(126, 30), bench.ask(40, 120)]
    bench.step()
    assert bench.scheduler.num_running == 2
    return bench, running


def until_ended(bench: Bench, job: int) -> None:
    while not isinstance(bench.seen[job][-1], Ended):
        assert bench.step()


def test_small_jobs_overtake_a_document_until_it_fits(busy: tuple[Bench, list[int]]) -> None:
    bench, running = busy
    document = bench.ingest("doc", 240)
    small = [bench.ask(2, 2) for _ in range(60)]
    until_ended(bench, running[0])
    assert all(isinstance(bench.seen[job][-1], Ended) for job in small)
    bench.run()
    assert bench.seen[document][-1] == Acknowledged("doc")


def test_overtaking_job_is_preempted_when_the_document_would_fit(busy: tuple[Bench, list[int]]) -> None:
    bench, running = busy
    document = bench.ingest("doc", 200)
    passing = [bench.ask(1, 39) for _ in range(2)]
    until_ended(bench, running[0])
    assert [0 < len(bench.tokens(job)) < 39 for job in passing] == [True, True]
    bench.step()
    assert document in bench.scheduler._running, "it does not wait for the rest of the other answers"
    assert list(bench.scheduler.positions()) == passing[1:], "one preemption frees enough"
    bench.run()
    assert [bench.tokens(job) for job in passing] == [bench.alone(1, 39)] * 2
    assert bench.seen[document][-1] == Acknowledged("doc")


def test_overtaking_samples_are_preempted(busy: tuple[Bench, list[int]]) -> None:
    bench, running = busy
    document = bench.ingest("doc", 216)
    passing = bench.ask(2, 34, num_samples=2)
    until_ended(bench, running[0])
    assert 0 < len(bench.tokens(passing)) < 68
    bench.step()
    assert document in bench.scheduler._running
    bench.run()
    assert len(bench.tokens(passing)) == 68


@given(
    running=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    num_tokens=st.integers(150, 240),
    small=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 40)), min_size=1, max_size=8),
    per_step=st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_document_begins_when_previous_jobs_have_ended(
    running: list[int], num_tokens: int, small: list[tuple[int, int]], per_step: int
) -> None:
    """The number of small requests does not matter."""
    bench = Bench(blocks=(40, 40), max_waiting=5000, max_sequences=8, check_every=10)
    before = [bench.ask(3, max_tokens) for max_tokens in running]
    bench.step()
    document, sizes = bench.ingest("doc", num_tokens), itertools.cycle(small)
    while not all(isinstance(bench.seen[job][-1], Ended) for job in before):
        assert bench.scheduler.num_running
        for _ in range(per_step):
            bench.ask(*next(sizes))
        bench.step()
    bench.step()
    assert document in bench.scheduler._running or document in bench.seen


def test_queue_is_bounded() -> None:
    bench = Bench(max_waiting=2, max_sequences=3)
    for _ in range(5):
        bench.ask(4)  # three of them need not wait
    with pytest.raises(ResourceExhausted, match="2 requests are waiting, which is the limit") as caught:
        bench.ask(4)
    assert caught.value.retry_seconds


def test_document_does_not_take_blocks_of_waiting_jobs() -> None:
    bench = Bench(blocks=(5, 5), max_sequences=1)
    bench.ask(4, 2)
    large = bench.ask(20, 10)
    with pytest.raises(ResourceExhausted, match="running generations") as caught:
        bench.ingest("doc", 16)  # it might come first, and stay
    assert caught.value.retry_seconds
    bench.run()
    assert len(bench.tokens(large)) == 10
    bench.ingest("doc", 16)
    bench.run()


def test_job_that_needs_blocks_of_contexts_is_refused() -> None:
    bench = Bench(blocks=(5, 5))
    bench.ingest("doc", 30)
    with pytest.raises(ResourceExhausted, match="contexts use too many of .*; delete a context") as caught:
        bench.ask(10, 4)
    assert caught.value.retry_seconds is None
    bench.run()
    with pytest.raises(ResourceExhausted, match="delete a context"):
        bench.ingest("other", 10)
    bench.ask(4, 4, "doc")
    bench.run()


def test_waiting_jobs_are_not_compared_with_each_running_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be hundreds of waiting and dozens of running jobs."""
    bench = Bench(max_sequences=8)
    for _ in range(30):
        bench.ask(3, max_tokens=20)
    bench.step()
    requested: list[Job] = []
    may_preempt = Job.may_preempt
    monkeypatch.setattr(Job, "may_preempt", lambda job, other: (requested.append(job), may_preempt(job, other))[1])
    for _ in range(5):
        bench.scheduler._lifecycle.mark_changed()
        bench.step()
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting, requested) == (8, 22, [])


def test_jobs_waiting_for_a_quota_are_not_compared_with_each_running_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the quota of one tenant would slow down the steps of all."""
    bench = Bench(max_sequences=8)
    for number in range(30):
        bench.ask(3, max_tokens=20, max_concurrent=3 if number % 2 else None, tenant="acme" if number % 2 else "bolt")
    bench.step()
    assert (bench.scheduler.num_running, bench.scheduler.usage("acme").running) == (8, 3)
    requested: list[Request] = []
    is_running = Request.is_running.fget
    assert is_running is not None
    monkeypatch.setattr(
        Request, "is_running", property(lambda request: (requested.append(request), is_running(request))[1])
    )
    bench.ask(3, max_concurrent=3, tenant="acme")
    requested.clear()
    bench.scheduler.schedule()
    assert len(requested) <= 2 * bench.scheduler.num_waiting


def test_unread_waiting_job_does_not_prevent_eviction() -> None:
    bench = Bench(blocks=(10,), is_durable=True, max_sequences=1)
    for name in ("old", "new"):
        document = bench.ingest(name, 16)
        bench.run()
        bench.acknowledge(document)
    running, waiting, unread = bench.ask(1, 2), bench.ask(30, 2), bench.ask(1, 2, "new")
    bench.scheduler.pause(unread, True)
    bench.run()
    assert [len(bench.tokens(job)) for job in (running, waiting)] == [2, 2]
    [error] = bench.seen[unread]
    assert isinstance(error, ResourceExhausted)
    assert error.subject == "stream"
    assert "is not read" in str(error)


def test_a_prompt_that_has_no_room_beside_a_context_waits_only_for_questions_that_came_before() -> None:
    bench = Asker(blocks=(15,), is_durable=True, max_sequences=1)
    document = bench.ingest("doc", 20)
    bench.run()
    bench.acknowledge(document)
    bench.ask(1, 2)
    bench.step()
    long = bench.prompt(range(100, 140), 8)
    for _ in range(100):
        while bench.scheduler.num_waiting < 3:
            bench.ask(1, 2, "doc")
        bench.step()
    assert long in bench.seen
