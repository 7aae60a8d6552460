"""The laws that jobs and their holdings obey: every reference has an owner, every used block a segment, every promise a
job, and every job that runs something to do."""

from coordinator.blocks import Blocks, Placer
from coordinator.contexts import Contexts
from coordinator.jobs import Job, Sequence
from coordinator.segments import Segments


def check_holdings(
    segments: Segments, contexts: Contexts, placer: Placer, waiting: tuple[Job, ...], running: tuple[Job, ...]
) -> None:
    """Raises AssertionError where the books do not add up."""
    segments.check()
    contexts.check()
    placer.check(run for segment in segments for run in (*segment.runs, *segment.window_runs))
    for job in (*waiting, *running):
        job.path.check(placer.windows)
    owners: dict[int, int] = {}
    paths = [context.path for context in contexts.list()] + [job.path for job in (*waiting, *running)]
    for segment in [s for path in paths for s in path.segments] + [job.segment for job in running if job.segment]:
        owners[segment.id] = owners.get(segment.id, 0) + 1
    assert owners == {s.id: s.num_references - s.num_kept for s in segments if s.num_references > s.num_kept}
    assert placer.num_reserved == sum((job.reservation.left for job in running if job.reservation), Blocks())
    assert not any(job.segment or job.reservation for job in waiting)
    assert all(job.segment and job.reservation for job in running)


def check_jobs(waiting: tuple[Job, ...], running: tuple[Job, ...], under_way: set[int]) -> None:
    """Raises AssertionError when a job is in two places, or runs and can never be planned again."""
    ids = [job.id for job in (*waiting, *running)]
    assert len(ids) == len(set(ids))
    for job in running:
        has_rows = isinstance(job, Sequence) and (job.has_rows or job.is_paused)
        assert job.has_chunks or has_rows or job.id in under_way
