"""Probes, which only score tokens, and prompts that do not see all of their context."""

import pytest
from msgspec.structs import replace

from coordinator.engine_messages import ContinuationPoint, Ended, ProbeResult, Prompt, SchedulingParams, SpanLayout
from coordinator.kv_cache.contexts import NamedContext
from coordinator.kv_cache.token_paths import Segment, TokenPath
from coordinator.scheduling.planner import Budget
from coordinator.scheduling.scheduler import Scheduler
from coordinator.scheduling.throughput import Speeds
from longleaf.config import EngineConfig
from longleaf.errors import DeadlineExceeded, InvalidArgument, NotFound
from longleaf.positions import AttentionSpan, WindowSpec
from longleaf.rank_protocol.step import MAX_ATTRIBUTED_SPANS, Attention, Decode, Prefill, Row, StepPlan, StepResult
from longleaf.sampling import SamplingParams
from tests.support.scheduling import Bench, kinds


class ProbeBench(Bench):
    """Ranks that report, for each probe row, a value that distinguishes the rows."""

    seconds_per_probed_token = 0.0
    """Additional seconds per probed token."""

    def _result(self, plan: StepPlan) -> StepResult:
        result, work = super()._result(plan), self.sequences.complete(plan).work
        rows = work.rows if isinstance(work, Decode) else ()
        num_probed = sum(len(row.token_ids) for row in rows if row.token_index < 0)
        return replace(
            result,
            seconds=result.seconds + self.seconds_per_probed_token * num_probed,
            attention={row.sequence: (attention_of(row),) for row in rows if row.spans},
            scores={
                row.sequence: tuple(map(float, row.token_ids[-row.num_scored :])) for row in rows if row.num_scored
            },
        )

    def submit(self, prompt: Prompt) -> int:
        return self._admitted(lambda job: self.scheduler.admit(job, prompt))

    def found(self, job: int) -> ProbeResult:
        [ended] = [event for event in self.seen[job] if isinstance(event, Ended)]
        assert ended.found is not None
        return ended.found


def attention_of(row: Row) -> Attention:
    return Attention(bytes([row.start + row.num_tokens - 1]), b"", b"")


def probe(count: int, num_scored: int = 0, **changes: object) -> Prompt:
    prompt = Prompt(
        context="doc",
        token_ids=tuple(range(count)),
        sampling=SamplingParams(max_tokens=1),
        is_probe=True,
        cuts=SpanLayout(4),
    )
    return replace(prompt, num_scored=num_scored, num_reported=0 if num_scored else count, **changes)


def rows(plans: list[StepPlan]) -> list[Row]:
    return [row for plan in plans if isinstance(plan.work, Decode) for row in plan.work.rows]


@pytest.fixture
def bench() -> ProbeBench:
    bench = ProbeBench()
    bench.ingest("doc", 40)
    bench.run()
    return bench


def path_of(scheduler: Scheduler, end: int) -> ContinuationPoint:
    return ContinuationPoint(scheduler.contexts.get("doc").path.cut(end).ids, end)


@pytest.mark.parametrize(
    ("count", "num_scored", "expected"), [(7, 0, "D"), (7, 6, "D"), (20, 3, "PD"), (20, 19, "D"), (60, 40, "PD")]
)
def test_probe_is_one_row_with_its_scored_tokens(bench: ProbeBench, count: int, num_scored: int, expected: str) -> None:
    job = bench.submit(probe(count, num_scored))
    plans = bench.run()
    assert kinds(plans) == expected
    [row] = rows(plans)
    assert (row.token_index, row.num_scored) == (-1, num_scored)
    assert len(row.token_ids) >= (num_scored + 1 if num_scored else count)
    assert bench.found(job).scores == tuple(map(float, range(count - num_scored, count)))
    assert bench.found(job).attention == Attention(bytes([40 + count - 1]), b"", b"")
    assert row.spans is not None
    assert row.spans.num_rows == (0 if num_scored else count)
    assert bench.tokens(job) == []


