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
from coordinator.scheduling.sequences import SequenceJob


def audit_placements(
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
    placements = segments.placements
    placer.audit(
        run for placement in placements for run in (*placement.runs, *placement.window_runs, *placement.incoming)
    )
    jobs = (*waiting, *running)
    for job in jobs:
        placements.audit(job.request.origin)
        placements.audit(job.prefill.path)
    owners: dict[int, int] = {}
    paths = [context.path for context in contexts.list()] + [job.prefill.path for job in jobs]
    for segment in [s for path in paths for s in path.segments] + [job.tail.segment for job in running]:
        owners[segment.id] = owners.get(segment.id, 0) + 1
    assert owners == {
        h.segment.id: h.num_references - h.num_cache_references
        for h in placements
        if h.num_references > h.num_cache_references
    }
    places = [(context.path, end) for context in contexts.list() for end in context.ends]
    places += [(path, path.end) for job in jobs for path in (job.request.origin, job.prefill.path)]
    places += recovery.frontiers
    places += [(one.segment.before, one.segment.start) for one in placements if one.is_evicted]
    assert not any(job.is_deferred for job in running)
    idle = [context.path for context in contexts.list() if context.is_evicted]
    idle += [job.request.origin for job in waiting if job.is_deferred]
    evicted = Counter(s.id for path in idle for s in path.segments)
    assert evicted == Counter(
        {one.segment.id: one.num_idle_references for one in placements if one.num_idle_references}
    )
    _audit_seams(placements, placer, [*places, *((segment.path, segment.end) for segment in segments.cached)])
    loss_reservations = [placement.loss.reservation for placement in placements.with_losses if placement.loss]
    reservations = [*(job.tail.reservation for job in running), *(one for one in loss_reservations if one)]
    assert placer.num_reserved == sum((one.left for one in reservations), recovery.num_reserved)


def _audit_seams(placements: SegmentPlacements, placer: BlockPlacer, places: Iterable[tuple[TokenPath, int]]) -> None:
    """Asserts that each position holds the windows before it, and that no other windows of sealed segments are held,
    except during recomputation: the first block of each run is visible."""
    resident: dict[int, Counter[int]] = {}
    for path, end in places:
        for segment in path.seen(end, placer.windows):
            resident.setdefault(segment.id, Counter())[end] += 1
    assert resident == {placement.segment.id: placement.seams for placement in placements if placement.seams}
    for placement in placements:
        if placer.windows and placement.segment.is_sealed and placement.window_runs and placement.loss is None:
            first = placer.windows.first(min(placement.seams))
            assert all(min(run.start + placer.window_block_size, run.end) > first for run in placement.window_runs)


def audit_jobs(waiting: tuple[Job, ...], running: tuple[Job, ...], under_way: set[int]) -> None:
    """Raises AssertionError when a job is queued twice, or runs and can never be planned again."""
    ids = [job.id for job in (*waiting, *running)]
    assert len(ids) == len(set(ids))
    assert all(job.is_running for job in running)
    assert not any(job.is_running for job in waiting)
    for job in running:
        has_rows = isinstance(job, SequenceJob) and (job.has_rows or job.request.is_paused)
        if not isinstance(job, SequenceJob) and job.prefill.is_over:
            continue  # it waits until it is durable
        assert job.prefill.has_chunks or has_rows or job.id in under_way or not job.tail.is_ready
