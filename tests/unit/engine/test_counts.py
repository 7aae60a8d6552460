"""The counters of an engine, on fake ranks."""

from collections import Counter

import pytest
from msgspec.structs import replace

from coordinator.engine.engine import Engine
from coordinator.engine_messages import DocumentPrompt, Prompt, SchedulingParams
from coordinator.scheduling.speculation_stats import DraftCounts
from coordinator.telemetry.counters import STEP_SECONDS, StepTimes
from longleaf.config import EngineConfig
from longleaf.rank_protocol.step import Prefill
from longleaf.sampling import SamplingParams
from longleaf.types import Drafting
from tests.support.fakes.ranks import FakeRanks
from tests.support.gated import GatedRanks, comes_to
from tests.support.running import running

pytestmark = pytest.mark.timeout(60)
CONFIG = EngineConfig(model="none", world_size=2, chunk_size=32, block_size=4, replicate_below=8)


def prompt(count: int, max_tokens: int, context: str | None = None, priority: int = 0) -> Prompt:
    sampling = SamplingParams(max_tokens=max_tokens)
    return Prompt(
        context=context,
        token_ids=tuple(range(count)),
        sampling=sampling,
        scheduling=SchedulingParams(priority=priority),
    )


async def ingest(engine: Engine, context: str, count: int = 96) -> None:
    [_ async for _ in engine.ingest(DocumentPrompt(context=context, token_ids=list(range(count))))]


def test_step_counts_in_the_first_bucket_that_fits() -> None:
    times = StepTimes()
    for seconds in (0.0, STEP_SECONDS[0], STEP_SECONDS[0] + 1e-9, STEP_SECONDS[-1] + 1):
        times.add(seconds)
    assert times.buckets == [2, 1, *[0] * (len(STEP_SECONDS) - 2), 1]
    assert times.count == 4
    assert times.seconds == sum((0.0, STEP_SECONDS[0], STEP_SECONDS[0] + 1e-9, STEP_SECONDS[-1] + 1))


async def test_every_step_counts_once_by_kind_of_work() -> None:
    ranks = FakeRanks(2, 100)
    async with running(Engine(ranks, CONFIG, max_positions=3000)) as found:
        await ingest(found.engine, "doc")
        [_ async for _ in found.engine.submit(prompt(3, 5, "doc"))]
        await ingest(found.engine, "other")
        expected = Counter(type(plan.work).__name__.lower() for plan in ranks.plans)
        assert set(expected) == {"prefill", "decode"}
        counts = found.engine.counts
        assert {kind: times.count for kind, times in counts.steps.items()} == expected
        assert counts.num_contexts == 2
        await found.engine.delete_context("other")
        assert found.engine.counts.num_contexts == 1
        assert (counts.num_preempted, counts.num_recomputed_tokens, counts.snapshot_bytes) == (0, 0, None)


async def test_output_tokens_and_rows_of_a_step_are_counted() -> None:
    async with running(Engine(FakeRanks(2, 100), CONFIG, max_positions=3000)) as found:
        for num_samples in (1, 3):
            [_ async for _ in found.engine.submit(replace(prompt(3, 5), num_samples=num_samples))]
        counts = found.engine.counts
        assert (counts.num_sampled, counts.num_sequence_steps) == (20, 20)
        assert (counts.num_drafted, counts.num_accepted) == (0, 0)
        assert found.engine.cluster().drafting == Drafting(drafted_tokens=0, accepted_tokens=0, tokens_per_step=1.0)


def test_no_steps_mean_no_tokens() -> None:
    assert DraftCounts().tokens_per_step == 0.0
    assert DraftCounts(num_sampled=9, num_sequence_steps=4).tokens_per_step == 2.25


async def test_step_duration_is_that_of_rank_0() -> None:
    ranks = GatedRanks(seconds_per_token=0.5)
    async with running(Engine(ranks, CONFIG, max_positions=3000)) as found:
        ranks.allow(100)
        await ingest(found.engine, "doc", 32)
        assert found.engine.counts.steps["prefill"].seconds == 16.0


async def test_job_preempted_by_a_higher_priority_is_counted() -> None:
    ranks = GatedRanks()
    config = EngineConfig(model="none", world_size=1, chunk_size=32, block_size=4, max_sequences=1)
    async with running(Engine(ranks, config, max_positions=3000)) as found:
        low = found.engine.submit(prompt(8, 20))
        ranks.allow(5)
        await comes_to(found.engine, lambda: sum(each.count for each in found.engine.counts.steps.values()) >= 4)
        high = found.engine.submit(prompt(8, 5, priority=1))
        ranks.allow(100)
        for stream in (low, high):
            [_ async for _ in stream]
        assert found.engine.counts.num_preempted == 1


async def test_lost_tokens_count_as_recomputed_and_not_as_preempted() -> None:
    ranks = FakeRanks(3, 100, lost_rank=1)
    async with running(Engine(ranks, CONFIG, max_positions=3000)) as found:
        await ingest(found.engine, "doc")
        resident = found.engine.get_context("doc").shares[1].tokens
        ranks.lose_at = len(ranks.plans) + 5
        stream = found.engine.submit(prompt(3, 30, "doc"))
        [_ async for _ in stream]
        recomputed = [plan.work for plan in ranks.plans if plan.epoch == 2 and isinstance(plan.work, Prefill)]
        assert found.engine.counts.num_recomputed_tokens == resident
        assert sum(len(work.token_ids) for work in recomputed) >= resident
        assert found.engine.counts.num_preempted == 0