def test_probe_reserves_no_blocks_for_an_answer() -> None:
    bench = ProbeBench(max_positions=60)
    bench.ingest("doc", 40)
    bench.run()
    bench.submit(probe(20, 5))
    bench.run()
    with pytest.raises(InvalidArgument, match="limit is 60"):
        bench.submit(probe(21, 5))


def test_concurrent_probes_are_batched(bench: ProbeBench) -> None:
    jobs = [bench.submit(probe(6, 5, hidden=((4 * i, 4 * i + 4),))) for i in range(5)]
    [plan] = bench.run()
    assert [row.hidden for row in rows([plan])] == [((4 * i, 4 * i + 4),) for i in range(5)]
    assert all(len(bench.found(job).scores) == 5 for job in jobs)


@pytest.mark.parametrize(
    ("chunk_size", "seconds", "expected"),
    [(4096, 1e-6, [1, 5, 4]), (512, 1e-6, [1, 2, 2, 2, 2, 1]), (4096, 1e-3, [1] * 10)],
)
def test_probes_take_turns_beside_answers(chunk_size: int, seconds: float, expected: list[int]) -> None:
    """The first one runs separately because the speed of probes is not known before."""
    bench = ProbeBench(blocks=(3000, 3000), chunk_size=chunk_size)
    bench.seconds_per_probed_token = seconds
    bench.ingest("doc", 40)
    bench.run()
    answer = bench.ask(3, max_tokens=20)
    bench.step()
    jobs = [bench.submit(probe(201, 200)) for _ in range(10)]
    plans = bench.run()
    steps = [[row for row in rows([plan]) if row.num_scored] for plan in plans]
    assert [len(step) for step in steps if step] == expected
    assert all(len(bench.found(job).scores) == 200 for job in jobs)
    decodes = [plan for plan in plans if isinstance(plan.work, Decode)]
    assert all(any(row.sequence == answer for row in rows([plan])) for plan in decodes[:19]), "it missed no step"


def test_probe_size_adapts_if_other_rows_get_faster() -> None:
    """Earlier steps without probes were slow due to many rows; there are no such steps now."""
    speeds, row = Speeds(), Row(1, (), 0, (7,), (), 0)
    budget = Budget(EngineConfig(model="none", target_itl_ms=100.0, block_size=16), 1, speeds)
    speeds.measure(StepPlan(1, 1, Decode((row,))), 0.2)
    taken = list[float]()
    for step in range(2, 60):
        read = replace(row, sequence=2, token_ids=tuple(range(budget.probe_size(is_alone=False))), token_index=-1)
        taken.append(0.01 + 0.001 * len(read.token_ids))
        speeds.measure(StepPlan(1, step, Decode((row, read))), taken[-1])
    assert max(taken) <= 0.2


