"""The plans under way: made, and not yet answered."""

from collections import deque
from collections.abc import Mapping, Sequence

from coordinator.scheduling.jobs import Job
from longleaf.channel.step import Prefill, StepPlan

MAX_UNDER_WAY = 2
"""Plans that the ranks may hold: the one they execute, and the one after it."""


class Flights:
    """Plans in the order in which they were made, and the jobs they work for.

    With each job goes the number of times that it had begun: what a plan yields for a job that has ended since, or
    begun anew, does not count.
    """

    def __init__(self) -> None:
        self._flights: deque[tuple[StepPlan, tuple[tuple[Job, int], ...]]] = deque()

    @property
    def is_full(self) -> bool:
        return len(self._flights) >= MAX_UNDER_WAY

    @property
    def has_chunk(self) -> bool:
        return any(isinstance(plan.work, Prefill) for plan, _ in self._flights)

    @property
    def job_ids(self) -> set[int]:
        return {job.id for _, jobs in self._flights for job, _ in jobs}

    def add(self, plan: StepPlan, jobs: Sequence[Job]) -> None:
        self._flights.append((plan, tuple((job, job.num_begins) for job in jobs)))

    def land(self, plan: StepPlan, running: Mapping[int, Job]) -> list[Job]:
        """The jobs of `running` for which the plan counts; it must be the first one."""
        first, jobs = self._flights.popleft()
        assert first is plan, "plans are committed in order"
        return [job for job, num_begins in jobs if running.get(job.id) is job and job.num_begins == num_begins]
