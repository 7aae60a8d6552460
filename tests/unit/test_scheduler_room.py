"""What can never fit, who waits, and who may pass."""

import pytest

from coordinator.queue import MAX_PASSED
from longleaf.errors import InvalidArgument, ResourceExhausted
from tests.scheduling import Bench


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
