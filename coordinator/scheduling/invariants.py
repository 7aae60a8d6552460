"""Invariants of jobs and placements: each reference has an owner, each used block a segment, each reservation a job,
and each running job work to do."""

from collections import Counter
from collections.abc import Iterable

from coordinator.kv_cache.block_placer import BlockPlacer
from coordinator.kv_cache.contexts import ContextTable
from coordinator.kv_cache.segment_placement import SegmentPlacements
from coordinator.kv_cache.segments import SegmentStore
from coordinator.kv_cache.token_paths import TokenPath
from coordinator.recovery.recovery import RecoveryManager
from coordinator.scheduling.jobs import Job
from coordinator.scheduling.sequences import Sequence


def audit_holdings(
    segments: SegmentStore,
    contexts: ContextTable,
    placer: BlockPlacer,
    recovery: RecoveryManager,
    waiting_and_running: tuple[tuple[Job, ...], tuple[Job, ...]],
) -> None:
    """Raises AssertionError where an invariant does not hold."""
    waiting, running = waiting_and_running
    segments.audit()
    contexts.audit()
    holdings = segments.holdings
    placer.audit(run for holding in holdings for run in (*holding.runs, *holding.window_runs, *holding.incoming))
    jobs = (*waiting, *running)
    for job in jobs:
        holdings.audit(job.request.origin)
        holdings.audit(job.reading.path)
    owners: dict[int, int] = {}
    paths = [context.path for context in contexts.list()] + [job.reading.path for job in jobs]
    for segment in [s for path in paths for s in path.segments] + [job.tail.segment for job in running]:
        owners[segment.id] = owners.get(segment.id, 0) + 1
    assert owners == {
        h.segment.id: h.num_references - h.num_cache_references
        for h in holdings
        if h.num_references > h.num_cache_references
    }
    places = [(context.path, end) for context in contexts.list() for end in context.ends]
    places += [(path, path.end) for job in jobs for path in (job.request.origin, job.reading.path)]
    places += recovery.frontiers
    places += [(one.segment.before, one.segment.start) for one in holdings if one.is_evicted]
    evicted = Counter(s.id for context in contexts.list() if context.is_evicted for s in context.path.segments)
    assert evicted == Counter({one.segment.id: one.num_idle_references for one in holdings if one.num_idle_references})
    _audit_seams(holdings, placer, [*places, *((segment.path, segment.end) for segment in segments.cached)])
    promised = [holding.loss.promise for holding in holdings.with_losses if holding.loss]
    reservations = [*(job.tail.reservation for job in running), *(one for one in promised if one)]
    assert placer.num_reserved == sum((one.left for one in reservations), recovery.num_promised)


def _audit_seams(holdings: SegmentPlacements, placer: BlockPlacer, places: Iterable[tuple[TokenPath, int]]) -> None:
    """Asserts that each position holds the windows before it, and that no other windows of sealed segments are held,
    except during recomputation: the first block of each run is visible."""
    resident: dict[int, Counter[int]] = {}
    for path, end in places:
        for segment in path.seen(end, placer.windows):
            resident.setdefault(segment.id, Counter())[end] += 1
    assert resident == {holding.segment.id: holding.seams for holding in holdings if holding.seams}
    for holding in holdings:
        if placer.windows and holding.segment.is_sealed and holding.window_runs and holding.loss is None:
            first = placer.windows.first(min(holding.seams))
            assert all(min(run.start + placer.block_size, run.end) > first for run in holding.window_runs)


def audit_jobs(waiting: tuple[Job, ...], running: tuple[Job, ...], under_way: set[int]) -> None:
    """Raises AssertionError when a job is queued twice, or runs and can never be planned again."""
    ids = [job.id for job in (*waiting, *running)]
    assert len(ids) == len(set(ids))
    assert all(job.is_running for job in running)
    assert not any(job.is_running for job in waiting)
    for job in running:
        has_rows = isinstance(job, Sequence) and (job.has_rows or job.request.is_paused)
        if not isinstance(job, Sequence) and job.reading.is_over:
            continue  # it waits until it is durable
        assert job.reading.has_chunks or has_rows or job.id in under_way or not job.tail.is_ready
