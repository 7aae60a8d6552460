"""Prompts with a common prefix share segments, and samples share their prompt."""

import pytest

from coordinator.engine_messages import Ended
from coordinator.kv_cache.block_placer import BlockCount
from longleaf.errors import InvalidArgument, ResourceExhausted
from longleaf.rank_protocol.step import Decode
from tests.support.scheduling import Asker, kinds


def test_repeated_prompt_computes_only_its_last_token() -> None:
    bench = Asker()
    first = bench.prompt(range(70))
    bench.run()
    again = bench.prompt(range(70))
    plans = bench.run()
    assert kinds(plans) == "DDDD"
    assert isinstance(plans[0].work, Decode)
    assert (plans[0].work.rows[0].start, plans[0].work.rows[0].token_ids) == (69, (69,))
    assert bench.answer(again) == bench.answer(first)
    assert (bench.cached(first), bench.cached(again)) == (0, 69)
    ended = bench.seen[again][-1]
    assert isinstance(ended, Ended)
    assert (ended.prompt_tokens, ended.cached_tokens, ended.completion_tokens) == (70, 69, 4)


@pytest.mark.parametrize(
    ("same", "length", "cached", "expected"),
    [
        (50, 70, 50, "PDDDD"),
        (66, 70, 66, "DDDD"),  # a short remainder is one row
        (4, 70, 4, "PPPDDDD"),  # chunks of 32 after the first block
        (3, 70, 0, "PPPDDDD"),  # less than a block is not matched
        (69, 300, 69, "PPPPPPPPDDDD"),
        (5, 6, 5, "DDDD"),
    ],
)
def test_prompt_continues_after_a_common_prefix(same: int, length: int, cached: int, expected: str) -> None:
    bench = Asker()
    bench.prompt(range(70))
    bench.run()
    job = bench.prompt([*range(same), *range(500, 500 + length - same)])
    plans = bench.run()
    assert (bench.cached(job), kinds(plans)) == (cached, expected)
    others = Asker()
    alone = others.prompt([*range(same), *range(500, 500 + length - same)])
    others.run()
    assert bench.answer(job) == others.answer(alone)
    if "P" in expected:
        assert bench.read(plans) == length - 1 - cached


def test_prompts_build_on_each_other_and_on_contexts() -> None:
    bench = Asker(blocks=(200, 200))
    bench.ingest("doc", 40)
    bench.run()
    jobs: list[int] = []
    for count in (60, 90, 120):
        jobs.append(bench.prompt(range(count)))
        bench.run()
    assert [bench.cached(job) for job in jobs] == [40, 59, 89]
    bench.scheduler.delete_context("doc")
    last = bench.prompt(range(120))
    bench.run()
    assert bench.cached(last) == 119
    assert sum(bench.scheduler.segments.tokens_by_rank()) == 0


def test_prompt_matches_tokens_retained_only_for_a_fork() -> None:
    bench = Asker()
    bench.ingest("doc", 40)
    bench.run()
    bench.scheduler.fork_context("doc", "fork", 10)
    bench.scheduler.delete_context("doc")
    job = bench.prompt(range(50))
    bench.run()
    assert bench.cached(job) == 40
    assert bench.scheduler.contexts.get("fork").num_tokens == 10


def test_cached_prompt_does_not_replace_an_ingest() -> None:
    bench = Asker()
    bench.prompt(range(60))
    bench.run()
    bench.ingest("doc", 50)
    plans = bench.run()
    assert bench.read(plans) == 50
    job = bench.ask(5, context="doc")
    bench.run()
    assert bench.cached(job) == 50


def test_cached_segments_are_evicted_in_order_of_last_use() -> None:
    bench = Asker(blocks=(15, 15))  # capacity of 120 tokens
    starts = [0, 100, 200]
    for start in starts:
        bench.prompt(range(start, start + 33), max_tokens=1)
        bench.run()
    bench.prompt(range(33), max_tokens=1)
    bench.run()
    assert bench.scheduler.segments.num_reclaimable == BlockCount(24)
    bench.prompt(range(300, 333), max_tokens=1)  # 9 blocks, of which 6 are free
    bench.run()
    cached: list[int] = []
    for start in (0, 200, 300):
        job = bench.prompt(range(start, start + 33), max_tokens=1)
        bench.run()
        cached.append(bench.cached(job))
    assert cached == [32, 32, 32]
    gone = bench.prompt(range(100, 133), max_tokens=1)
    bench.run()
    assert bench.cached(gone) == 0


def test_cached_segments_do_not_block_new_jobs() -> None:
    bench = Asker(blocks=(5, 5))
    bench.prompt(range(33), max_tokens=1)
    bench.run()
    assert (bench.scheduler.segments.num_reclaimable, bench.placer.num_free) == (BlockCount(8), BlockCount(2))
    bench.ingest("doc", 36)
    assert bench.schedule() is not None
    assert bench.scheduler.num_waiting == 0


