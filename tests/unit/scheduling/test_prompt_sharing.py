"""Prompts with a common prefix share segments, and samples share their prompt."""

from typing import Any

import pytest

from coordinator.engine_messages import Ended, SchedulingParams
from coordinator.kv_cache.block_placer import BlockCount
from longleaf.errors import InvalidArgument, ResourceExhausted
from longleaf.rank_protocol.step import Decode
from tests.support.scheduler_machine import expected_answer
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
    assert [bench.cached(job) for job in jobs] == [40, 60, 90]
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


# --- conversations ---


def converse(bench: Asker, context: str | None, num_turns: int, **options: Any) -> list[tuple[int, int]]:
    """Each turn has all questions and answers so far, as chat templates render them, and a question of 10 tokens.
    Returns the cached tokens of each turn and the most that could be cached: all but the token sampled last, the
    end of the previous turn, and the new question."""
    history, counts = list[int](), list[tuple[int, int]]()
    start = bench.scheduler.contexts.get(context).num_tokens if context else 0
    for turn in range(num_turns):
        tokens = [*history, *range(300 + 10 * turn, 310 + 10 * turn)]
        job = bench.prompt(tokens, context=context, **options)
        plans = bench.run()
        counts.append((bench.cached(job), start + max(0, len(history) - 1)))
        answer = bench.answer(job)
        assert answer == expected_answer(tokens[-1], len(answer))
        num_computed = sum(plan.num_tokens for plan in plans)
        assert num_computed <= start + len(tokens) - bench.cached(job) + len(answer) + 1  # one step runs ahead
        history = [*tokens, *answer]
    return counts


@pytest.mark.parametrize("context", ["doc", None])
@pytest.mark.parametrize("max_tokens", [6, 33])
def test_turn_computes_only_its_question_and_the_last_token(context: str | None, max_tokens: int) -> None:
    bench = Asker(blocks=(60, 60))
    if context:
        bench.ingest(context, 41)
        bench.run()
    counts = converse(bench, context, 5, max_tokens=max_tokens)
    assert all(cached == most for cached, most in counts)


def test_forks_of_a_context_share_its_conversations() -> None:
    bench = Asker(blocks=(60, 60))
    bench.ingest("doc", 41)
    bench.run()
    bench.scheduler.fork_context("doc", "fork")
    converse(bench, "doc", 2)
    again = converse(bench, "fork", 3)
    assert [cached for cached, _ in again] == [41 + 9, 41 + 23, 41 + 27]
    bench.ingest("fork", 5, append=True)
    bench.run()
    assert [cached for cached, _ in converse(bench, "fork", 2)] == [46, 46 + 13]
    bench.scheduler.delete_context("doc")
    bench.scheduler.audit()
    assert [cached for cached, _ in converse(bench, "fork", 1)] == [46 + 9]


def test_conversation_goes_with_its_context() -> None:
    """The same applies to an answer that ends after the context was deleted."""
    bench = Asker(blocks=(60, 60))
    for _ in range(2):
        bench.ingest("doc", 41)
        bench.run()
        converse(bench, "doc", 3)
        job = bench.ask(20, context="doc", max_tokens=9)
        plan = bench.schedule()
        assert plan is not None
        bench.scheduler.delete_context("doc")
        bench.commit(plan)
        bench.run()
        assert len(bench.tokens(job)) == 9
        assert bench.placer.num_free == bench.placer.num_blocks


@pytest.mark.parametrize("block_size", [4, 64])
@pytest.mark.parametrize("num_samples", [1, 2])
def test_tenants_do_not_find_the_answers_of_others(block_size: int, num_samples: int) -> None:
    """Otherwise the number of cached tokens would confirm a guessed answer."""
    for owner, reader in (("acme", "default"), ("default", "acme"), ("acme", "bolt"), ("acme", "acme")):
        bench = Asker(block_size=block_size)
        prompt = [*range(200, 250)]
        of_owner, of_reader = SchedulingParams(tenant=owner), SchedulingParams(tenant=reader)
        first = bench.prompt(prompt, max_tokens=40, num_samples=num_samples, scheduling=of_owner)
        bench.run()
        assert {one.segment.tenant for one in bench.scheduler.segments.placements} == {owner}
        answer = bench.answer(first)
        job = bench.prompt([*prompt, *answer, 7], scheduling=of_reader)
        bench.run()
        assert bench.cached(job) == (len(prompt) + len(answer) - 1 if owner == reader else 0)


def test_turn_continues_a_cancelled_answer() -> None:
    bench = Asker()
    bench.ingest("doc", 41)
    bench.run()
    tokens = [*range(300, 320)]
    job = bench.prompt(tokens, context="doc", max_tokens=30)
    for _ in range(9):
        bench.step()
    given = bench.answer(job)
    assert bench.scheduler.cancel(job)
    bench.scheduler.audit()
    later = bench.prompt([*tokens, *given, 7, 8, 9], context="doc")
    bench.run()
    assert bench.cached(later) == 41 + len(tokens) + len(given) - 1


def test_ranks_forget_a_token_that_was_computed_after_the_end() -> None:
    bench = Asker()
    answer = bench.alone(20, 2)
    job = bench.prompt(range(20), max_tokens=5, end_tokens=frozenset(answer[1:]))
    plans = [bench.step(), bench.step(), bench.schedule(), bench.schedule()]
    last, surplus = plans[2:]
    assert last is not None and surplus is not None
    bench.commit(last)
    assert bench.tokens(job) == answer
    later = bench.prompt([*range(20), *answer, 5])
    plan = bench.schedule()
    assert plan is not None
    (tail,) = (one.segment for one in bench.scheduler.segments.placements if one.segment.end == 21)
    assert plan.cut_segments == ((tail.id, 21),)
    bench.commit(surplus)
    bench.commit(plan)
    bench.run()
    assert (bench.cached(later), bench.tokens(later)) == (21, expected_answer(5, 4))


@pytest.mark.parametrize("kind", ["hidden", "compared"])
def test_keys_that_others_cannot_use_are_not_cached(kind: str) -> None:
    bench = Asker()
    bench.ingest("doc", 41)
    bench.run()
    options = {"hidden": ((3, 9),)} if kind == "hidden" else {"is_compared": True}
    tokens = [*range(300, 340)]
    for _ in range(2):
        job = bench.prompt(tokens, context="doc", **options)
        bench.run()
        assert bench.cached(job) == 41
    assert not list(bench.scheduler.segments.cached)
    bench.prompt(tokens, context="doc")
    bench.run()
    job = bench.prompt(tokens, context="doc", **options)
    bench.run()
    assert bench.cached(job) == 41


def test_evicted_context_loses_its_conversations() -> None:
    bench = Asker(blocks=(14, 14), is_durable=True)
    for context, count in (("doc", 41), ("other", 80)):
        document = bench.ingest(context, count)
        bench.run()
        bench.acknowledge(document)
        if context == "doc":
            converse(bench, "doc", 2)
            assert list(bench.scheduler.segments.cached)
    assert bench.scheduler.contexts.get("doc").is_evicted
    assert not list(bench.scheduler.segments.cached)