def test_sequences_take_turns_if_their_spans_exceed_a_result(bench: ProbeBench) -> None:
    cuts = SpanLayout(4, num_spans=MAX_ATTRIBUTED_SPANS // 2)
    prompt = Prompt(context="doc", token_ids=(1, 2), sampling=SamplingParams(max_tokens=6), cuts=cuts)
    jobs = [bench.submit(prompt) for _ in range(5)]
    plain = bench.ask(2, max_tokens=15)
    plans = bench.run()
    reported = [[row.sequence for row in rows([plan]) if row.sequence != plain] for plan in plans]
    assert {len(step) for step in reported[:12]} == {2}, "each step reports as many spans as fit"
    assert max(map(len, reported)) == 2
    assert [len(bench.tokens(job)) for job in jobs] == [6] * 5
    assert all({*jobs} == {job for step in reported[i : i + 3] for job in step} for i in range(10))
    assert all(any(row.sequence == plain for row in rows([plan])) for plan in plans[:15]), "it missed no step"


def test_hidden_tokens_stay_hidden_in_chunks_and_after_preemption() -> None:
    bench = ProbeBench(blocks=(30,), max_sequences=1)
    bench.ingest("doc", 40)
    bench.run()
    hidden = ((3, 9), (11, 12))
    prompt = Prompt(
        context="doc",
        token_ids=tuple(range(12)),
        sampling=SamplingParams(max_tokens=6),
        hidden=hidden,
        cuts=SpanLayout(4),
    )
    job = bench.submit(prompt)
    first = [bench.step() for _ in range(4)]
    bench.submit(probe(5, 2, scheduling=SchedulingParams(priority=1)))
    plans = [plan for plan in [*first, *bench.run()] if plan is not None]
    works = [plan.work for plan in plans]
    chunks = [work for work in works if isinstance(work, Prefill)]
    assert len(chunks) == 2, "it was preempted and recomputed"
    assert {chunk.hidden for chunk in chunks} == {hidden}
    begins = [row for row in rows(plans) if row.path and row.token_index >= 0]
    assert len(begins) == 2
    assert {row.hidden for row in begins} == {hidden}
    assert {row.spans.prompt_end for row in begins if row.spans} == {52}
    positions = [each.means[0] for event in bench.seen[job] for each in getattr(event, "attention", ())]
    assert positions == [51 + i for i in range(6)], "each token is reported once, by the row that produced it"


def test_probe_continues_in_the_context_at_its_start(bench: ProbeBench) -> None:
    beginning = path_of(bench.scheduler, 40)
    bench.ingest("doc", 8, append=True)
    bench.run()
    job = bench.submit(probe(3, 2, beginning=beginning))
    [row] = rows(bench.run())
    assert row.start == 40
    assert len(row.path) == 2
    assert bench.found(job).scores
    bench.submit(probe(3, 2, beginning=path_of(bench.scheduler, 44)))
    [row] = rows(bench.run())
    assert (row.start, len(row.path)) == (44, 3)
    bench.scheduler.delete_context("doc")
    bench.ingest("doc", 48)
    bench.run()
    with pytest.raises(NotFound):
        bench.submit(probe(3, 2, beginning=beginning))


@pytest.mark.parametrize(
    "windows", [None, WindowSpec(reaches=(AttentionSpan(8),), num_blocks=60)], ids=["sharded", "replicated"]
)
def test_prompt_continues_at_the_end_of_an_evicted_context(windows: WindowSpec | None) -> None:
    """As after a restart or an import: none of its keys is resident yet, including those of windows."""
    bench = ProbeBench(windows=windows, blocks=(100, 100))
    path, ends = TokenPath(), (24, 40)
    for number, end in enumerate(ends):
        segment = Segment(number, path)
        segment.extend(range(path.end, end))
        bench.scheduler.segments.adopt(segment)
        path = segment.path
    record = replace(NamedContext.new("doc", 1.0, 100).record, segment=1, num_tokens=path.end, ends=ends)
    context = NamedContext(record, path)
    bench.scheduler.contexts.adopt(context)
    assert bench.scheduler.segments.placements.evicted(context.path)
    for end in ends:
        job = bench.submit(probe(3, beginning=path_of(bench.scheduler, end), is_probe=False, cuts=None))
        bench.run()
        assert bench.tokens(job)
    with pytest.raises(NotFound):
        bench.submit(probe(3, beginning=ContinuationPoint((1,), 40)))


@pytest.mark.parametrize(("hidden", "field"), [(((0, 41),), "hidden[0]"), (((0, 1), (39, 41)), "hidden[1]")])
def test_only_context_tokens_can_be_hidden(bench: ProbeBench, hidden: tuple[tuple[int, int], ...], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        bench.submit(probe(3, 2, hidden=hidden))
    assert caught.value.field == field


def test_estimated_cost_does_not_end_a_probe_before_its_deadline(bench: ProbeBench) -> None:
    bench.scheduler.speeds.job.add(100.0, 1)
    scheduling = SchedulingParams(deadline=50.0)
    jobs = [bench.submit(probe(6, 5, scheduling=scheduling)) for _ in range(3)]
    bench.run()
    assert all(len(bench.found(job).scores) == 5 for job in jobs)
    late = bench.submit(probe(6, 5, scheduling=scheduling))
    bench.scheduler.schedule(now=51.0)
    [(job, outcome)] = bench.scheduler.pop_outcomes()
    assert (job, type(outcome)) == (late, DeadlineExceeded)