def test_large_cached_segment_is_evicted_for_a_prompt_that_needs_little_of_it() -> None:
    bench = Asker(blocks=(5, 5))
    bench.prompt(range(33), max_tokens=1)
    bench.run()
    job = bench.prompt([*range(12), *range(500, 516)], max_tokens=4)  # 8 blocks for itself, 13 with the cached segment
    bench.run()
    assert bench.cached(job) == 0
    assert len(bench.answer(job)) == 4


def test_samples_share_the_prompt_and_differ_in_their_seeds() -> None:
    bench = Asker()
    job = bench.prompt(range(41), max_tokens=3, num_samples=3, seed=2**64 - 1)
    plans = bench.run()
    assert kinds(plans) == "PPDDD"
    assert bench.read(plans) == 40
    work = plans[2].work
    assert isinstance(work, Decode)
    assert [(row.path[:-1], row.start, row.token_ids) for row in work.rows] == [((0,), 40, (40,))] * 3
    assert len({row.path[-1] for row in work.rows}) == len({row.sequence for row in work.rows}) == 3
    assert [row.terms and row.terms.sampling.seed for row in work.rows] == [2**64 - 1, 0, 1]
    assert bench.answer(job, 0) == bench.answer(job, 1) == bench.answer(job, 2)
    ends = [event.sample for event in bench.seen[job] if isinstance(event, Ended)]
    assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize(("count", "expected"), [(1, "DDD"), (2, "PDDD"), (7, "PDDD")])
def test_samples_of_a_short_prompt(count: int, expected: str) -> None:
    bench = Asker()
    job = bench.prompt(range(count), max_tokens=3, num_samples=2)
    assert kinds(bench.run()) == expected
    assert [len(bench.answer(job, sample)) for sample in range(2)] == [3, 3]


def test_blocks_of_samples_are_reserved_exactly() -> None:
    bench = Asker(blocks=(10, 6))  # 10 for the prompt and 3 x 2 for answers of 5 tokens (the last takes no slot)
    job = bench.prompt(range(41), max_tokens=5, num_samples=3)
    with pytest.raises(
        InvalidArgument,
        match="3 times 9 to generate make 65, .*; the pool of all ranks has 64",
    ) as caught:
        bench.prompt(range(41), max_tokens=9, num_samples=3)
    assert caught.value.field == "sample_count"
    bench.run()
    assert [len(bench.answer(job, sample)) for sample in range(3)] == [5, 5, 5]


def test_samples_count_as_sequences() -> None:
    bench = Asker(max_sequences=4)
    for wrong in (0, 5):
        with pytest.raises(InvalidArgument, match="not between 1 and 4") as caught:
            bench.prompt(range(9), num_samples=wrong)
        assert caught.value.field == "sample_count"
    first, second = bench.prompt(range(9), num_samples=3), bench.prompt(range(20, 29), num_samples=2)
    plan = bench.schedule()
    assert plan is not None
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (1, 1)
    bench.commit(plan)
    bench.run()
    assert [len(bench.answer(first, sample)) for sample in range(3)] == [4, 4, 4]
    assert [len(bench.answer(second, sample)) for sample in range(2)] == [4, 4]


def test_sample_may_end_before_the_others() -> None:
    bench = Asker()
    job = bench.prompt(range(41), max_tokens=6, num_samples=3)
    assert not bench.scheduler.cancel_sample(job, 1), "the prompt is not read yet"
    for _ in range(3):
        plan = bench.schedule()
        assert plan is not None
        bench.commit(plan)
    assert bench.scheduler.cancel_sample(job, 1)
    assert bench.scheduler.cancel_sample(job, 0)
    assert not bench.scheduler.cancel_sample(job, 1)
    bench.scheduler.audit()
    bench.run()
    assert [len(bench.answer(job, sample)) for sample in range(3)] == [1, 1, 6]


def test_cancel_ends_all_samples() -> None:
    bench = Asker()
    job = bench.prompt(range(41), max_tokens=6, num_samples=3)
    for _ in range(3):
        plan = bench.schedule()
        assert plan is not None
        bench.commit(plan)
    assert bench.scheduler.cancel(job)
    bench.scheduler.audit()
    assert bench.schedule() is None
    assert (bench.scheduler.num_running, sum(bench.scheduler.segments.tokens_by_rank())) == (0, 0)


def test_request_that_does_not_fit_beside_contexts_is_refused() -> None:
    bench = Asker(blocks=(5, 5))
    bench.ingest("doc", 30)
    bench.run()
    bench.prompt(range(5), max_tokens=1)
    bench.run()
    with pytest.raises(ResourceExhausted, match="contexts use too many"):
        bench.prompt(range(10), max_tokens=4)
