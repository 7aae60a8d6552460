"""A job, a restore or a recomputation that cannot be planned or committed fails without effect on the others."""

from collections.abc import Callable
from typing import Any

import pytest

from coordinator.engine_messages import Failed
from coordinator.kv_cache.block_placer import BlockPlacer
from coordinator.recovery.recompute import RecomputePlanner
from coordinator.scheduling.jobs import IngestJob
from coordinator.scheduling.sequences import SequenceJob
from longleaf.errors import LongleafError, ResourceExhausted, Unavailable
from longleaf.positions import AttentionSpan, WindowSpec
from tests.support.scheduling import Bench

NO_BLOCKS = ResourceExhausted(
    "blocks", "Blocks(sharded=1, windows=0) are needed, Blocks(sharded=0, windows=0) are left"
)
ERRORS = [NO_BLOCKS, AssertionError("a promise"), KeyError(7)]
WINDOWS = WindowSpec(reaches=(AttentionSpan(window=4),), num_blocks=64)


def patch_failure(
    monkeypatch: pytest.MonkeyPatch, kind: type, method: str, error: Exception, is_it: Callable[..., bool]
) -> None:
    """Patches a method to raise an error for objects that `is_it` selects."""
    original = getattr(kind, method)

    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_it(self):
            raise error
        return original(self, *args, **kwargs)

    monkeypatch.setattr(kind, method, fail)


def check_ended(bench: Bench, job: int) -> None:
    ended = bench.seen[job][-1]
    error = ended.error if isinstance(ended, Failed) else ended
    assert isinstance(error, Unavailable)
    assert "Blocks(" not in str(error), "internal details are only in the log"


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_row_that_cannot_be_placed_fails_only_its_request(
    monkeypatch: pytest.MonkeyPatch, error: Exception, place: int
) -> None:
    bench = Bench()
    jobs = [bench.ask(5, max_tokens=9) for _ in range(3)]
    for _ in range(3):
        bench.step()
    patch_failure(monkeypatch, SequenceJob, "next_row", error, lambda job: job.id == jobs[place])
    bench.run()
    check_ended(bench, jobs.pop(place))
    assert [bench.tokens(job) for job in jobs] == [bench.alone(5, 9)] * 2
    assert bench.scheduler.num_running == bench.scheduler.num_waiting == 0
    assert len(bench.scheduler.pop_faults()) == 1


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_chunk_that_cannot_be_placed_fails_only_its_document(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    bench = Bench()
    requested = bench.ask(5, max_tokens=30)
    bench.step()
    document, other = bench.ingest("doc", 100), bench.ingest("other", 100)
    patch_failure(monkeypatch, IngestJob, "next_chunk", error, lambda job: job.id == document)
    bench.run()
    check_ended(bench, document)
    assert bench.tokens(requested) == bench.alone(5, 30)
    assert "other" in bench.scheduler.contexts
    assert "doc" not in bench.scheduler.contexts
    assert not isinstance(bench.seen[other][-1], LongleafError)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_result_that_cannot_be_committed_fails_only_its_request(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    bench = Bench()
    jobs = [bench.ask(5, max_tokens=9) for _ in range(3)]
    for _ in range(2):
        bench.step()
    patch_failure(monkeypatch, SequenceJob, "append_token", error, lambda job: job.id == jobs[1])
    bench.run()
    check_ended(bench, jobs.pop(1))
    assert [bench.tokens(job) for job in jobs] == [bench.alone(5, 9)] * 2


def bench_with_evicted_contexts(windows: WindowSpec | None = None) -> Bench:
    """A bench with two evicted contexts."""
    bench = Bench(is_durable=True, windows=windows, blocks=(256, 256))
    for name in ("bad", "good"):
        job = bench.ingest(name, 40)
        bench.run()
        bench.acknowledge(job)
        bench.scheduler.contexts.evict(bench.scheduler.contexts.get(name))
    return bench


@pytest.mark.parametrize("windows", [None, WINDOWS], ids=["sharded", "replicated"])
@pytest.mark.parametrize(
    ("kind", "method"),
    [(BlockPlacer, "place_recomputed"), (BlockPlacer, "recompute_windows"), (RecomputePlanner, "commit")],
    ids=lambda x: str(x),
)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_failed_recomputation_fails_only_requests_of_its_context(
    monkeypatch: pytest.MonkeyPatch, windows: WindowSpec | None, kind: type, method: str, error: Exception
) -> None:
    bench = bench_with_evicted_contexts(windows)
    running = bench.ask(5, max_tokens=60)
    bench.step()
    requested = bench.ask(3, context="bad")
    with monkeypatch.context() as patched:
        patch_failure(patched, kind, method, error, lambda _: True)
        for _ in range(20):
            bench.step()
    assert isinstance(bench.seen[requested][-1], LongleafError)
    others = [bench.ask(3, context="good"), bench.ask(3, context="bad")]
    bench.run()
    assert bench.tokens(running) == bench.alone(5, 60)
    assert [bench.tokens(job) for job in others] == [bench.alone(3, 4)] * 2
    assert bench.scheduler.pop_faults()


def test_queued_job_that_can_never_begin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    patch_failure(monkeypatch, type(bench.scheduler), "_reserve", NO_BLOCKS, lambda _: False)
    monkeypatch.setattr(type(bench.scheduler._sharing), "reserve", lambda *_: None)
    jobs = [bench.ask(5), bench.ask(5)]
    assert bench.run() == []
    assert [isinstance(bench.seen[job][-1], ResourceExhausted) for job in jobs] == [True, True]
    monkeypatch.undo()
    again = bench.ask(5)
    bench.run()
    assert bench.tokens(again) == bench.alone(5, 4)


def test_context_that_cannot_be_activated_does_not_block_others(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_with_evicted_contexts()
    contexts = bench.scheduler.contexts
    patch_failure(monkeypatch, type(contexts), "activate", NO_BLOCKS, lambda _: False)
    activate = type(contexts).activate

    def fail(self: Any, context: Any) -> Any:
        if context.id == "good":  # the first one of them: it was used last
            raise NO_BLOCKS
        return activate(self, context)

    monkeypatch.setattr(type(contexts), "activate", fail)
    bench.scheduler.preload()
    assert (contexts.get("good").is_evicted, contexts.get("bad").is_evicted) == (True, False)
    assert len(bench.scheduler.pop_faults()) == 1


def test_blocks_are_allocated_completely_or_not_allocated() -> None:
    placer = BlockPlacer([8, 8], 4, WINDOWS)
    reservation = placer.reserve(few := placer.num_free.__class__(1, 1))
    assert reservation is not None
    calls: list[Callable[[], object]] = [
        lambda: placer.place_recomputed([(0, 8), (20, 28)], 64, reservation),
        lambda: placer.place_windows([(0, 4), (8, 12)], reservation),
        lambda: placer.grow(None, 0, 8, reservation),
        lambda: placer.advance_windows((), 0, 12, reservation, is_chunk=False),
    ]
    for call in calls:
        with pytest.raises(ResourceExhausted):
            call()
        placer.audit([])
        assert reservation.left == few
