"""When nobody waits for a job any more. Times in seconds, of one clock."""

from collections.abc import Iterator


class Deadlines:
    """Deadlines by job; jobs without one are not in here."""

    def __init__(self) -> None:
        self._by_job: dict[int, float] = {}

    @property
    def next(self) -> float | None:
        """The first one that will pass."""
        return min(self._by_job.values(), default=None)

    def add(self, job_id: int, deadline: float | None) -> None:
        if deadline is not None:
            self._by_job[job_id] = deadline

    def discard(self, job_id: int) -> None:
        self._by_job.pop(job_id, None)

    def passed(self, now: float) -> list[int]:
        """Jobs whose deadline is `now` or was before."""
        return [job_id for job_id, deadline in self._by_job.items() if deadline <= now]

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_job)
