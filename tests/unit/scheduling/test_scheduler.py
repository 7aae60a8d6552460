"""The work of each step."""

import pytest

from coordinator.engine_messages import Admitted, Ended, Prompt
from longleaf.rank_protocol.encoding import encode
from longleaf.rank_protocol.step import Decode, PenaltyHistory, Prefill
from longleaf.sampling import SamplingParams
from longleaf.types import Progress
from tests.support.fakes.echo_model import echo_token
from tests.support.scheduling import Bench, kinds


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
    assert bench.seen[job][0] == Admitted(70, 0)
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


def test_next_plan_is_scheduled_before_the_result() -> None:
    bench = Bench()
    job = bench.ask(4, max_tokens=4)
    first, second = bench.schedule(), bench.schedule()
    assert first is not None and second is not None
    assert bench.schedule() is None, "two plans are under way"
    row = second.work.rows[0]  # type: ignore[union-attr]
    assert (row.token_ids, row.start, row.token_index) == ((), 4, 1)
    bench.commit(first)
    (placement,) = bench.scheduler.segments.placements
    assert list(placement.segment.token_ids) == [0, 1, 2, 3, bench.tokens(job)[0]]
    bench.commit(second)
    bench.run()
    assert bench.tokens(job) == bench.alone(4, 4)


def test_surplus_step_after_the_end_is_dropped() -> None:
    bench = Bench(blocks=(3,))
    end = echo_token(2, 0)
    job, waiting = bench.ask(3, max_tokens=5, ends=(end,)), bench.ask(8, max_tokens=1)
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


def test_only_one_chunk_is_in_flight() -> None:
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


def test_chunk_before_a_preemption_is_not_counted_after_it() -> None:
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


@pytest.mark.parametrize(
    ("penalty", "reported"),
    [
        ({}, None),
        ({"presence_penalty": 1.0}, PenaltyHistory((), ())),
        ({"repetition_penalty": 1.5}, PenaltyHistory(tuple(range(40)), ())),
    ],
)
def test_first_row_carries_the_penalty_history(penalty: dict[str, float], reported: PenaltyHistory | None) -> None:
    bench = Bench()
    bench.ingest("book", 40)
    bench.run()
    sampling = SamplingParams(max_tokens=3, **penalty)  # type: ignore[arg-type]
    prompt = Prompt(context="book", token_ids=(3, 3, 5) * 5, sampling=sampling)
    bench._admitted(lambda job: bench.scheduler.admit(job, prompt))
    rows = [row for plan in bench.run() if isinstance(plan.work, Decode) for row in plan.work.rows]
    assert [row.token_index for row in rows] == [0, 1, 2]
    assert [row.terms and row.terms.seen for row in rows] == [reported, None, None]


MANY = SamplingParams(
    max_tokens=6,
    stop=("a string that ends the answer",) * 16,
    stop_tokens=tuple(range(500, 564)),
    logit_bias=dict.fromkeys(range(1024), 1.5),
    repetition_penalty=1.5,
    seed=2**63,
)


def bytes_of_steps(sampling: SamplingParams, *, is_compared: bool = False, num_samples: int = 1) -> list[list[int]]:
    """The message size of each decode step: those of the answers' first tokens, and all others. One answer is
    preempted."""
    bench = Bench(max_sequences=num_samples)
    prompt = Prompt(
        context=None, token_ids=tuple(range(9)), sampling=sampling, is_compared=is_compared, num_samples=num_samples
    )
    job = bench._admitted(lambda job: bench.scheduler.admit(job, prompt))
    bench.num_jobs += num_samples - 1
    plans = []
    while (plan := bench.schedule()) is not None:
        bench.commit(plan)
        plans.append(plan)
        if len(bench.tokens(job)) == 3 * num_samples and bench.num_jobs == num_samples:
            bench.ask(4, max_tokens=1, priority=1)
    assert len(bench.tokens(job)) == 6 * num_samples
    sizes: list[list[int]] = [[], []]
    for plan in plans:
        if isinstance(plan.work, Decode) and all(row.sequence < job + num_samples for row in plan.work.rows):
            sizes[not any(row.token_ids for row in plan.work.rows)].append(len(encode(plan)))
    return sizes


@pytest.mark.parametrize(("num_samples", "is_compared"), [(1, False), (3, False), (1, True)])
def test_step_size_does_not_grow_with_sampling_settings(num_samples: int, is_compared: bool) -> None:
    plain = bytes_of_steps(SamplingParams(max_tokens=6), num_samples=num_samples)
    many = bytes_of_steps(MANY, num_samples=num_samples, is_compared=is_compared)
    assert many[1] == plain[1], "earlier history is not sent again"
    assert all(size > 1024 * 9 for size in many[0]), "history is sent when an answer begins and when it continues"
    assert len(many[0]) == len(plain[0]) >= 2


def test_stop_conditions_are_not_sent_to_ranks() -> None:
    stops = SamplingParams(max_tokens=6, stop=MANY.stop, stop_tokens=MANY.stop_tokens, ignore_end_token=True)
    assert bytes_of_steps(stops) == bytes_of_steps(SamplingParams(max_tokens=6))
